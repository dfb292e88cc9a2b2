"""Which recorder a process has: what was asked for, and what there is."""

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lazygt
from lazygt import native
from lazygt.cli.app import app
from lazygt.native import fit
from lazygt.observe import doctor
from tests.native.conftest import Room

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("wanted", "there", "recorder", "missing"),
    [
        ("", True, "native", False),
        ("", False, "python", False),
        ("auto", True, "native", False),
        ("auto", False, "python", False),
        ("native", True, "native", False),
        ("native", False, "python", True),
        ("python", True, "python", False),
    ],
)
def test_choice_of_recorder(
    room: Room, monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool, recorder: str,
    missing: bool,
) -> None:  # fmt: skip
    if there:
        room.build()
    monkeypatch.setenv("LAZYGT_RECORDER", wanted)
    choice = native.choice()
    assert (choice.recorder, choice.missing) == (recorder, missing)
    assert choice.reason
    check = doctor.recorder()
    assert check.detail.startswith(recorder)
    assert check.status == ("fail" if missing else "ok")
    assert ("lazygt build-native" in check.advice) == missing


def test_unknown_recorder_is_refused(monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    monkeypatch.setenv("LAZYGT_RECORDER", "fast")
    with pytest.raises(ValueError, match="LAZYGT_RECORDER='fast': expected auto, native, python"):
        native.choice()


def test_native_setting_without_build_names_remedy(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_RECORDER", "native")
    with pytest.raises(lazygt.LazyGTError) as caught:
        lazygt.session(launcher="inline")
    text = str(caught.value)
    assert text.startswith("LAZYGT_RECORDER=native, but there is no build for torch ")
    assert "run `lazygt build-native`, which needs a C++ compiler and Python's headers" in text
    with pytest.raises(lazygt.LazyGTError, match="the native extension is not there"):
        native.extension()


# -- the command -----------------------------------------------------------------------------------


def test_command_builds_and_finds(room: Room) -> None:
    runner = CliRunner()
    first = runner.invoke(app, ["build-native"])
    assert first.exit_code == 0
    assert "the native extension is built: " in first.stdout
    again = runner.invoke(app, ["build-native"])
    assert again.stdout.startswith("the native extension is there: ")


@pytest.mark.parametrize("if_possible", [False, True])
def test_command_without_a_compiler(
    room: Room, monkeypatch: pytest.MonkeyPatch, if_possible: bool
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX")
    options = ["--if-possible"] if if_possible else []
    done = CliRunner().invoke(app, ["build-native", *options])
    assert done.exit_code == (0 if if_possible else 1)
    assert "no C++ compiler: install g++ or clang++" in done.output
    assert ("lazygt works without it" in done.output) == if_possible


def test_setting_up_goes_on_without_a_compiler() -> None:
    """README's two commands: what make runs for the extension ends well in any case."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    lines = [line for line in makefile.splitlines() if "build-native" in line]
    assert lines
    assert all("--if-possible" in line for line in lines if line.startswith("\t"))


def test_all_works_without_a_build(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lazygt.cli", "doctor"],
        env={
            **os.environ,
            "LAZYGT_RECORDER": "auto",
            "LAZYGT_CACHE_DIR": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path),
            "PATH": "/nowhere",
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "python: " in done.stdout


def test_a_build_in_the_users_cache_is_found_beside_a_cache_dir(
    room: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = room.build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(room.cache.parent))
    room.cache.rename(room.cache.parent / "lazygt")
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path / "empty"))
    found = fit.find()
    assert found.facts == built.facts
    assert found.path.is_relative_to(room.cache.parent / "lazygt" / "native")
    assert fit.build_directory() == tmp_path / "empty" / "native"


@pytest.mark.parametrize(
    ("wanted", "there", "warned"), [("auto", False, 1), ("python", False, 0), ("auto", True, 0)]
)
def test_the_python_recorder_is_announced_once(
    room: Room, monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool, warned: int
) -> None:
    if there:
        room.build()
    monkeypatch.setenv("LAZYGT_RECORDER", wanted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(room.cache.parent / "nothing"))
    monkeypatch.setattr(
        native, "warn_of_python", functools.cache(native.warn_of_python.__wrapped__)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            native.warn_of_python()
    assert len(caught) == warned
    for warning in caught:
        text = str(warning.message)
        assert text.startswith("lazygt: ops are recorded in Python, about five times slower")
        assert "To build it run `lazygt build-native`" in text
