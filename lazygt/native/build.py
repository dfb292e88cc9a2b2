"""Build, wheels and installation of the extension; files are compiled in parallel.

A build is installed atomically. Concurrent builds wait for each other on a lock; the second finds
the build of the first. Objects are cached by the hash of a file and its headers.
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
    build_directory,
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

#: Receiver of lines of progress.
Say = Callable[[str], None]
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
#: Memory of the compiler for a file that includes torch's headers.
COMPILER_BYTES = 3 << 29
#: Number of cached builds and objects; the cache is LRU.
KEPT_BUILDS, KEPT_OBJECTS = 24, 200
QUOTED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(Exception):
    """Failure of a build or of an installation."""


def build(say: Say) -> Build:
    """Return the build for this torch, CPython and sources: a cached or a new one.

    Args:
        say: called with a line of progress.

    Raises:
        BuildError: a requirement is missing, or the compiler fails.
        PermissionError: other users may write to the cache.
    """
    facts = facts_here()
    directory = private_directory(build_directory())
    with _build_lock(directory):
        try:
            cached = check(directory / facts.key)
        except Misfit:
            return _build(directory, facts, say)
        os.utime(cached.path.parent)
        return cached


def _build(builds: Path, facts: Facts, say: Say) -> Build:
    """Compile and link a build in a temporary folder, and rename it into the folder of builds."""
    compiler = require_compiler()
    temporary = make_folder(builds / f".building-{secrets.token_hex(8)}")
    try:
        objects = _compile_all(compiler, private_directory(builds / "objects"), facts, say)
        _link(compiler, objects, temporary / file_name())
        write_record(temporary, facts)
        final = builds / facts.key
        shutil.rmtree(final, ignore_errors=True)  # a damaged build
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _drop_oldest([p for p in builds.glob("[0-9a-f]*") if p.is_dir()], KEPT_BUILDS)
    _drop_oldest(list((builds / "objects").glob("*.o")), KEPT_OBJECTS)
    return check(final)


# -- requirements ----------------------------------------------------------------------------------


def compiler() -> str | None:
    """Return the path of a C++ compiler, if there is one."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    return None


def require_compiler() -> str:
    """Return the path of a C++ compiler, and check for Python's headers.

    Raises:
        BuildError: the compiler or a header is missing.
    """
    path = compiler()
    if path is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or set CXX")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(f"no {header}: install Python's headers (python3-dev)")
    return path


