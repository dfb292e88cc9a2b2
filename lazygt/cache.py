"""The directory in which code lies that was compiled on this machine, and is loaded from there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
        PermissionError: it belongs to somebody else, or others may write to it, or have put a
            link there: code is loaded from there.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(place)
    return place


def check_private(place: Path) -> None:
    """Raise PermissionError unless only this user may write to a directory, or link it."""
    info = place.stat()
    user, linked_by = os.getuid(), place.lstat().st_uid  # its own, where it is no link
    if info.st_uid != user or linked_by not in (user, 0) or info.st_mode & 0o022:
        raise PermissionError(
            f"{place}: compiled code is loaded from here, so only you may write to it, "
            f"or link it; chmod 700 it, or set LAZYGT_CACHE_DIR to a directory of your own"
        )
