"""Loader of the C++ extension, and choice of this process's recorder.

The sources in this folder are built at set-up (``build``), never at an import or in a session. A
build that fits is loaded once in a process; without one the recorder written in Python does the
same work.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import NamedTuple

from lazygt.config import recorder_setting
from lazygt.errors import LazyGTError
from lazygt.native.fit import NAME, Build, Misfit, find

ADVICE = "run `lazygt build-native`, which needs a C++ compiler and Python's headers"


class Loaded(NamedTuple):
    """Result of loading the extension; ``reason`` explains a missing module."""

    module: ModuleType | None
    build: Build | None
    reason: str


class RecorderChoice(NamedTuple):
    """The recorder of this process.

    Attributes:
        recorder: ``native`` or ``python``.
        reason: reason of the choice.
        missing: True if LAZYGT_RECORDER requests the native recorder, and there is none.
    """

    recorder: str
    reason: str
    missing: bool = False


@cache
def load() -> Loaded:
    """Load the extension of the build that fits, once in a process."""
    try:
        build = find()
    except Misfit as misfit:
        return Loaded(None, None, str(misfit))
    try:
        return Loaded(_load(build), build, f"{build.path} fits")
    except ImportError as error:
        return Loaded(None, build, f"{build.path} can't be loaded: {error}")


def _load(build: Build) -> ModuleType:
    """Import the extension module of a build; the import registers nothing with torch."""
    loader = ExtensionFileLoader(NAME, str(build.path))
    spec = spec_from_file_location(NAME, build.path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return module


@cache
def choice() -> RecorderChoice:
    """Choose this process's recorder, once, since the device is registered once."""
    setting = recorder_setting()
    if setting == "python":
        return RecorderChoice("python", f"LAZYGT_RECORDER={setting}")
    loaded = load()
    if loaded.module is not None:
        return RecorderChoice("native", f"LAZYGT_RECORDER={setting}, and {loaded.reason}")
    return RecorderChoice("python", loaded.reason, missing=setting == "native")


def recording() -> ModuleType | None:
    """Return the extension if this process records with it, else None."""
    return extension() if choice().recorder == "native" else None


def extension() -> ModuleType:
    """Return the extension.

    Raises:
        LazyGTError: there is none.
    """
    loaded = load()
    if loaded.module is None:
        raise LazyGTError(f"the native extension is not there: {loaded.reason}; {ADVICE}")
    return loaded.module


def check_choice() -> None:
    """Raise LazyGTError if the native recorder is requested but missing."""
    if choice().missing:
        raise LazyGTError(
            f"LAZYGT_RECORDER=native, but {choice().reason}; {ADVICE}, or leave LAZYGT_RECORDER out"
        )


@cache
def warn_of_python() -> None:
    """Warn once in a process if ops are recorded in Python without LAZYGT_RECORDER=python."""
    if choice().recorder == "native" or recorder_setting() == "python":
        return
    warnings.warn(
        f"lazygt: ops are recorded in Python, about five times slower than by the C++ extension: "
        f"{choice().reason}. To build it {ADVICE}. LAZYGT_RECORDER=python asks for the recorder in "
        f"Python, without this warning",
        RuntimeWarning,
        stacklevel=3,
    )
