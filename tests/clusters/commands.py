"""The commands of docs/clusters.md, for the hosts on which its readers are to give them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?P<command>.*?)(?:\s+# on (?P<where>both|host\d))?")


def sections() -> dict[str, str]:
    """The page's text by the headings that it stands under."""
    _, *parts = re.split(r"^##+ (.*)\n", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def commands(section: str, block: int = 0, host: int = 0) -> str:
    """The lines that a reader types on a host; those that name none are for the first one."""
    body = _BLOCK.findall(sections()[section])[block]
    matches = [_COMMAND.fullmatch(line) for line in body.splitlines()]
    lines = [
        match["command"]
        for match in matches
        if match is not None and (match["where"] or "host0") in ("both", f"host{host}")
    ]
    assert lines, f"{section!r} has nothing for host{host}"
    return "\n".join(lines)


def blocks() -> dict[str, int]:
    """How many blocks of commands a section has."""
    counts = {name: len(_BLOCK.findall(text)) for name, text in sections().items()}
    return {name: count for name, count in counts.items() if count}


#: instead of ssh, for mpirun: the host is a namespace
REMOTE_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter --net=/run/netns/$host unshare --mount --uts sh -c \
    "mount --bind /etc/netns/$host/hosts /etc/hosts && hostname $host && $*"
"""


def text_of(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout}\n{done.stderr}"
