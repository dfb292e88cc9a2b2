"""Checkpoint on disk: one file, with every byte covered by a checksum.

    | header | section 0 | section 1 | ... | index |

The index has the offsets and checksums of the sections. The header, written last, has the offset of
the index and the length of the file: a shorter file is *torn*.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec

from lazygt.errors import CheckpointError
from lazygt.host.files import check_folder, crc32, create, make_folder, open_own

T = TypeVar("T")
_FAMILY, _FORMAT = b"lazygt checkpt ", b"2"
_MAGIC = _FAMILY + _FORMAT
#: magic, bytes of the file, offset of the index, its bytes, its checksum; checksum of the header
_HEADER, _HEADER_CRC = struct.Struct("<16sQQQQ8x"), struct.Struct("<Q")
_HEADER_BYTES = _HEADER.size + _HEADER_CRC.size
_ALIGNMENT = 64
#: bytes that are written and then added to the checksum, while they are in a core's cache
_BLOCK = 1 << 20


#: Plain values that describe a checkpoint.
About = dict[str, int | str | dict[str, str]]
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True):
    """Offset and length of a section, and the checksum of its bytes and the padding after them."""

    offset: Count
    nbytes: Count
    crc: Count


class _Index(msgspec.Struct, frozen=True):
    """Description of the checkpoint, and its sections."""

    about: About
    sections: list[_Section]


def write(file: IO[bytes], about: Mapping[str, Any], sections: Iterable[memoryview]) -> None:
    """Write a checkpoint into an empty file, and sync it to disk.

    Args:
        about: plain values that describe the checkpoint.
        sections: bytes of each section; each is released before the next is requested.

    Raises:
        OSError: the disk does not take it.
    """
    file.write(bytes(_HEADER_BYTES))
    written, end = [], _HEADER_BYTES
    for data in sections:
        written.append(_write_section(file, data, end))
        end = _end_of(written[-1])
    index = msgspec.msgpack.encode(_Index(dict(about), written))
    file.write(index)
    header = _HEADER.pack(_MAGIC, end + len(index), end, len(index), crc32(index))
    file.seek(0)
    file.write(header + _HEADER_CRC.pack(crc32(header)))
    file.flush()
    os.fsync(file.fileno())


def _write_section(file: IO[bytes], data: memoryview, offset: int) -> _Section:
    """Write a section and its padding; return its entry in the index."""
    crc = 0
    for begin in range(0, len(data), _BLOCK):
        block = data[begin : begin + _BLOCK]
        file.write(block)
        crc = crc32(block, crc)
    section = _Section(offset, len(data), crc)
    padding = bytes(_end_of(section) - offset - len(data))
    file.write(padding)
    return _Section(offset, len(data), crc32(padding, crc))


def _end_of(section: _Section) -> int:
    """Return the offset of the section after this one."""
    return -(-(section.offset + section.nbytes) // _ALIGNMENT) * _ALIGNMENT


def unpacked(path: Path, data: bytes | memoryview, kind: type[T]) -> T:
    """Decode a section or the index of a file; CheckpointError: it is not of this type."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"its content can't be read: {error}") from error


def is_checkpoint(path: Path) -> bool:
    """Return whether a file is a checkpoint of any format version, or the beginning of one.

    Raises:
        PermissionError: it is another user's, or no file.
    """
    with open(open_own(path), "rb") as file:
        head = file.read(len(_FAMILY))
    return _FAMILY.startswith(head) or not any(head)


