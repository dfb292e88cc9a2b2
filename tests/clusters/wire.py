"""The wire between hosts of tests: a process that carries packets between network namespaces.

    python -m tests.clusters.wire SECONDS NAMESPACE...

Each namespace gets a TUN device ``lan``; a packet leaves through another one SECONDS after it came,
as with ``tc netem delay``, which many kernels are built without. Packets of a host that is cut
off are lost without a word, as with a cable that is pulled. Commands come by standard input, a
line each: ``cut 1``, ``mend 1``; its end is the wire's end. What it answers: ``ready``, then
``done`` for each command.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_TIMERSLACK = 29
_MOST_BYTES = 65_536
_DESTINATION = 19  # where the last byte of an IPv4 packet's destination lies
_AT_ONCE = 64  # packets of one host before the others' turn

_libc = ctypes.CDLL(None, use_errno=True)


def open_device(namespace: str) -> int:
    """A TUN device ``lan`` in a namespace, which goes with its descriptor."""
    with open(f"/run/netns/{namespace}") as entered:
        if _libc.setns(entered.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"lan", _IFF_TUN | _IFF_NO_PI))
    return device


class Wire:
    """Devices, and the packets on their way between them."""

    def __init__(self, seconds: float, devices: list[int]) -> None:
        self.seconds, self.devices = seconds, devices
        self.is_cut: set[int] = set()
        self._way: deque[tuple[float, int, bytes]] = deque()
        self._poller = select.epoll()
        for device in (0, *devices):
            self._poller.register(device, select.EPOLLIN)
        self._host_of = {device: host for host, device in enumerate(devices)}

    def carry(self) -> None:
        """Until standard input ends."""
        while True:
            self._deliver()
            for device, _ in self._poller.poll(self._wait()):
                if device == 0:
                    if not self._obey():
                        return
                else:
                    self._take(device)

    def _wait(self) -> float | None:
        """How long to wait for packets; epoll knows only milliseconds, so less is waited here."""
        if not self._way:
            return None
        left = self._way[0][0] - time.perf_counter()
        if left > 0:
            # a packet that comes meanwhile is noted so much late: at most the delay
            select.select(self.devices, [], [], left)
        return 0

    def _take(self, device: int) -> None:
        host = self._host_of[device]
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(device, _MOST_BYTES)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4 or host in self.is_cut:
                continue
            target = packet[_DESTINATION] - 1
            if 0 <= target < len(self.devices) and target not in self.is_cut:
                self._way.append((time.perf_counter() + self.seconds, target, packet))

    def _deliver(self) -> None:
        now = time.perf_counter()
        while self._way and self._way[0][0] <= now:
            _, target, packet = self._way.popleft()
            if target not in self.is_cut:
                try:
                    os.write(self.devices[target], packet)
                except OSError:  # the device is down: lost, as on any wire
                    continue

    def _obey(self) -> bool:
        """Do what standard input says; False at its end."""
        text = os.read(0, 4096).decode()
        for line in text.splitlines():
            word, host = line.split()
            (self.is_cut.add if word == "cut" else self.is_cut.discard)(int(host))
            print("done", flush=True)
        return bool(text)


def main() -> None:
    _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    wire = Wire(float(sys.argv[1]), [open_device(name) for name in sys.argv[2:]])
    print("ready", flush=True)
    wire.carry()


if __name__ == "__main__":
    main()
