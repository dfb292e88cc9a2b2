"""Another user of the machine, who tries whatever a client and its workers listen on.

    python stranger.py CLIENT_PID

Started as root, which alone can tell whose a socket is. Only that part stays root: what it finds is
told to a child that has become nobody, and knocks. Ends with its standard input, and says what it
has done as JSON.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

NOBODY = 65534
FLOOD = 1_200  # connections at first, which are held open as long as can be
AGAIN = 20
HELD = 3_000
LISTENING_TCP, LISTENING_UNIX = "0A", "00010000"
CYCLE_SECONDS = 0.02


def inodes(client: int) -> set[str]:
    """The sockets of a client and of all that it started."""
    found = set()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(client)
        for each in (process, *process.children(recursive=True)):
            with suppress(OSError):
                for fd in os.listdir(f"/proc/{each.pid}/fd"):
                    with suppress(OSError):
                        link = os.readlink(f"/proc/{each.pid}/fd/{fd}")
                        if link.startswith("socket:["):
                            found.add(link[8:-1])
    return found


def listening(client: int) -> list[list[str]]:
    """Where they listen, as kind and address."""
    own = inodes(client)
    found = []
    for name, loopback in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING_TCP and fields[9] in own:
                found.append(["tcp", loopback, str(int(fields[1].rpartition(":")[2], 16))])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING_UNIX and fields[6] in own and len(fields) > 7:
            found.append(["unix", fields[7]])
    return found


class Knocker:
    """Connects to all that it is told of, sends nonsense, and hangs up on nobody."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self._held: list[socket.socket] = []

    def knock(self, target: list[str]) -> None:
        name = " ".join(target)
        for _ in range(AGAIN if self.tried[name] else FLOOD):
            self.tried[name] += 1
            if self._connects(target):
                self.accepted[name] += 1
        del self._held[:-HELD]

    def _connects(self, target: list[str]) -> bool:
        family = socket.AF_UNIX if target[0] == "unix" else socket.AF_INET
        end = socket.socket(socket.AF_INET6 if target[1] == "::1" else family)
        end.settimeout(0.2)
        try:
            if target[0] == "unix":
                end.connect(target[1].replace("@", "\0", 1) if target[1][0] == "@" else target[1])
            else:
                end.connect((target[1], int(target[2])))
            end.sendall(b"\0" * 64)
        except OSError:
            end.close()
            return False
        self._held.append(end)
        return True


def as_nobody(told: int, said: int) -> None:
    """Become nobody, knock at all that is told, and say in the end how it went."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    knocker, cycles = Knocker(), 0
    with os.fdopen(told) as lines, os.fdopen(said, "w") as answers:
        for line in lines:
            for target in json.loads(line):
                knocker.knock(target)
            cycles += 1
            print(cycles, file=answers, flush=True)
        print(json.dumps(summary(knocker, cycles)), file=answers, flush=True)


def summary(knocker: Knocker, cycles: int) -> dict[str, Any]:
    tried, accepted = dict(knocker.tried), dict(knocker.accepted)
    return {"cycles": cycles, "user": os.geteuid(), "tried": tried, "accepted": accepted}


def main() -> None:
    client = int(sys.argv[1])
    (told, tell), (answered, answer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(tell)
        os.close(answered)
        as_nobody(told, answer)
        return
    os.close(told)
    os.close(answer)
    with os.fdopen(tell, "w") as lines, os.fdopen(answered) as answers:
        while not select.select([sys.stdin], [], [], CYCLE_SECONDS)[0]:
            print(json.dumps(listening(client)), file=lines, flush=True)
            print(answers.readline(), end="", flush=True)
        lines.close()
        print(answers.read(), end="", flush=True)
    os.wait()


if __name__ == "__main__":
    main()