class CheckpointFile:
    """Complete checkpoint on disk, with all checksums verified.

    Raises:
        CheckpointError: the file differs from the one that was written.
        OSError: the file can't be read.

    Attributes:
        about: the description, as it was passed to `write`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            size = os.fstat(file.fileno()).st_size
            begin, length, crc = self._header(file.read(_HEADER_BYTES), size)
            # a private mapping, since tensors on it may be written
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        index = self._data[begin : begin + length]
        if crc32(index) != crc:
            raise self._damaged("its index")
        self.about, self._sections = self._read_index(index, begin)
        for number, section in enumerate(self._sections):
            if crc32(self._data[section.offset : _end_of(section)]) != section.crc:
                raise self._damaged(f"section {number}")

    def _opened(self) -> IO[bytes]:
        """Open the file; CheckpointError if its owner or mode are unsafe."""
        try:
            return open(open_own(self.path), "rb")
        except PermissionError as error:
            raise CheckpointError(self.path, f"it is not read: {error}") from error

    def _read_index(self, index: memoryview, end: int) -> tuple[About, list[_Section]]:
        """Decode the index; return the description, and the sections after checks of their offsets.

        Args:
            end: offset of the index, at which the sections end.
        """
        contents = unpacked(self.path, index, _Index)
        begin = _HEADER_BYTES
        for number, section in enumerate(contents.sections):
            if section.offset != begin or _end_of(section) > end:
                raise CheckpointError(self.path, f"section {number} is not where it must be")
            begin = _end_of(section)
        return contents.about, contents.sections

    def _header(self, header: bytes, size: int) -> tuple[int, int, int]:
        """Check the header; return the offset of the index, its bytes and its checksum.

        Args:
            size: bytes of the file.
        """
        if len(header) < _HEADER_BYTES or not any(header):
            raise CheckpointError(self.path, "it was never written to its end", torn=True)
        magic, nbytes, begin, length, crc = _HEADER.unpack(header[: _HEADER.size])
        intact = _HEADER_CRC.pack(crc32(header[: _HEADER.size])) == header[_HEADER.size :]
        if not (intact and magic.startswith(_FAMILY)):
            raise self._damaged("its header")
        if magic != _MAGIC:
            raise CheckpointError(
                self.path,
                f"its format is {magic[len(_FAMILY) :].decode(errors='replace')}, and this lazygt "
                f"reads format {_FORMAT.decode()} alone. Nothing was loaded. Resume it with the "
                f"lazygt that saved it, or remove it to begin anew",
            )
        if size < nbytes:
            raise CheckpointError(self.path, f"it has lost {nbytes - size:,} bytes", torn=True)
        if size > nbytes:
            raise self._damaged(f"its end: {size - nbytes:,} bytes more than were written")
        return begin, length, crc

    def _damaged(self, part: str) -> CheckpointError:
        """Return the error for a wrong checksum of a section, the index or the header."""
        return CheckpointError(
            self.path,
            f"{part} is not what was written: the checksum differs. Nothing was loaded. Remove "
            f"this file to go on from the checkpoint before it, if there is one",
        )

    def __len__(self) -> int:
        return len(self._sections)

    def section(self, number: int) -> memoryview:
        """Return a section's bytes; writes to them don't change the file."""
        section = self._sections[number]
        return self._data[section.offset : section.offset + section.nbytes]


# -- folder of checkpoints -------------------------------------------------------------------------
# A folder has the last two checkpoints of a run, and one session at a time writes there. It may be
# a folder of the user's with other files: only files with names of checkpoints are touched, and
# only if their content begins as that of a checkpoint. Other users may not write to the folder,
# since lazygt would read their files.

_NAME = re.compile(r"checkpoint-(\d{6,})\.lazygt(\.part)?")
_LOCK = "lazygt.lock"
#: Content of the lock: a process id, or nothing yet.
_OWNER = re.compile(rb"(\d{1,20}\n?)?")
_RETAINED = 2


class CheckpointFolder:
    """Folder of checkpoints, locked by this session; it is created if there is none.

    Attributes:
        retained: numbers of the retained files, oldest first.

    Raises:
        CheckpointError: another session has locked it, or it can't be written.
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
            for name in self._files(partial=True):
                self._remove(name)
        except BaseException:
            self.close()
            raise
        #: numbers of the files that are retained
        self.retained = self._numbers()[-_RETAINED:]
        #: number of the next file; numbers of other users' files are not reused
        self._next = max([0, *self._numbers(), *map(_number, self._files(partial=True))]) + 1

    def close(self) -> None:
        """Release the folder for other sessions. May be called twice."""
        self._closer()

    def newest(self) -> CheckpointFile | None:
        """Return the newest complete checkpoint, see ``newest``; later ones are not retained."""
        checkpoint = newest(self.path)
        if checkpoint is not None:
            number = _number(checkpoint.path)
            self.retained = [retained for retained in self.retained if retained <= number]
        return checkpoint

    def write(self, about: Mapping[str, Any], sections: Iterable[memoryview]) -> Path:
        """Write a checkpoint atomically, and remove all earlier ones but the last.

        Raises:
            OSError: the disk does not take it.
        """
        number = self._next
        path = self.path / f"checkpoint-{number:06}.lazygt"
        partial = path.with_name(f"{path.name}.part")
        try:
            with open(create(partial), "wb") as file:
                write(file, {**about, "number": number}, sections)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._next += 1
        self.retained = [*self.retained, number][-_RETAINED:]
        self._sync()
        for old in set(self._numbers()) - set(self.retained):
            self._remove(f"checkpoint-{old:06}.lazygt")
        return path

    def _sync(self) -> None:
        """Sync the folder's entries to disk."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _files(self, partial: bool) -> list[str]:
        """Return the names of checkpoints in the folder, or of partial ones."""
        return [
            name
            for name in os.listdir(self.path)
            if (match := _NAME.fullmatch(name)) and bool(match[2]) == partial
        ]

    def _numbers(self) -> list[int]:
        return sorted(map(_number, self._files(partial=False)))

    def _remove(self, name: str) -> None:
        """Remove a file, if it is a checkpoint of this user's."""
        path = self.path / name
        with suppress(PermissionError):  # another user's file stays
            if is_checkpoint(path):
                path.unlink()


#: folders of this process
_open_folders: weakref.WeakSet[CheckpointFolder] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the locks in a forked child, which would own them beyond its parent's end."""
    for folder in _open_folders:
        folder.close()


os.register_at_fork(after_in_child=_close_in_child)


def _take_lock(path: Path, lock: int) -> None:
    """Lock the folder, and write this process's id into the lock file."""
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
    """Return the number in the name of a checkpoint."""
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
    names = sorted(filter(_is_complete_name, os.listdir(folder)), key=_number, reverse=True)
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


def _is_complete_name(name: str) -> bool:
    """Return whether a name is that of a checkpoint, not of a partial one."""
    match = _NAME.fullmatch(name)
    return match is not None and match[2] is None
