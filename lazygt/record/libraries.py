"""Shared libraries that this process has loaded, and which of them define torch ops."""

from __future__ import annotations

import mmap
import os
import sys
from functools import cache

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
#: What a library names that is linked with torch's.
_LINKED = (b"libc10", b"libtorch")


def libraries_with(namespace: str, op: str) -> tuple[str, ...]:
    """The loaded libraries, besides torch's own, that have these names in them."""
    wanted = namespace.encode(), op.encode()
    return tuple(path for path in _loaded() if _linked(path) and _names_all(path, wanted))


def module_of(path: str) -> str:
    """The Python module that a library is; empty if it is none."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and os.path.realpath(file) == path:
            return name
    return ""


def _loaded() -> list[str]:
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    return sorted(p for p in paths if not p.startswith(_TORCH) and os.path.isfile(p))


@cache
def _linked(path: str) -> bool:
    return any(_names_all(path, (name,)) for name in _LINKED)


def _names_all(path: str, names: tuple[bytes, ...]) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return all(data.find(name) >= 0 for name in names)
