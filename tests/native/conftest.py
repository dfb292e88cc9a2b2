"""A room of the extension whose sources take no time to build."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazygt import native
from lazygt.native import build as building
from lazygt.native import fit

MODULE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lazygt_native", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__lazygt_native() { return PyModule_Create(&module); }
"""
#: A compiler that notes what it is asked to do.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
exec {compiler} "$@"
"""
_made = Path(tempfile.mkdtemp(prefix="lazygt-test-")) / "cache"
atexit.register(shutil.rmtree, _made.parent, ignore_errors=True)


class Room:
    """Sources, a cache and a compiler of a test's own."""

    def __init__(self, place: Path) -> None:
        self.sources, self.cache, self.log = place / "sources", place / "cache", place / "calls"
        self.sources.mkdir()
        self.write("module.cpp", MODULE)
        self.write("other.cpp", '#include "other.h"\nint other() { return ANSWER; }\n')
        self.write("other.h", "#define ANSWER 42\n")
        self.log.touch()
        self.compiler = place / "cxx"
        self.compiler.write_text(COMPILER.format(log=self.log, compiler=shutil.which("c++")))
        self.compiler.chmod(0o700)

    def write(self, name: str, text: str) -> None:
        """Write or change a source file."""
        (self.sources / name).write_text(text)
        fit.sources_hash.cache_clear()

    def calls(self) -> list[str]:
        """What the compiler has made since this was asked last, by the names of its results."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return sorted(os.path.basename(line.split()[-1]).split("-")[0].split(".")[0]
                      for line in lines)  # fmt: skip

    def build(self) -> fit.Build:
        """A build of the sources as they were first: made once a test process, and copied."""
        if not _made.exists():
            building.build(lambda line: None)
            shutil.copytree(self.cache, _made)
        else:
            shutil.copytree(_made, self.cache)
        self.calls()
        return fit.find()

    def builds(self) -> list[Path]:
        """The directories of builds in the cache."""
        return [p for p in (self.cache / "native").glob("*") if p.is_dir() and p.name != "objects"]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    room = Room(tmp_path)
    monkeypatch.setattr(fit, "SOURCES", room.sources)
    monkeypatch.setattr(fit, "PACKAGE", "no_such_wheel")
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(room.cache))
    monkeypatch.setenv("CXX", str(room.compiler))
    monkeypatch.delenv("LAZYGT_RECORDER", raising=False)
    for name in ("load", "choice"):  # this process has chosen, and keeps its own
        monkeypatch.setattr(native, name, functools.cache(getattr(native, name).__wrapped__))
    there = sys.modules.pop(fit.NAME, None)
    fit.sources_hash.cache_clear()
    yield room
    fit.sources_hash.cache_clear()
    sys.modules.pop(fit.NAME, None)
    if there is not None:
        sys.modules[fit.NAME] = there
