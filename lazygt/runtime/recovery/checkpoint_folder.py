"""Folder of a run's checkpoints: the last two are kept, and one session at a time writes.

The folder may be the user's, with other things in it: only files of this name are touched, and only
if they begin as checkpoints do. Others may not write to it: they could put files there to be read.
"""

from __future__ import annotations

import fcntl
import os
import re
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lazygt.errors import CheckpointError
from lazygt.files import check_folder, create, make_folder, open_own
from lazygt.runtime.recovery.checkpoint_file import CheckpointFile, is_checkpoint, write

_NAME = re.compile(r"checkpoint-(\d{6,})\.lazygt(\.part)?")
_LOCK = "lazygt.lock"
#: Content of the lock: a process, or nothing yet.
_OWNER = re.compile(rb"(\d{1,20}\n?)?")
_KEPT = 2


class CheckpointFolder:
    """A folder that this session has exclusively; it is made if there is none.

    Raises:
        CheckpointError: another session has it, or it can't be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        try:
            make_folder(self.path)
            lock = open_own(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise CheckpointError(self.path, f"it can't be written: {error}") from error
        self._closer = weakref.finalize(self, os.close, lock)
        _open_folders.add(self)
        try:
            _take_lock(self.path, lock)
            for name in self._files(parts=True):
                self._remove(name)
        except BaseException:
            self.close()
            raise
        #: numbers of the files that are kept
        self.whole = self._numbers()[-_KEPT:]
        #: number of the next file; files that are not ours keep their names, too
        self._next = max([0, *self._numbers(), *map(_number, self._files(parts=True))]) + 1

    def close(self) -> None:
        """Release the folder for other sessions. May be called twice."""
        self._closer()

    def newest(self) -> CheckpointFile | None:
        """Return the newest whole checkpoint, see ``newest``; torn ones after it are not kept."""
        checkpoint = newest(self.path)
        if checkpoint is not None:
            number = _number(checkpoint.path)
            self.whole = [kept for kept in self.whole if kept <= number]
        return checkpoint

    def write(self, about: Mapping[str, Any], sections: Iterable[memoryview]) -> Path:
        """Write a checkpoint, whole or not at all; of earlier ones only the last is kept.

        Raises:
            OSError: the disk does not take it.
        """
        number = self._next
        path = self.path / f"checkpoint-{number:06}.lazygt"
        part = path.with_name(f"{path.name}.part")
        try:
            with open(create(part), "wb") as file:
                write(file, {**about, "number": number}, sections)
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self._next += 1
        self.whole = [*self.whole, number][-_KEPT:]
        self._sync()
        for old in set(self._numbers()) - set(self.whole):
            self._remove(f"checkpoint-{old:06}.lazygt")
        return path

    def _sync(self) -> None:
        """Sync the folder's names to disk as well."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _files(self, parts: bool) -> list[str]:
        return [
            name
            for name in os.listdir(self.path)
            if (match := _NAME.fullmatch(name)) and bool(match[2]) == parts
        ]

    def _numbers(self) -> list[int]:
        return sorted(map(_number, self._files(parts=False)))

    def _remove(self, name: str) -> None:
        path = self.path / name
        with suppress(PermissionError):  # not ours: it stays
            if is_checkpoint(path):
                path.unlink()


#: folders of this process
_open_folders: weakref.WeakSet[CheckpointFolder] = weakref.WeakSet()


def _forked() -> None:
    """Close the locks in a forked child, which would keep them beyond its parent's end."""
    for folder in _open_folders:
        folder.close()


os.register_at_fork(after_in_child=_forked)


def _take_lock(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _OWNER.fullmatch(os.pread(lock, 32, 0)):
            raise CheckpointError(path, f"{_LOCK} in it is no lock of lazygt: rename that file")
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise CheckpointError(
            path,
            f"another session writes its checkpoints there (process {owner}); end that, or give "
            f"this one a folder of its own",
        ) from error
    except OSError as error:
        raise CheckpointError(path, f"it can't be locked: {error}") from error


def _number(name: str | Path) -> int:
    match = _NAME.fullmatch(Path(name).name)
    assert match is not None
    return int(match[1])


def newest(folder: Path) -> CheckpointFile | None:
    """Return the last checkpoint in a folder that is not torn; None: there are none at all.

    Raises:
        CheckpointError: that one is damaged, or all are torn, or another user could have written
            it.
    """
    try:
        check_folder(folder)
    except PermissionError as error:
        raise CheckpointError(folder, f"nothing is read from it: {error}") from error
    names = sorted(filter(_is_whole_name, os.listdir(folder)), key=_number, reverse=True)
    torn: list[CheckpointError] = []
    for name in names:
        try:
            checkpoint = CheckpointFile(folder / name)
        except FileNotFoundError:
            return newest(folder)  # a session that writes there has removed it meanwhile
        except CheckpointError as error:
            if not error.torn:
                raise
            torn.append(error)
            continue
        if torn:
            warnings.warn(
                f"lazygt: {torn[0]}. The one before it is used instead: {checkpoint.path}",
                RuntimeWarning,
                stacklevel=2,
            )
        return checkpoint
    if torn:
        raise CheckpointError(torn[0].path, f"{torn[0].why}, and there is no other", torn=True)
    return None


def _is_whole_name(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and match[2] is None
