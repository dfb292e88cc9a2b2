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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lazygt.host.files import cache_place, private_directory, replace
from lazygt.runtime.compiling.kernel_group import toolchain
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer

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


# -- installs: compiled artifacts on hosts that don't see the client's cache -----------------------
# A rank of each such host is asked whether its cache has an artifact, and is sent the missing
# ones; the next session finds them there. Only when all hosts have a plan's artifacts is it
# swapped, on all ranks at once: compiled code may round in another way, and no two ranks may
# differ in that.


class Tell(Protocol):
    """Function that sends a rank a message; does not wait."""

    def __call__(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None: ...


class Installs:
    """Artifacts on other hosts.

    Args:
        elsewhere: returns the current hosts, each with one of its ranks.
        cache: the client's.

    Attributes:
        pending: (artifact, host) without an answer yet.
        error: the reason against compiled code on a host; empty: none has been reported.
    """

    def __init__(
        self, elsewhere: Callable[[], Mapping[int, int]], cache: Cache, device: str, tell: Tell
    ) -> None:
        self._elsewhere, self._cache, self._device, self._tell = elsewhere, cache, device, tell
        self.pending: set[tuple[str, int]] = set()
        #: those of them with code that was sent
        self._given: set[tuple[str, int]] = set()
        self._there: set[tuple[str, int]] = set()
        self.error = ""

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether all hosts have these artifacts; request those not requested before.

        Args:
            keys: of artifacts; an empty one asks whether code that is compiled here runs there.
        """
        if self.error:
            return False
        hosts = self._elsewhere()
        wanted = [(key, host) for key in keys for host in hosts]
        for key, host in wanted:
            if (key, host) not in self._there | self.pending:
                self.pending.add((key, host))
                self._ask(key, hosts[host])
        return self._there.issuperset(wanted)

    def _ask(self, key: str, rank: int) -> None:
        self._tell(rank, Install(key, toolchain(self._device)))

    def answered(self, rank: int, told: Installed) -> None:
        """Take a rank's answer."""
        hosts = self._elsewhere()
        for about in [(told.key, host) for host, asked in hosts.items() if asked == rank]:
            if about not in self.pending:
                continue  # it was asked twice, before a recovery and after it
            if told.lacks and not told.error and about not in self._given:
                self._given.add(about)
                self._give(told.key, rank)
                continue
            self.pending.discard(about)
            self._given.discard(about)
            error = told.error or ("its cache does not keep what it is given" if told.lacks else "")
            if error:
                self.error = self.error or f"worker {rank}: {error}"
            else:
                self._there.add(about)

    def _give(self, key: str, rank: int) -> None:
        try:
            artifact = self._cache.copy_of(key)
            self._tell(rank, Install(key, toolchain(self._device)), artifact)
        except (OSError, ValueError) as error:  # no longer there, or longer than a message may be
            self.answered(rank, Installed(key, error=f"it could not be sent: {error}"))

    def again(self) -> None:
        """Repeat requests after workers were replaced, before they get any other message.

        They may be on new hosts. Unanswered requests are repeated. Artifacts of plans are given,
        without asking, to all hosts that may lack them: an artifact is there before its plan is.
        """
        hosts = self._elsewhere()
        self._given.clear()
        known = {key for key, _ in self._there}
        self.pending &= {(key, host) for key, _ in self.pending for host in hosts}
        for key, host in sorted(self.pending):
            self._ask(key, hosts[host])
        for key in sorted(known):
            for host, rank in hosts.items():
                if (key, host) not in self._there | self.pending:
                    self.pending.add((key, host))
                    self._given.add((key, host))
                    if key:
                        self._give(key, rank)
                    else:
                        self._ask(key, rank)
