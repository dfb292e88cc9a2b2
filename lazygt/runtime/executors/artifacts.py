"""Artifacts: compiled groups on disk, each with a record of its speedup.

A record contains a checksum of itself and of the code, whose file name contains it too. Disks fill
up and machines lose power: damaged code is never loaded, and is compiled again.
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
from lazygt.runtime.executors.kernel_group import toolchain
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Record:
    """Record of an artifact."""

    seconds: float  # duration of the compile
    #: (elements, seconds of a run member by member, seconds of a compiled run)
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
        place: path of the directory; None: the user's default, see ``cache_place``.
    """

    def __init__(self, place: str | None = None) -> None:
        self.place = cache_place(place)

    def directory(self) -> Path:
        """Return the directory, created if it is missing.

        Raises:
            PermissionError: as ``private_directory``.
        """
        return private_directory(self.place)

    def code(self, key: str) -> Path:
        """Return the path of an artifact's compiled code, after a check of its checksum.

        Raises:
            ValueError: ``key`` is no key, or the artifact is missing or damaged.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        if record is None:
            raise ValueError(f"there is no artifact {key} in {self.place}, or it is damaged")
        return record[1]

    def find(self, key: str) -> Record | None:
        """Return the record of an intact artifact; None if it is missing or damaged.

        Raises:
            ValueError: ``key`` is no key.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        return None if record is None else record[0]

    def _read(self, key: str) -> tuple[Record, Path] | None:
        """Return an artifact's record and the path of its code; None: missing or damaged."""
        directory = self.directory()
        try:
            record, checksum = _decoded((directory / f"{key}.json").read_bytes())
            code = directory / _code_name(key, checksum)
            is_intact = checksum == _checksum(code.read_bytes(), asdict(record))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None  # missing, or not written by us: it is compiled again
        return (record, code) if is_intact else None

    def copy_of(self, key: str) -> tuple[bytes, bytes]:
        """Return the record and the code of an artifact, as another machine's cache takes them.

        Raises:
            OSError: the artifact is missing.
            ValueError: the record is damaged.
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
            ValueError: ``key`` is no key, or the copy is damaged.
            OSError: the files can't be written, or as ``directory``.
        """
        _check(key)
        known, checksum = _decoded(record)
        if checksum != _checksum(code, asdict(known)):
            raise ValueError(f"the artifact {key} was damaged on its way")
        self.keep(key, code, known)

    def keep(self, key: str, code: bytes, record: Record) -> None:
        """Store an artifact; the record is written last, so it exists only with the code."""
        fields = asdict(record)
        checksum = _checksum(code, fields)
        directory = self.directory()
        replace(directory / _code_name(key, checksum), code)
        replace(directory / f"{key}.json", json.dumps(fields | {"checksum": checksum}).encode())


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not the key of an artifact")


def _decoded(record: bytes) -> tuple[Record, str]:
    """Decode a record and its checksum.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: it is no record of ours.
    """
    fields = json.loads(record)
    times = tuple((int(n), float(eager), float(compiled)) for n, eager, compiled in fields["times"])
    if not times:
        raise ValueError("a record without times")
    return Record(float(fields["seconds"]), times), str(fields["checksum"])


def _code_name(key: str, checksum: str) -> str:
    return f"{key}-{checksum[:16]}.so"


def _checksum(code: bytes, record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + code).hexdigest()


# -- installation of artifacts on other hosts ------------------------------------------------------
# One rank of each host without the client's cache is queried for artifacts and receives missing
# ones, which stay there for later sessions. A plan is swapped on all ranks at once, after all hosts
# have its artifacts: compiled code may round differently, and ranks must not differ in that.


class Notify(Protocol):
    """Function that sends a rank a message; does not wait."""

    def __call__(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None: ...


class Installs:
    """State of artifacts on other hosts.

    Args:
        remote_hosts: returns the current hosts, each with one of its ranks.
        cache: the client's.

    Attributes:
        pending: (artifact, host) of unanswered requests.
        error: a host's reason against compiled code; empty: none was reported.
    """

    def __init__(
        self,
        remote_hosts: Callable[[], Mapping[int, int]],
        cache: Cache,
        device: str,
        send_message: Notify,
    ) -> None:
        self._remote_hosts, self._cache, self._device, self._send_message = (
            remote_hosts,
            cache,
            device,
            send_message,
        )
        self.pending: set[tuple[str, int]] = set()
        #: those of ``pending`` with code that was sent
        self._sent_code: set[tuple[str, int]] = set()
        self._installed: set[tuple[str, int]] = set()
        self.error = ""

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether all hosts have these artifacts; request those not requested before.

        Args:
            keys: keys of artifacts; the empty key queries whether locally compiled code runs there.
        """
        if self.error:
            return False
        hosts = self._remote_hosts()
        wanted = [(key, host) for key in keys for host in hosts]
        for key, host in wanted:
            if (key, host) not in self._installed | self.pending:
                self.pending.add((key, host))
                self._request(key, hosts[host])
        return self._installed.issuperset(wanted)

    def _request(self, key: str, rank: int) -> None:
        self._send_message(rank, Install(key, toolchain(self._device)))

    def answered(self, rank: int, installed: Installed) -> None:
        """Handle a rank's answer: send missing code, or note success or failure."""
        hosts = self._remote_hosts()
        for request in [
            (installed.key, host) for host, host_rank in hosts.items() if host_rank == rank
        ]:
            if request not in self.pending:
                continue  # requested twice, before a recovery and after it
            if installed.lacks and not installed.error and request not in self._sent_code:
                self._sent_code.add(request)
                self._send_code(installed.key, rank)
                continue
            self.pending.discard(request)
            self._sent_code.discard(request)
            error = installed.error or (
                "its cache does not keep what it is given" if installed.lacks else ""
            )
            if error:
                self.error = self.error or f"worker {rank}: {error}"
            else:
                self._installed.add(request)

    def _send_code(self, key: str, rank: int) -> None:
        try:
            artifact = self._cache.copy_of(key)
            self._send_message(rank, Install(key, toolchain(self._device)), artifact)
        except (OSError, ValueError) as error:  # no longer there, or longer than a message may be
            self.answered(rank, Installed(key, error=f"it could not be sent: {error}"))

    def again(self) -> None:
        """Repeat requests after workers were replaced, before they get any other message.

        New workers may be on new hosts. Unanswered requests are repeated. Installed artifacts are
        sent, without a query, to all hosts that may lack them, before the plans that use them.
        """
        hosts = self._remote_hosts()
        self._sent_code.clear()
        known = {key for key, _ in self._installed}
        self.pending &= {(key, host) for key, _ in self.pending for host in hosts}
        for key, host in sorted(self.pending):
            self._request(key, hosts[host])
        for key in sorted(known):
            for host, rank in hosts.items():
                if (key, host) not in self._installed | self.pending:
                    self.pending.add((key, host))
                    self._sent_code.add((key, host))
                    if key:
                        self._send_code(key, rank)
                    else:
                        self._request(key, rank)
