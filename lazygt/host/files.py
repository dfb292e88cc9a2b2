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


def make_folder(place: Path) -> Path:
    """The folder, which is made with mode 0700 if it is missing, as are those above it.

    Raises:
        PermissionError: as ``check_folder``.
    """
    missing = [folder for folder in (place, *place.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        try:
            folder.mkdir(0o700)
        except FileExistsError:  # another process was quicker; it is checked below
            continue
        folder.chmod(0o700)
    check_folder(place)
    return place


def check_folder(place: Path) -> None:
    """Raise PermissionError unless this user alone may write to a folder, or link it.

    The system's owner may, too: root can do anything to a process anyway.
    """
    status, link = place.stat(), place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{place} is no folder")
    _check_owner(place, link)
    _check_owner(place, status)
    if status.st_mode & WRITABLE:
        raise PermissionError(
            f"others may write to {place}: `chmod go-w {_quoted(place)}`, or name a folder inside "
            f"it, which is made for you alone"
        )


def create(place: Path, folder: int | None = None) -> int:
    """A descriptor of a new, empty file of mode 0600.

    Args:
        folder: a descriptor of the one that a relative path starts from.

    Raises:
        FileExistsError: there is something of that name, a link among others.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS
    fd = os.open(place, flags, 0o600, dir_fd=folder)
    os.fchmod(fd, 0o600)
    return fd


def create_whole(place: Path, data: bytes) -> None:
    """Write a new private file, which is whole from the moment that it is there.

    Raises:
        FileExistsError: there is something of that name.
    """
    part = _written_beside(place, data)
    try:
        os.link(part, place)
    finally:
        part.unlink()


def replace(place: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file in place of an old one; nobody ever sees half of it."""
    part = _written_beside(place, data)
    try:
        part.chmod(mode)
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _written_beside(place: Path, data: bytes) -> Path:
    """A new private file in the same folder, under a name that nobody guesses."""
    part = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    fd = create(part)
    try:
        with open(fd, "wb") as file:
            file.write(data)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def bind(listener: socket.socket, place: str | os.PathLike[str]) -> None:
    """Give a UNIX socket a name, with mode 0600 from the first moment."""
    os.fchmod(listener.fileno(), 0o600)  # of the name that will be made, less the umask
    listener.bind(os.fspath(place))
    os.chmod(place, 0o600)


def open_own(place: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that is this user's (or root's), and that no other may write to.

    Args:
        flags: with ``O_CREAT`` a missing one is made with mode 0600.

    Raises:
        PermissionError: it is another user's, or others may write to it, or it is a link or no
            file; says which command mends it.
    """
    # without waiting: it may be a pipe
    fd = _opened(place, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(fd)
        _check_file(place, status, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
        if status.st_mode & WRITABLE:
            raise PermissionError(
                f"others may write to {place}: `chmod 600 {_quoted(place)}`, if you trust its "
                f"content"
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


def write_output(place: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file that a user has named for output; see ``open_output``. Text is UTF-8."""
    with open(open_output(place), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _opened(place: Path, flags: int, mode: int) -> int:
    try:
        return os.open(place, flags | _ALWAYS, mode)
    except OSError as error:
        if place.is_symlink() and flags & os.O_NOFOLLOW:
            raise PermissionError(
                f"{place} is a link, which is not followed: `rm {_quoted(place)}`"
            ) from error
        raise


def _check_file(place: Path, status: os.stat_result, writes: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"{place} is no file: remove it, or name another place")
    _check_owner(place, status)
    if writes and status.st_nlink > 1:
        raise PermissionError(
            f"{place} has another name, under which it would change as well: "
            f"`rm {_quoted(place)}`, or name another place"
        )


def _check_owner(place: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise PermissionError(
            f"{place} belongs to user {status.st_uid}, and this process is of user {user}: "
            f"`chown -h {user} {_quoted(place)}` as root, if you trust its content, or name "
            f"another place"
        )


def _quoted(place: Path) -> str:
    return shlex.quote(str(place))


# -- cache directory of code that is compiled on this machine and loaded again ---------------------


def cache_place(given: str | None = None) -> Path:
    """The cache directory, which need not be there yet.

    Args:
        given: its path. None: ``lazygt`` in the user's cache directory, or one of this user's own
            among the temporary files, where the user has no home.
    """
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base).absolute() / "lazygt"
    try:
        return Path.home() / ".cache" / "lazygt"
    except RuntimeError:  # neither HOME nor an entry in the password file: a container
        return Path(tempfile.gettempdir()) / f"compiled-by-lazygt-{os.getuid()}"


def private_directory(place: Path) -> Path:
    """The directory, which is made if it is missing.

    Raises:
        PermissionError: as ``check_private``.
    """
    with _advising(place):
        return make_folder(place)


def check_private(place: Path) -> None:
    """Raise PermissionError unless only this user may write to a directory, or link it."""
    with _advising(place):
        check_folder(place)


@contextmanager
def _advising(place: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionError(
            f"{place}: compiled code is loaded from here, so only you may write to it, or link "
            f"it ({error}); chmod 700 it, or set LAZYGT_CACHE_DIR to a directory of your own"
        ) from error
