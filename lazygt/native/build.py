"""Build of the extension at set-up, in parallel over source files.

The result is installed atomically. Concurrent builds wait for each other, and the second finds the
build of the first. Objects are cached: a changed file costs its dependents.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from lazygt.host.files import check_folder, make_folder, open_output, open_own, private_directory
from lazygt.native.fit import (
    PACKAGE,
    RECORD,
    Build,
    Facts,
    Misfit,
    builds_place,
    check,
    facts_here,
    file_name,
    flags,
    headers,
    parse_record,
    sanitized,
    units,
    write_record,
)

Say = Callable[[str], None]
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
#: Memory that the compiler takes for a file that includes torch's headers.
COMPILER_BYTES = 3 << 29
#: Builds, and objects, that are kept; those used last.
KEPT_BUILDS, KEPT_OBJECTS = 24, 200
QUOTED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(Exception):
    """Why there is no build."""


def build(say: Say) -> Build:
    """Return the build for this torch, CPython and these sources, made if it is not there.

    Args:
        say: called with a line of progress.

    Raises:
        BuildError: something is missing that a build needs, or the compiler refuses.
        PermissionError: others may write to the cache.
    """
    facts = facts_here()
    place = private_directory(builds_place())
    with _alone(place):
        try:
            there = check(place / facts.key)
        except Misfit:
            return _build(place, facts, say)
        os.utime(there.path.parent)
        return there


def _build(place: Path, facts: Facts, say: Say) -> Build:
    compiler = require_compiler()
    directory = make_folder(place / f".building-{secrets.token_hex(8)}")
    try:
        objects = _compile_all(compiler, private_directory(place / "objects"), facts, say)
        _link(compiler, objects, directory / file_name())
        write_record(directory, facts)
        final = place / facts.key
        shutil.rmtree(final, ignore_errors=True)  # one that was damaged
        directory.rename(final)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    _drop_oldest([p for p in place.glob("[0-9a-f]*") if p.is_dir()], KEPT_BUILDS)
    _drop_oldest(list((place / "objects").glob("*.o")), KEPT_OBJECTS)
    return check(final)


# -- what a build needs ----------------------------------------------------------------------------


def compiler() -> str | None:
    """The path of a C++ compiler, if there is one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    return None


def require_compiler() -> str:
    """The path of a C++ compiler, where Python's headers are there, too.

    Raises:
        BuildError: one of them is missing.
    """
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or set CXX")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(f"no {header}: install Python's headers (python3-dev)")
    return path


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Let nobody else build meanwhile."""
    with open(open_own(place / ".lock", os.O_WRONLY | os.O_CREAT), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- compiling -------------------------------------------------------------------------------------


def _compile_all(path: str, objects: Path, facts: Facts, say: Say) -> list[Path]:
    """An object of each source file; those that are kept already are not made again."""
    shared = repr((facts.torch, facts.python, flags(), path)).encode()
    objects_of = {}
    for unit in units():
        key = hashlib.sha256(shared)
        for source in (unit, *_included(unit)):
            key.update(b"\0" + source.read_bytes())
        objects_of[unit] = objects / f"{unit.stem}-{key.hexdigest()[:32]}.o"
    missing = [unit for unit, there in objects_of.items() if not there.exists()]
    if missing:
        jobs = _jobs(len(missing))
        say(f"building the native extension: {len(missing)} files, {jobs} at a time")
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda unit: _compile(path, unit, objects_of[unit]), missing))
    for there in objects_of.values():
        os.utime(there)
    return list(objects_of.values())


def _included(unit: Path) -> list[Path]:
    """Our headers that a source file includes, itself or by way of another."""
    ours = {header.name: header for header in headers()}
    included: dict[Path, None] = {}
    left = [unit]
    while left:
        for name in QUOTED.findall(left.pop().read_text()):
            header = ours.get(name)
            if header is not None and header not in included:
                included[header] = None
                left.append(header)
    return sorted(included)


def _jobs(files: int) -> int:
    """Return the number of parallel compilers that cores and memory allow."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(files, len(os.sched_getaffinity(0)), memory // COMPILER_BYTES))


def _compile(path: str, unit: Path, target: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    python = sysconfig.get_path("include")
    system = (include, include / "torch/csrc/api/include", python, f"{python}/internal")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        places = [f"-isystem{directory}" for directory in system]
        _run([path, *flags(), abi, *places, "-c", str(unit), "-o", str(part)])
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _link(path: str, objects: list[Path], target: Path) -> None:
    """Without a path to torch's libraries: they are loaded before the extension, always."""
    lib = Path(torch.__file__).parent / "lib"
    libraries = [f"-L{lib}", *(f"-l{name}" for name in LIBRARIES)]
    kind = sanitized() or ("-s",)
    _run([path, "-shared", *kind, *map(str, objects), *libraries, "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}\n{' '.join(command)}")


def _drop_oldest(paths: list[Path], kept: int) -> None:
    """Remove the least recently used entries."""
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[kept:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# -- wheels of the extension: ``lazygt_native`` holds a build, and nothing else --------------------
# Their version is lazygt's with torch's as its local part, ``0.1.0+pt213``.

_INIT = '"""A build of lazygt\'s native extension; lazygt.native loads it."""\n'


def write(build: Build, folder: Path) -> Path:
    """Put a wheel of a build into a folder; its path."""
    version = f"{importlib.metadata.version('lazygt')}+pt{_short(build.facts.torch)}"
    tag = _tag(build.facts.python)
    info = f"{PACKAGE}-{version}.dist-info"
    files = {
        f"{PACKAGE}/__init__.py": _INIT.encode(),
        f"{PACKAGE}/{RECORD}": (build.path.parent / RECORD).read_bytes(),
        f"{PACKAGE}/{file_name()}": build.path.read_bytes(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: lazygt-native\nVersion: {version}\n"
            f"Summary: The C++ extension of lazygt, for torch {build.facts.torch}\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: lazygt\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
    }
    folder.mkdir(0o755, parents=True, exist_ok=True)
    path = folder / f"{PACKAGE}-{version}-{tag}.whl"
    with (
        open(open_output(path, mode=0o644), "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", _record(files, f"{info}/RECORD"))
    return path


def _short(version: str) -> str:
    """213 of "2.13.0+cpu"."""
    return "".join(version.split(".")[:2])


def _tag(python: str) -> str:
    """cp311-cp311-linux_x86_64 of "cpython-311-x86_64-linux-gnu"."""
    version = f"cp{python.split('-')[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"{version.rstrip('td')}-{version}-{platform}"


def _record(files: dict[str, bytes], itself: str) -> str:
    """Return the RECORD file: names, hashes and sizes of the files."""
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{itself},,"]) + "\n"


def install(folder: Path) -> Path | None:
    """Install the first wheel of a folder that fits this process; None if there is none.

    Raises:
        BuildError: pip refuses it.
        PermissionError: others may write to the folder or a wheel, whose code would run.
    """
    if not folder.exists():
        return None
    check_folder(folder)
    path = next((path for path in sorted(folder.glob(f"{PACKAGE}-*.whl")) if _fits(path)), None)
    if path is None:
        return None
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps",
               "--force-reinstall", str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"pip did not install {path}: {done.stderr.strip()}")
    return path


def _fits(path: Path) -> bool:
    try:
        with open(open_own(path), "rb") as file, zipfile.ZipFile(file) as archive:
            facts, _ = parse_record(archive.read(f"{PACKAGE}/{RECORD}").decode())
    except PermissionError:
        raise
    except (Misfit, OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile):
        return False
    return not facts.differing(facts_here())
