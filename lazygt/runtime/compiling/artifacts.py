"""Artifacts: compiled groups on disk, each with a record of what it gains.

A record holds a checksum of itself and of the code, which is named by it as well. Disks fill up
and machines lose power: code that is not what was written is never loaded, and is compiled again.
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
    """The directory in which artifacts lie, as ``KEY.json`` and ``KEY-CHECKSUM.so``.

    Args:
        place: its path; None: the user's own, see ``cache_place``.
    """

    def __init__(self, place: str | None = None) -> None:
        self.place = cache_place(place)

    def directory(self) -> Path:
        """The directory, which is made if it is missing.

        Raises:
            PermissionError: as ``private_directory``.
        """
        return private_directory(self.place)

    def code(self, key: str) -> Path:
        """The compiled code of an artifact, found to be whole.

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
        """The record of an artifact that is there whole; None if it is missing or damaged.

        Raises:
            ValueError: that is no key.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        return None if record is None else record[0]

    def _read(self, key: str) -> tuple[Record, Path] | None:
        """What is known of an artifact, and its code."""
        place = self.directory()
        try:
            record, checksum = _decoded((place / f"{key}.json").read_bytes())
            code = place / _code_name(key, checksum)
            whole = checksum == _checksum(code.read_bytes(), asdict(record))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None  # missing, or not written by us: it is compiled again
        return (record, code) if whole else None

    def copy_of(self, key: str) -> tuple[bytes, bytes]:
        """The record and the code of an artifact, as another machine's cache takes them.

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
        """Put a copy there of what lies in another machine's cache.

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
        """Put an artifact there; the record last, so that it stands for the whole."""
        fields = asdict(record)
        checksum = _checksum(code, fields)
        place = self.directory()
        replace(place / _code_name(key, checksum), code)
        replace(place / f"{key}.json", json.dumps(fields | {"checksum": checksum}).encode())


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not the key of an artifact")


def _decoded(record: bytes) -> tuple[Record, str]:
    """What a record says, and the checksum.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: nobody wrote it for us.
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
