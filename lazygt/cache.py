"""Cache directory of code that is compiled on this machine and loaded again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lazygt.files import check_folder, make_folder


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
