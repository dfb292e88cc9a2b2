"""Artifacts: compiled groups on disk, each with a record of what it gains."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Record:
    """What is known of an artifact.

    Attributes:
        seconds: how long it took to compile.
        times: (elements, seconds of a run member by member, seconds of a compiled run).
    """

    seconds: float
    times: tuple[tuple[int, float, float], ...]

    def gain(self, numel: int) -> float:
        """How many times faster than member by member it is, where that was measured nearest."""
        _, eager, compiled = self._nearest(numel)
        return eager / compiled

    def saved(self, numel: int) -> float:
        """Seconds that one call saves, where that was measured nearest."""
        _, eager, compiled = self._nearest(numel)
        return eager - compiled

    def _nearest(self, numel: int) -> tuple[int, float, float]:
        return min(self.times, key=lambda row: abs(math.log2(row[0] / numel)))


class Cache:
    """The directory in which artifacts lie, as ``KEY.so`` and ``KEY.json``.

    Args:
        place: its path; None: ``lazygt`` in the user's cache directory.
    """

    def __init__(self, place: str | None = None) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.place = Path(place or Path(base) / "lazygt").absolute()

    def directory(self) -> Path:
        """The directory, which is made if it is missing.

        Raises:
            PermissionError: it belongs to somebody else, or others may write to it: code is
                loaded from there.
        """
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self.place.stat()
        if info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise PermissionError(
                f"{self.place}: compiled code is loaded from here, so only you may write to it; "
                f"chmod 700 it, or set LAZYGT_CACHE_DIR to a directory of your own"
            )
        return self.place

    def code(self, key: str) -> Path:
        """The compiled code of an artifact.

        Raises:
            ValueError: that is no key, or there is no such artifact.
            PermissionError: as ``directory``.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not the key of an artifact")
        place = self.directory() / f"{key}.so"
        if not place.is_file():
            raise ValueError(f"there is no artifact {key} in {self.place}")
        return place

    def find(self, key: str) -> Record | None:
        """The record of an artifact that is there whole; None if there is none.

        Raises:
            PermissionError: as ``directory``.
        """
        try:
            found = json.loads((self.directory() / f"{key}.json").read_text())
            times = tuple((int(n), float(eager), float(mine)) for n, eager, mine in found["times"])
            return Record(float(found["seconds"]), times) if times else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # missing, or not written by us: it is compiled again

    def keep(self, key: str, code: bytes, record: Record) -> None:
        """Put an artifact there; the record last, so that it stands for the whole."""
        self._write(f"{key}.so", code)
        self._write(f"{key}.json", json.dumps(asdict(record)).encode())

    def _write(self, name: str, data: bytes) -> None:
        """Write a file so that nobody ever sees half of it."""
        part = self.directory() / f".{name}.{os.getpid()}"
        part.touch(mode=0o600)
        part.write_bytes(data)
        part.replace(self.directory() / name)