@contextmanager
def _build_lock(directory: Path) -> Iterator[None]:
    """Context with an exclusive file lock on the folder of builds."""
    with open(open_own(directory / ".lock", os.O_WRONLY | os.O_CREAT), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- compiling -------------------------------------------------------------------------------------


def _compile_all(path: str, objects: Path, facts: Facts, say: Say) -> list[Path]:
    """Compile the source files without a cached object; return the objects of all files.

    Args:
        path: the compiler.
        objects: folder of cached objects.
        facts: facts of the build, which are part of an object's key.
        say: called with a line of progress.
    """
    shared = repr((facts.torch, facts.python, flags(), path)).encode()
    objects_of = {}
    for unit in units():
        key = hashlib.sha256(shared)
        for source in (unit, *_included_headers(unit)):
            key.update(b"\0" + source.read_bytes())
        objects_of[unit] = objects / f"{unit.stem}-{key.hexdigest()[:32]}.o"
    missing = [unit for unit, target in objects_of.items() if not target.exists()]
    if missing:
        jobs = _jobs(len(missing))
        say(f"building the native extension: {len(missing)} files, {jobs} at a time")
        with ThreadPoolExecutor(jobs) as pool:
            # backwards: unboxed.cpp takes as long as three others, and would be waited for
            list(pool.map(lambda unit: _compile(path, unit, objects_of[unit]), reversed(missing)))
    for target in objects_of.values():
        os.utime(target)
    return list(objects_of.values())


def _included_headers(unit: Path) -> list[Path]:
    """Return the extension's headers that a source file includes, directly or indirectly."""
    by_name = {header.name: header for header in headers()}
    included: dict[Path, None] = {}
    pending = [unit]
    while pending:
        for name in QUOTED.findall(pending.pop().read_text()):
            header = by_name.get(name)
            if header is not None and header not in included:
                included[header] = None
                pending.append(header)
    return sorted(included)


def _jobs(files: int) -> int:
    """Return the number of parallel compilers that cores and memory allow."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(files, len(os.sched_getaffinity(0)), memory // COMPILER_BYTES))


def _compile(path: str, unit: Path, target: Path) -> None:
    """Compile a source file to an object, atomically.

    Args:
        path: the compiler.
    """
    include = Path(torch.__file__).parent / "include"
    python = sysconfig.get_path("include")
    system = (include, include / "torch/csrc/api/include", python, f"{python}/internal")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    partial = target.with_suffix(f".{os.getpid()}.part")
    try:
        include_flags = [f"-isystem{directory}" for directory in system]
        _run([path, *flags(), abi, *include_flags, "-c", str(unit), "-o", str(partial)])
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _link(path: str, objects: list[Path], target: Path) -> None:
    """Link the extension; without a run path, as torch's libraries are always loaded before."""
    lib = Path(torch.__file__).parent / "lib"
    libraries = [f"-L{lib}", *(f"-l{name}" for name in LIBRARIES)]
    extra_flags = sanitized() or ("-s",)
    _run([path, "-shared", *extra_flags, *map(str, objects), *libraries, "-o", str(target)])


def _run(command: list[str]) -> None:
    """Run a compiler; BuildError, with its first error, if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "error:" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0]}\n{' '.join(command)}")


def _drop_oldest(paths: list[Path], kept: int) -> None:
    """Remove all but the ``kept`` most recently used entries (LRU)."""
    by_age = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[kept:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# -- wheels ----------------------------------------------------------------------------------------
# A wheel ``lazygt_native`` contains one build. Its version is lazygt's, with torch's version as the
# local part: ``0.1.0+pt213``.

_INIT = '"""A build of lazygt\'s native extension; lazygt.native loads it."""\n'


def write(build: Build, folder: Path) -> Path:
    """Write a wheel of a build into a folder, and return its path."""
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
    """Return a version's major and minor number without a dot: "213" of "2.13.0+cpu"."""
    return "".join(version.split(".")[:2])


def _tag(python: str) -> str:
    """Return the wheel tag of an ABI: "cp311-cp311-linux_x86_64" of "cpython-311-..."."""
    version = f"cp{python.split('-')[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"{version.rstrip('td')}-{version}-{platform}"


def _record(files: dict[str, bytes], record_path: str) -> str:
    """Return the RECORD file: names, hashes and sizes of the files."""
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{record_path},,"]) + "\n"


def install(folder: Path) -> Path | None:
    """Install the first wheel of a folder that fits this process; None if there is none.

    Raises:
        BuildError: pip fails.
        PermissionError: other users may write to the folder or a wheel, and so run code here.
    """
    if not folder.exists():
        return None
    check_folder(folder)
    path = next(
        (path for path in sorted(folder.glob(f"{PACKAGE}-*.whl")) if _wheel_fits(path)), None
    )
    if path is None:
        return None
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps",
               "--force-reinstall", str(path)]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise BuildError(f"pip did not install {path}: {process.stderr.strip()}")
    return path


def _wheel_fits(path: Path) -> bool:
    """Return whether a wheel's build matches this process; False for an unreadable wheel."""
    try:
        with open(open_own(path), "rb") as file, zipfile.ZipFile(file) as archive:
            facts, _ = parse_record(archive.read(f"{PACKAGE}/{RECORD}").decode())
    except PermissionError:
        raise
    except (Misfit, OSError, KeyError, UnicodeDecodeError, zipfile.BadZipFile):
        return False
    return not facts.differing(facts_here())
