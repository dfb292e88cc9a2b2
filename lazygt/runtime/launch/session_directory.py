"""A session's directory, for its sockets and its ranks' rendezvous files.

Other files of the user's may lie beside it under similar names. So a directory is only removed if
its own record proves it a session's, file by file, and no link is followed: the record names the
process that made it, and the name, the owner, the modes and every file in it are as made here.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lazygt.host import processes
from lazygt.host.files import create, make_folder

RECORD = "session.json"
_NAME = re.compile(r"lazygt-[0-9a-f]{16}")
#: Names of all files in a session's directory: sockets, and files without data of the user's.
_CONTENT = re.compile(
    rf"{re.escape(RECORD)}|data\d+|control\d+|rendezvous\d+|group\.\d+|transfer|groups-\d+|group-[\d-]+"
)
_MODE = 0o700
#: Types of a record's fields, see `_process`.
_KINDS = {"pid": int, "start": int, "boot": str, "namespace": str}
_MAX_BYTES = 4096  # of a record


class SessionDirectory:
    """Fresh directory that only this user can enter.

    It is locked as long as its client lives. If the client is killed before it has a worker to
    clean up, the next session removes the directory.
    """

    def __init__(self) -> None:
        base = _short_base()
        _sweep(base)
        self.path = base / f"lazygt-{secrets.token_hex(8)}"
        make_folder(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._begin()
        except BaseException:  # the disk is full, say
            self.close()
            raise

    def _begin(self) -> None:
        """Lock the directory, and write its record."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        with open(create(Path(RECORD), self._fd), "w") as file:
            json.dump(_process(os.getpid()), file)

    def close(self) -> None:
        """Remove the directory, unless it has files of others, which stay. Idempotent."""
        if self._fd >= 0:
            _remove(self.path, self._fd)
            os.close(self._fd)
            self._fd = -1


def remove(path: Path) -> None:
    """Remove the directory of a session with an ended client, if ``path`` is one."""
    with suppress(OSError), _opened(path) as fd:
        if _read_record(fd) is not None:
            _remove(path, fd)


def _bases() -> tuple[str | None, str]:
    return os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()


def _short_base() -> Path:
    """Return the parent folder.

    A UNIX socket's path must stay below 108 bytes, and ZMQ's endpoints are UTF-8.
    """
    for name in filter(None, _bases()):
        path = os.fsencode(name)
        is_text = path.decode(errors="replace") == name
        if is_text and len(path) < 64 and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    return Path("/tmp")


# -- leftovers of other sessions -----------------------------------------------------------------


def _sweep(base: Path) -> None:
    """Remove the directories that killed sessions have left in a folder."""
    for path in base.glob("lazygt-*"):
        # gone meanwhile, not a directory, not ours to enter, or locked: a session that lives
        with suppress(OSError), _opened(path) as fd:
            if _is_left_behind(path, fd):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, fd)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Context with the descriptor of a directory; links are not followed."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_left_behind(path: Path, fd: int) -> bool:
    """Return whether everything shows a session's directory with an ended process."""
    status = os.fstat(fd)
    if not _NAME.fullmatch(path.name) or stat.S_IMODE(status.st_mode) != _MODE:
        return False
    if status.st_uid != os.getuid() or not all(_is_own(fd, name) for name in os.listdir(fd)):
        return False
    record = _read_record(fd)
    if record is None:
        return False
    here = _process(record["pid"])
    same_system = all(record[key] == here[key] for key in ("boot", "namespace"))
    return same_system and record["start"] != here["start"]


def _is_own(fd: int, name: str) -> bool:
    """Return whether a session may have made this entry of its directory."""
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    kinds = (stat.S_ISSOCK, stat.S_ISREG, stat.S_ISFIFO)
    return (
        any(is_of(status.st_mode) for is_of in kinds)
        and status.st_uid == os.getuid()
        and _CONTENT.fullmatch(name) is not None
    )


def _read_record(fd: int) -> dict[str, Any] | None:
    """Return the contents of a session's record; None without a valid one."""
    try:
        # not blocking: it may be a pipe of somebody's
        file = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        try:
            record = json.loads(os.read(file, _MAX_BYTES))
        finally:
            os.close(file)
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(record, dict) and {key: type(record[key]) for key in record} == _KINDS
    return record if fits else None


def _remove(path: Path, fd: int) -> None:
    """Remove our own files from an open directory, the record last, then the directory.

    It stays if it is not empty then.

    Other processes may do the same at this moment.
    """
    with suppress(OSError):
        files = [name for name in os.listdir(fd) if _is_own(fd, name)]
        for name in sorted(files, key=RECORD.__eq__):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        os.rmdir(path)


def _process(pid: int) -> dict[str, Any]:
    """Return the record of a process, unique over all machines; ``start`` None: it has gone."""
    return {
        "pid": pid,
        "start": processes.start(pid),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "namespace": os.readlink("/proc/self/ns/pid"),
    }
