"""Hosts for tests: network namespaces with a name, an address and a link that can be cut.

    with Hosts(2) as hosts:
        hosts.run(0, ["ping", "-c", "1", hosts.names[1]])
        hosts.cut(1)        # packets from and to it are lost
        hosts.mend(1)
        hosts.kill(1)       # SIGKILL to all that runs there

A host has loopback, ``lan`` with address 10.77.0.(number + 1), a host name of its own, and an
/etc/hosts that knows the others, as host0, host1 ... too. File systems and process ids are shared.
Nothing of the machine's own network can be reached from there, and the hosts not from it. Needs
root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

WIRE = Path(__file__).with_name("wire.py")
#: Seconds that a packet is held: with what the wire itself takes, a round trip takes 0.2 ms.
DELAY = 1e-5
_MTU = 65_000  # as if segments were put together by the network card
_ETC = Path("/etc/netns")
_numbers = count()
_SECONDS = 30


def missing() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip (package iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    tried = f"lgt{os.getpid()}x{next(_numbers)}h0"
    if subprocess.run(["ip", "netns", "add", tried], capture_output=True, check=False).returncode:
        return "network namespaces can't be made here"
    _ip("netns", "del", tried)
    return None


def _ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS
    ).stdout


class Hosts:
    """Network namespaces that can reach one another, and nothing else.

    Args:
        number: how many hosts; at most 200.
        delay: seconds that each packet is held.

    Attributes:
        names: of the hosts, which are their namespaces' and host names too.
        addresses: of the hosts.
    """

    def __init__(self, number: int, delay: float = DELAY) -> None:
        key = f"lgt{os.getpid()}x{next(_numbers)}h"
        self.names = [f"{key}{host}" for host in range(number)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(number)]
        self._delay = delay
        self._wire: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        both = list(zip(self.names, self.addresses, strict=True))
        known = "".join(
            f"{address} {name} host{number}\n" for number, (name, address) in enumerate(both)
        )
        for name in self.names:
            _ip("netns", "add", name)
            (_ETC / name).mkdir(parents=True)
            (_ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        self._wire = subprocess.Popen(
            [sys.executable, "-I", str(WIRE), str(self._delay), *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered("ready")
        for name, address in both:
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "lan")
            _ip("-n", name, "link", "set", "lan", "mtu", str(_MTU), "up")

    def _answered(self, word: str) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        line = self._wire.stdout.readline().strip()
        assert line == word, f"the wire between the hosts says {line!r}"

    # -- commands ------------------------------------------------------------------------------

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host."""
        name = self.names[host]
        # not ``ip netns exec``, which mounts another /sys, without control groups
        script = f'mount --bind {_ETC / name}/hosts /etc/hosts && hostname {name} && exec "$@"'
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command]
        return ["nsenter", f"--net=/run/netns/{name}", *inside]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; options are Popen's. It ends with the hosts at the latest."""
        process = subprocess.Popen(self.command(host, command), **options)
        self._started.append(process)
        return process

    def run(
        self,
        host: int,
        command: Sequence[str],
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host until it ends; what it writes is captured.

        Args:
            environment: variables to add to this process's.

        Raises:
            subprocess.TimeoutExpired: it took longer; it was killed.
        """
        process = self.start(
            host,
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    # -- what may happen to hosts --------------------------------------------------------------

    def cut(self, host: int) -> None:
        """From now on all packets from and to a host are lost."""
        self._tell(f"cut {host}")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self._tell(f"mend {host}")

    def _tell(self, words: str) -> None:
        assert self._wire is not None
        assert self._wire.stdin is not None
        self._wire.stdin.write(f"{words}\n")
        self._wire.stdin.flush()
        self._answered("done")

    def processes(self, host: int) -> list[int]:
        """The ids of all processes that run on a host, without what its packets go through."""
        wire = None if self._wire is None else self._wire.pid
        pids = map(int, _ip("netns", "pids", self.names[host]).split())
        return [pid for pid in pids if pid != wire]

    def kill(self, host: int) -> None:
        """End all that runs on a host at once, as if its power had gone; its packets, too."""
        self.cut(host)
        self._kill(host)

    def _kill(self, host: int) -> None:
        until = time.monotonic() + _SECONDS
        while (pids := self.processes(host)) and time.monotonic() < until:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()  # ours would stay on as zombies

    def sent(self, host: int) -> int:
        """Bytes that a host has sent to others so far, with all headers."""
        name = self.names[host]
        shown = _ip("netns", "exec", name, "cat", "/sys/class/net/lan/statistics/tx_bytes")
        return int(shown)

    def close(self) -> None:
        """End all that runs there, and remove the hosts. Idempotent."""
        there = [name for name in self.names if Path(f"/run/netns/{name}").exists()]
        for name in there:
            self._kill(self.names.index(name))
        for process in self._started:
            process.wait(_SECONDS)
            for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
                stream.close()
        self._started.clear()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.communicate(timeout=_SECONDS)
        for name in self.names:
            _remove(name)


def _remove(name: str) -> None:
    if Path(f"/run/netns/{name}").exists():
        _ip("netns", "del", name)
    with suppress(FileNotFoundError):
        (_ETC / name / "hosts").unlink()
        (_ETC / name).rmdir()
    with suppress(OSError):  # others' hosts lie there
        _ETC.rmdir()


@contextmanager
def hosts_or_skip(number: int, delay: float = DELAY) -> Iterator[Hosts]:
    """Hosts, or a skipped test that says what is missing here."""
    if why := missing():
        pytest.skip(why)
    with Hosts(number, delay) as hosts:
        yield hosts
