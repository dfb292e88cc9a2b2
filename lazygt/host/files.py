"""Private files and folders of one user, safe from other users' links.

Every file that lazygt makes comes from here. Names can be guessed, and folders such as ``/tmp`` are
shared: a link, a pipe or a file that another user has put under a name is refused, and nothing is
emptied before it is known to be this user's. Modes are set whatever the umask is.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# -- anonymous memory files (memfd) that processes share; gone with their last holder --------------

# Not named by Python's fcntl module everywhere
_ADD_SEALS, _SEAL_SHRINK = 1033, 2


def create_file(name: str, nbytes: int) -> int:
    """Create a memfd that may grow and never shrink: that would raise SIGBUS elsewhere."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK)
    return fd


def memory_of(fd: int) -> int:
    """Return the bytes of memory that a memfd takes: written ones, without holes."""
    return os.fstat(fd).st_blocks * 512


# -- private files and folders of one user, safe from other users' links ---------------------------

#: Permission bits by which others may change a file, and by which they may read it as well.
WRITABLE, READABLE = 0o022, 0o077
_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY


def make_folder(path: Path) -> Path:
    """The folder, which is made with mode 0700 if it is missing, as are those above it.

    Raises:
        PermissionError: as ``check_folder``.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        try:
            folder.mkdir(0o700)
        except FileExistsError:  # another process was quicker; it is checked below
            continue
        folder.chmod(0o700)
    check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raise PermissionError unless this user alone may write to a folder, or link it.

    The system's owner may, too: root can do anything to a process anyway.
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
    """A descriptor of a new, empty file of mode 0600.

    Args:
        folder: a descriptor of the one that a relative path starts from.

    Raises:
        FileExistsError: there is something of that name, a link among others.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    os.fchmod(fd, 0o600)
    return fd


def create_whole(path: Path, data: bytes) -> None:
    """Write a new private file, which is whole from the moment that it is there.

    Raises:
        FileExistsError: there is something of that name.
    """
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def replace(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file in place of an old one; nobody ever sees half of it."""
    temporary = _write_temporary(path, data)
    try:
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_temporary(path: Path, data: bytes) -> Path:
    """A new private file in the same folder, under a name that nobody guesses."""
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
    """Give a UNIX socket a name, with mode 0600 from the first moment."""
    os.fchmod(listener.fileno(), 0o600)  # of the name that will be made, less the umask
    listener.bind(os.fspath(path))
    os.chmod(path, 0o600)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that is this user's (or root's), and that no other may write to.

    Args:
        flags: with ``O_CREAT`` a missing one is made with mode 0600.

    Raises:
        PermissionError: it is another user's, or others may write to it, or it is a link or no
            file; says which command mends it.
    """
    # without waiting: it may be a pipe
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


def open_output(place: str | os.PathLike[str], append: bool = False, mode: int = 0o666) -> int:
    """Open a file for output under a user's name for it, emptied unless ``append``.

    Links of the user's own are followed, and devices and pipes are written to.

    Args:
        mode: of a new file; the umask counts.

    Raises:
        PermissionError: the file there is another user's.
    """
    path = Path(place)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0)
    if path.is_symlink():
        _check_owner(path, path.lstat())
    else:
        flags |= os.O_NOFOLLOW  # none has been put there meanwhile
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
    """Write a file that a user has named for output; see ``open_output``. Text is UTF-8."""
    with open(open_output(path), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _opened(path: Path, flags: int, mode: int) -> int:
    try:
        return os.open(path, flags | _ALWAYS, mode)
    except OSError as error:
        if path.is_symlink() and flags & os.O_NOFOLLOW:
            raise PermissionError(
                f"{path} is a link, which is not followed: `rm {_quoted(path)}`"
            ) from error
        raise


def _check_file(path: Path, status: os.stat_result, writes: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{path} is no file: remove it, or name another place")
    _check_owner(path, status)
    if writes and status.st_nlink > 1:
        raise PermissionError(
            f"{path} has another name, under which it would change as well: "
            f"`rm {_quoted(path)}`, or name another place"
        )


def _check_owner(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, and this process is of user {user}: "
            f"`chown -h {user} {_quoted(path)}` as root, if you trust its content, or name "
            f"another place"
        )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


# -- cache directory of code that is compiled on this machine and loaded again ---------------------


def cache_place(override: str | None = None) -> Path:
    """The cache directory, which need not be there yet.

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
    """The directory, which is made if it is missing.

    Raises:
        PermissionError: as ``check_private``.
    """
    with _with_advice(path):
        return make_folder(path)


def check_private(path: Path) -> None:
    """Raise PermissionError unless only this user may write to a directory, or link it."""
    with _with_advice(path):
        check_folder(path)


@contextmanager
def _with_advice(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"{path}: compiled code is loaded from here, so only you may write to it, or link "
            f"it ({error}); chmod 700 it, or set LAZYGT_CACHE_DIR to a directory of your own"
        ) from error
