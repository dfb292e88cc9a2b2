"""Compatibility of builds of the extension with this torch, CPython and these sources.

A build inlines the layout of classes of torch and CPython. So it is loaded only with the same
version of torch, the same CPython ABI and the same sources. These facts are in the build's record;
the record is read, and the code is compared with its checksum, before the code is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from lazygt.config import cache_setting, sanitize_setting
from lazygt.host.files import cache_directory, check_private, replace

#: Name of the extension module, and of the package of its wheel.
NAME, PACKAGE = "_lazygt_native", "lazygt_native"
RECORD = "build.json"
SOURCES = Path(__file__).parent
#: Compiler flags of every source file; they are part of a build's facts.
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS",
         f"-DTORCH_EXTENSION_NAME={NAME}")  # fmt: skip


def flags() -> tuple[str, ...]:
    """Return all flags of the compiler that do not depend on the machine."""
    return (*FLAGS, *sanitized())


def sanitized() -> tuple[str, ...]:
    """Return the flags of sanitizers; such a process has to load their libraries first."""
    kinds = sanitize_setting()
    return ("-g", "-O1", "-fno-omit-frame-pointer", f"-fsanitize={kinds}") if kinds else ()


class Misfit(Exception):
    """Reason that a build can't be loaded."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a build: its torch, CPython and sources.

    Attributes:
        torch: full version of torch, such as ``2.13.0+cpu``.
        python: CPython's version and ABI, such as ``cpython-311-x86_64-linux-gnu``.
        sources: hash of sources and flags.
    """

    torch: str
    python: str
    sources: str

    @property
    def key(self) -> str:
        """Name of the build's directory."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]

    def differing(self, other: Facts) -> str:
        """Return the first difference to other facts, in words; empty if they match."""
        if self.torch != other.torch:
            return f"built with torch {self.torch}, and this is torch {other.torch}"
        if self.python != other.python:
            return f"built for {self.python}, and this is {other.python}"
        return "" if self.sources == other.sources else "built of other sources than these"


@dataclass(frozen=True, slots=True)
class Build:
    """A build that may be loaded."""

    path: Path
    facts: Facts


def facts_here() -> Facts:
    """Return the facts of this process, which a build has to match."""
    # why: mailboxes import this module, and a worker's sockets are up before torch is loaded
    import torch

    return Facts(str(torch.__version__), str(sysconfig.get_config_var("SOABI")), sources_hash())


@cache
def sources_hash() -> str:
    """Return a hash of all source files and of the flags."""
    digest = hashlib.sha256(repr(flags()).encode())
    for path in (*headers(), *units()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def units() -> list[Path]:
    """Return the compiled source files."""
    return sorted(SOURCES.glob("*.cpp"))


def headers() -> list[Path]:
    """Return the headers."""
    return sorted(SOURCES.glob("*.h"))


def file_name() -> str:
    """Return the file name of the extension in a build's directory."""
    return f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build_directory() -> Path:
    """Return the directory for new builds, one directory each, named by their facts."""
    return build_directories()[0]


def build_directories() -> list[Path]:
    """Return the directories of builds: LAZYGT_CACHE_DIR's, if it is set, then the user's."""
    directories = (cache_directory(cache_dir) / "native" for cache_dir in (cache_setting(), None))
    return list(dict.fromkeys(directories))


def find() -> Build:
    """Find the build to load: in an installed wheel, else in this machine's caches.

    Raises:
        Misfit: no build fits; has the reasons.
    """
    reasons = []
    installed = _installed()
    if installed is not None:
        try:
            return check(installed)
        except Misfit as misfit:
            reasons.append(f"the wheel {PACKAGE} was {misfit}")
    facts = facts_here()
    for builds in build_directories():
        directory = builds / facts.key
        try:
            if not directory.is_dir():
                target = f"torch {facts.torch} and {facts.python}"
                raise Misfit(f"there is no build for {target} in {directory}")
            check_private(directory)
            return check(directory)
        except (Misfit, PermissionError) as misfit:
            reasons.append(str(misfit))
    raise Misfit("; ".join(reasons))


def _installed() -> Path | None:
    """Return the build's folder of an installed wheel, if there is one."""
    spec = importlib.util.find_spec(PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(locations[0]) if locations else None


def check(directory: Path) -> Build:
    """Return the build in a directory after checking its facts and its checksum.

    Raises:
        Misfit: the build does not fit, or is damaged.
    """
    facts, checksum = read_record(directory)
    if difference := facts.differing(facts_here()):
        raise Misfit(f"{difference} ({directory})")
    path = directory / file_name()
    try:
        code = path.read_bytes()
    except OSError as error:
        raise Misfit(f"without code that can be read: {error}") from None
    if hashlib.sha256(code).hexdigest() != checksum:
        raise Misfit(f"damaged since: {path}")
    return Build(path, facts)


def read_record(directory: Path) -> tuple[Facts, str]:
    """Read a build's record: its facts, and the checksum of its code.

    Raises:
        Misfit: there is no record, or it is damaged.
    """
    try:
        return parse_record((directory / RECORD).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise Misfit(f"left without a record that can be read: {error}") from None


def parse_record(text: str) -> tuple[Facts, str]:
    """Parse a build's record; see ``read_record``."""
    try:
        fields = json.loads(text)
        checksum = str(fields.pop("checksum"))
        return Facts(**fields), checksum
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Misfit(f"left with a damaged record: {error!r}") from None


def write_record(directory: Path, facts: Facts) -> None:
    """Write the record of the build in a directory."""
    code = (directory / file_name()).read_bytes()
    fields = asdict(facts) | {"checksum": hashlib.sha256(code).hexdigest()}
    replace(directory / RECORD, (json.dumps(fields, indent=2) + "\n").encode())
