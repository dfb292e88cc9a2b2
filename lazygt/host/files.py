"""Private files and folders of one user, safe from other users' links.

This module creates every file that lazygt writes. Names can be guessed, and folders such as
``/tmp`` are shared: a link, a pipe or a file that another user has put under a name is refused, and
a file is truncated only after its owner was checked. Modes are set independently of the umask.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import secrets
import shlex
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# -- the fastest CRC-32 available ------------------------------------------------------------------


def _fastest_crc32() -> Callable[..., int]:
    """Return ISA-L's function, ten times as fast, if ``isal`` is installed; else zlib's."""
    for name in ("isal.isal_zlib", "zlib"):
        try:
            crc32: Callable[..., int] = importlib.import_module(name).crc32
        except ImportError:
            continue
        return crc32
    raise ImportError("this Python has no zlib")


#: CRC of bytes, continued from the CRC of the bytes before them.
crc32 = _fastest_crc32()


# -- anonymous memory files (memfd) ----------------------------------------------------------------
# Processes share them by descriptor; the memory is freed with the last descriptor.

# Python's fcntl module has no names for these everywhere.
_ADD_SEALS, _SEAL_SHRINK = 1033, 2


def create_file(name: str, nbytes: int) -> int:
    """Create a memfd that may grow and never shrink; return its descriptor.

    Access beyond the end of a shrunk file would raise SIGBUS in processes that have mapped it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK)
    return fd


def memfd_bytes(fd: int) -> int:
    """Return the bytes of memory in use by a memfd: written pages, without holes."""
    return os.fstat(fd).st_blocks * 512


# -- private files and folders ---------------------------------------------------------------------

#: Permission bits by which others may change a file, and by which they may read it as well.
WRITABLE, READABLE = 0o022, 0o077
_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY


def make_folder(path: Path) -> Path:
    """Create a folder and its missing parents with mode 0700; return its path.

    An existing folder is checked.

    Raises:
        PermissionError: as ``check_folder``.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        try:
            folder.mkdir(0o700)
        except FileExistsError:  # another process has created the folder, which is checked below
            continue
        folder.chmod(0o700)
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raise PermissionError if other users than this one and root may write to or link a folder.

    Root may, since root controls every process anyway.
    """
    status, link = path.stat(), path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is no folder")
    _check_owner(path, link)
    _check_owner(path, status)
    if status.st_mode & WRITABLE:
        raise PermissionError(
            f"others may write to {path}: `chmod go-w {_quoted(path)}`, or name a folder inside "
            f"it, which is made for you alone"
        )


def create(path: Path, folder: int | None = None) -> int:
    """Create an empty file of mode 0600; return its descriptor.

    Args:
        folder: descriptor of the folder that a relative path starts from.

    Raises:
        FileExistsError: there is something of that name, for example a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    os.fchmod(fd, 0o600)
    return fd


def create_whole(path: Path, data: bytes) -> None:
    """Create a private file atomically: it appears with all its data.

    Raises:
        FileExistsError: there is something of that name.
    """
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: readers see the old data or the new."""
    temporary = _write_temporary(path, data)
    try:
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_temporary(path: Path, data: bytes) -> Path:
    """Write a private file of a random name into the same folder; return its path."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = create(temporary)
    try:
        with open(fd, "wb") as file:
            file.write(data)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def bind(listener: socket.socket, path: str | os.PathLike[str]) -> None:
    """Bind a UNIX socket to a path, with mode 0600 from the first moment."""
    os.fchmod(listener.fileno(), 0o600)  # the mode of the path to create, less the umask
    listener.bind(os.fspath(path))
    os.chmod(path, 0o600)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file that this user (or root) owns, and that no other user may write to.

    Args:
        flags: flags of ``os.open``; with ``O_CREAT`` a missing file is created with mode 0600.

    Returns:
        The descriptor.

    Raises:
        PermissionError: it is another user's, or others may write to it, or it is a link or no
            file; the message names the command that repairs it.
    """
    # O_NONBLOCK: opening a pipe would wait
    fd = _opened(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        _check_file(path, status, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
        if status.st_mode & WRITABLE:
            raise PermissionError(
                f"others may write to {path}: `chmod 600 {_quoted(path)}`, if you trust its content"
            )
        if flags & os.O_CREAT:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_output(name: str | os.PathLike[str], append: bool = False, mode: int = 0o666) -> int:
    """Open a file for output at a path that the user has chosen; return its descriptor.

    The file is truncated unless ``append``. Links of the user's own are followed, and devices and
    pipes are written to.

    Args:
        mode: mode of a new file, less the umask.

    Raises:
        PermissionError: the file there is another user's.
    """
    path = Path(name)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)
    if path.is_symlink():
        _check_owner(path, path.lstat())
    else:
        flags |= os.O_NOFOLLOW  # refuses a link created meanwhile
    fd = _opened(path, flags, mode)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            _check_file(path, status, writes=True)
            if not append:
                os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_output(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file at a path that the user has chosen; see ``open_output``. Text is UTF-8."""
    with open(open_output(path), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _opened(path: Path, flags: int, mode: int) -> int:
    """Open a file; PermissionError if it is a link that the flags exclude."""
    try:
        return os.open(path, flags | _ALWAYS, mode)
    except OSError as error:
        if path.is_symlink() and flags & os.O_NOFOLLOW:
            raise PermissionError(
                f"{path} is a link, which is not followed: `rm {_quoted(path)}`"
            ) from error
        raise


def _check_file(path: Path, status: os.stat_result, writes: bool) -> None:
    """Raise PermissionError for no regular file, another user's, or hard links if it is written.

    Args:
        writes: the file will be written.
    """
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{path} is no file: remove it, or name another place")
    _check_owner(path, status)
    if writes and status.st_nlink > 1:
        raise PermissionError(
            f"{path} has another name, under which it would change as well: "
            f"`rm {_quoted(path)}`, or name another place"
        )


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless a file's owner is this user or root."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and this process is of user {user}: "
            f"`chown -h {user} {_quoted(path)}` as root, if you trust its content, or name "
            f"another place"
        )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


# -- cache directory of compiled code --------------------------------------------------------------


def cache_directory(override: str | None = None) -> Path:
    """Return the path of the cache directory, which may not exist yet.

    Args:
        override: path of the directory. None: ``lazygt`` in the user's cache directory, or, for a
            user without a home, a directory of this user's among the temporary files.
    """
    if override:
        return Path(override).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base).absolute() / "lazygt"
    try:
        return Path.home() / ".cache" / "lazygt"
    except RuntimeError:  # neither HOME nor an entry in the password file: a container
        return Path(tempfile.gettempdir()) / f"compiled-by-lazygt-{os.getuid()}"


def private_directory(path: Path) -> Path:
    """Create the cache directory if it is missing; return its path.

    Raises:
        PermissionError: as ``check_private``.
    """
    with _with_advice(path):
        return make_folder(path)


def check_private(path: Path) -> None:
    """Raise PermissionError if others than this user may write to a cache directory, or link it."""
    with _with_advice(path):
        check_folder(path)


@contextmanager
def _with_advice(path: Path) -> Iterator[None]:
    """Add the reason and a remedy to a PermissionError about the cache directory."""
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"{path}: compiled code is loaded from here, so only you may write to it, or link "
            f"it ({error}); chmod 700 it, or set LAZYGT_CACHE_DIR to a directory of your own"
        ) from error
