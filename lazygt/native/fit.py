"""Compatibility of builds of the extension with this torch, CPython and these sources.

A build inlines the layout of torch's classes and of CPython's, so it is loaded only by the very
torch and the kind of CPython that it was made for, and only for the sources that stand here. Its
record names these; it is read, and the code compared with its checksum, before anything of it is
loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from lazygt.config import cache_setting, sanitize_setting
from lazygt.host.files import cache_place, check_private, replace

#: The extension module; ``PACKAGE`` is what a wheel installs around it.
NAME, PACKAGE = "_lazygt_native", "lazygt_native"
RECORD = "build.json"
SOURCES = Path(__file__).parent
#: With these every source file is compiled; a build with others is another build.
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DAT_PER_OPERATOR_HEADERS",
         f"-DTORCH_EXTENSION_NAME={NAME}")  # fmt: skip


def flags() -> tuple[str, ...]:
    """All that the compiler is told in any environment."""
    return (*FLAGS, *sanitized())


def sanitized() -> tuple[str, ...]:
    """Return the flags of sanitizers; such a process has to load their libraries first."""
    kinds = sanitize_setting()
    return ("-g", "-O1", "-fno-omit-frame-pointer", f"-fsanitize={kinds}") if kinds else ()


class Misfit(Exception):
    """Why a build can't be loaded."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Target and sources of a build.

    Attributes:
        torch: its full version, such as ``2.13.0+cpu``.
        python: CPython's version and ABI, such as ``cpython-311-x86_64-linux-gnu``.
        sources: a hash of sources and flags.
    """

    torch: str
    python: str
    sources: str

    @property
    def key(self) -> str:
        """The name of its directory."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]

    def differing(self, other: Facts) -> str:
        """Return the difference to a build's target; empty if it fits."""
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
    """Return the facts that a build has to have here."""
    return Facts(str(torch.__version__), str(sysconfig.get_config_var("SOABI")), sources_hash())


@cache
def sources_hash() -> str:
    """A hash of every source file and of the flags."""
    digest = hashlib.sha256(repr(flags()).encode())
    for path in (*headers(), *units()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def units() -> list[Path]:
    """The source files that are compiled."""
    return sorted(SOURCES.glob("*.cpp"))


def headers() -> list[Path]:
    """The files that they include."""
    return sorted(SOURCES.glob("*.h"))


def file_name() -> str:
    """The file of the extension in its directory."""
    return f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def builds_place() -> Path:
    """Return the directory for new builds, one directory each, named by their facts."""
    return builds_places()[0]


def builds_places() -> list[Path]:
    """Return the directories of builds: LAZYGT_CACHE_DIR's, if it is set, then the user's."""
    places = (cache_place(given) / "native" for given in (cache_setting(), None))
    return list(dict.fromkeys(places))


def find() -> Build:
    """Find the build to load: of an installed wheel, else of this machine's caches.

    Raises:
        Misfit: there is none that fits; says why.
    """
    reasons = []
    installed = _installed()
    if installed is not None:
        try:
            return check(installed)
        except Misfit as misfit:
            reasons.append(f"the wheel {PACKAGE} was {misfit}")
    here = facts_here()
    for builds in builds_places():
        place = builds / here.key
        try:
            if not place.is_dir():
                what = f"torch {here.torch} and {here.python}"
                raise Misfit(f"there is no build for {what} in {place}")
            check_private(place)
            return check(place)
        except (Misfit, PermissionError) as misfit:
            reasons.append(str(misfit))
    raise Misfit("; ".join(reasons))


def _installed() -> Path | None:
    """Return the build's folder of an installed wheel, if there is one."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def check(place: Path) -> Build:
    """The build in a directory, if it is whole and fits.

    Raises:
        Misfit: it does not; says why.
    """
    facts, checksum = read_record(place)
    if difference := facts.differing(facts_here()):
        raise Misfit(f"{difference} ({place})")
    path = place / file_name()
    try:
        code = path.read_bytes()
    except OSError as error:
        raise Misfit(f"without code that can be read: {error}") from None
    if hashlib.sha256(code).hexdigest() != checksum:
        raise Misfit(f"damaged since: {path}")
    return Build(path, facts)


def read_record(place: Path) -> tuple[Facts, str]:
    """Read a build's record: its facts, and the checksum of its code.

    Raises:
        Misfit: there is no record, or it is damaged.
    """
    try:
        return parse_record((place / RECORD).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise Misfit(f"left without a record that can be read: {error}") from None


def parse_record(text: str) -> tuple[Facts, str]:
    """The same, of the record's text."""
    try:
        fields = json.loads(text)
        checksum = str(fields.pop("checksum"))
        return Facts(**fields), checksum
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Misfit(f"left with a damaged record: {error!r}") from None


def write_record(place: Path, facts: Facts) -> None:
    """Write the record of the build in a directory."""
    code = (place / file_name()).read_bytes()
    fields = asdict(facts) | {"checksum": hashlib.sha256(code).hexdigest()}
    replace(place / RECORD, (json.dumps(fields, indent=2) + "\n").encode())
