"""Artifacts: compiled groups on disk, each with a record of its speedup.

A record holds a checksum of itself and of the code, which is named by it as well. Disks fill up
and machines lose power: code that differs from the written code is never loaded, and is compiled
again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazygt.cache import cache_place, private_directory
from lazygt.files import replace

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Record:
    """Record of an artifact.

    Attributes:
        seconds: duration of the compile.
        times: (elements, seconds of a run member by member, seconds of a compiled run).
    """

    seconds: float
    times: tuple[tuple[int, float, float], ...]

    def gain(self, numel: int) -> float:
        """Return the speedup over running member by member, as measured at the nearest size."""
        _, eager, compiled = self._nearest(numel)
        return eager / compiled

    def saved(self, numel: int) -> float:
        """Return the seconds that one call saves, as measured at the nearest size."""
        _, eager, compiled = self._nearest(numel)
        return eager - compiled

    def _nearest(self, numel: int) -> tuple[int, float, float]:
        return min(self.times, key=lambda row: abs(math.log2(row[0] / numel)))


class Cache:
    """Directory of artifacts, stored as ``KEY.json`` and ``KEY-CHECKSUM.so``.

    Args:
        place: its path; None: the user's own, see ``cache_place``.
    """

    def __init__(self, place: str | None = None) -> None:
        self.place = cache_place(place)

    def directory(self) -> Path:
        """Return the directory, which is made if it is missing.

        Raises:
            PermissionError: as ``private_directory``.
        """
        return private_directory(self.place)

    def code(self, key: str) -> Path:
        """Return the path of an artifact's compiled code, after a check of its checksum.

        Raises:
            ValueError: that is no key, or there is no such artifact, or it is damaged.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        if record is None:
            raise ValueError(f"there is no artifact {key} in {self.place}, or it is damaged")
        return record[1]

    def find(self, key: str) -> Record | None:
        """Return the record of an artifact that is there whole; None if it is missing or damaged.

        Raises:
            ValueError: that is no key.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        return None if record is None else record[0]

    def _read(self, key: str) -> tuple[Record, Path] | None:
        """Return an artifact's record and the path of its code; None: missing or damaged."""
        place = self.directory()
        try:
            record, checksum = _decoded((place / f"{key}.json").read_bytes())
            code = place / _code_name(key, checksum)
            whole = checksum == _checksum(code.read_bytes(), asdict(record))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None  # missing, or not written by us: it is compiled again
        return (record, code) if whole else None

    def copy_of(self, key: str) -> tuple[bytes, bytes]:
        """Return the record and the code of an artifact, as another machine's cache takes them.

        Raises:
            OSError: it is not there (any more).
            ValueError: it is damaged.
        """
        record = (self.directory() / f"{key}.json").read_bytes()
        try:
            _, checksum = _decoded(record)
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"its record is none: {error}") from error
        return record, (self.place / _code_name(key, checksum)).read_bytes()

    def take(self, key: str, record: bytes, code: bytes) -> None:
        """Store a copy of an artifact from another machine's cache.

        Raises:
            ValueError: that is no key, or it is damaged.
            OSError: it can't be written, or as ``directory``.
        """
        _check(key)
        known, checksum = _decoded(record)
        if checksum != _checksum(code, asdict(known)):
            raise ValueError(f"the artifact {key} was damaged on its way")
        self.keep(key, code, known)

    def keep(self, key: str, code: bytes, record: Record) -> None:
        """Store an artifact; its record is written last, so that it stands for the whole."""
        fields = asdict(record)
        checksum = _checksum(code, fields)
        place = self.directory()
        replace(place / _code_name(key, checksum), code)
        replace(place / f"{key}.json", json.dumps(fields | {"checksum": checksum}).encode())


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not the key of an artifact")


def _decoded(record: bytes) -> tuple[Record, str]:
    """Decode a record and its checksum.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: it is no record of ours.
    """
    fields = json.loads(record)
    times = tuple((int(n), float(eager), float(mine)) for n, eager, mine in fields["times"])
    if not times:
        raise ValueError("a record without times")
    return Record(float(fields["seconds"]), times), str(fields["checksum"])


def _code_name(key: str, checksum: str) -> str:
    return f"{key}-{checksum[:16]}.so"


def _checksum(code: bytes, record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + code).hexdigest()
