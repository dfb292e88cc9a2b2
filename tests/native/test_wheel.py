"""A wheel of the extension is installed where there is no compiler, and loaded."""

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from lazygt.native import fit
from lazygt.native.build import _wheel_fits, build, compiler, install, write
from tests.native.conftest import Room

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
_LOADING = """
from lazygt import native
loaded = native.load()
assert loaded.module is not None, loaded.reason
print(loaded.build.path)
"""


def test_wheel_name_states_compatibility(room: Room, tmp_path: Path) -> None:
    path = write(room.build(), tmp_path / "wheels")
    major, minor = torch.__version__.split(".")[:2]
    version = "".join(map(str, sys.version_info[:2]))
    assert path.name.startswith(f"lazygt_native-0.1.0+pt{major}{minor}-cp{version}-cp{version}")
    names = zipfile.ZipFile(path).namelist()
    assert f"lazygt_native/{fit.file_name()}" in names
    assert "lazygt_native/build.json" in names


def test_a_wheel_of_something_else_is_left(room: Room, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    assert install(wheels) is None
    write(room.build(), wheels)
    (wheels / "lazygt_native-0.0-broken.whl").write_text("no wheel")
    room.write("other.h", "#define ANSWER 7\n")
    assert install(wheels) is None


def test_wheel_that_others_may_write_to_is_not_installed(room: Room, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    before = os.umask(0o002)
    try:
        path = write(room.build(), wheels)
    finally:
        os.umask(before)
    assert _wheel_fits(path)
    path.chmod(0o666)
    with pytest.raises(PermissionError, match=re.escape(f"others may write to {path}")):
        install(wheels)
    path.chmod(0o644)
    wheels.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others may write to {wheels}"):
        install(wheels)


@pytest.mark.slow
@pytest.mark.anew
def test_a_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    write(build(print), tmp_path / "wheels")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    borrowed = [str(ROOT), *site.getsitepackages(), *sys.path]
    (packages / "zz_borrowed.pth").write_text("\n".join(dict.fromkeys(filter(None, borrowed))))
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {
        "PATH": str(python.parent),
        "LAZYGT_CACHE_DIR": str(tmp_path / "cache"),
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "LAZYGT_NATIVE_WHEELS": str(tmp_path / "wheels"),
        "LAZYGT_RECORDER": "auto",
    }
    assert shutil.which("c++", path=environment["PATH"]) is None

    def run(*arguments: str) -> str:
        return subprocess.run(
            [str(python), *arguments], env=environment, cwd=tmp_path, text=True, check=True,
            capture_output=True,
        ).stdout  # fmt: skip

    assert run("-m", "lazygt.cli", "build-native").startswith("installed ")
    assert Path(run("-c", _LOADING).strip()) == packages / "lazygt_native" / fit.file_name()
    assert "is there" in run("-m", "lazygt.cli", "build-native")
