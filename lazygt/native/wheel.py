"""Wheels of the extension: ``lazygt_native`` holds a build, and nothing else.

Their version is lazygt's with torch's as its local part, ``0.1.0+pt213``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from lazygt.files import check_folder, open_output, open_own
from lazygt.native.build import BuildError
from lazygt.native.fit import PACKAGE, RECORD, Build, Misfit, facts_here, file_name, parse_record

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
