"""The extension is built once for what it fits, whole or not at all, and only when asked."""

import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lazygt import native
from lazygt.native import build as building
from lazygt.native import fit
from lazygt.native.build import BuildError, build
from tests.native.conftest import Room

pytestmark = pytest.mark.timeout(120)
ALL = ["_lazygt_native", "module", "other"]


def quietly(line: str) -> None:
    """For whoever waits; nobody does."""


def test_a_build_is_made_once(room: Room) -> None:
    made = build(quietly)
    assert room.calls() == ALL
    assert build(quietly) == made == fit.find()
    assert room.calls() == []
    assert native.load().module is not None


def test_build_reports_once_and_only_if_it_compiles(room: Room) -> None:
    lines: list[str] = []
    build(lines.append)
    assert len(lines) == 1
    assert "2 files" in lines[0]
    build(lines.append)
    assert len(lines) == 1


def test_a_changed_file_costs_itself(room: Room) -> None:
    first = build(quietly)
    assert room.calls() == ALL
    room.write("other.cpp", '#include "other.h"\nint other() { return 1 + ANSWER; }\n')
    second = build(quietly)
    assert room.calls() == ["_lazygt_native", "other"]
    assert first.path != second.path
    assert len(room.builds()) == 2


def test_changed_header_rebuilds_only_its_includers(room: Room) -> None:
    room.write("other.h", '#include "numbers.h"\n')
    room.write("numbers.h", "#define ANSWER 42\n")
    build(quietly)
    assert room.calls() == ALL
    for changed, answer in (("numbers.h", 43), ("other.h", 44)):
        room.write(changed, f"#define ANSWER {answer}\n")
        build(quietly)
        assert room.calls() == ["_lazygt_native", "other"]


def test_other_flags_are_another_build(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.build()
    monkeypatch.setattr(fit, "FLAGS", (*fit.FLAGS, "-DMORE"))
    fit.sources_hash.cache_clear()
    build(quietly)
    assert room.calls() == ALL


def test_concurrent_builds_compile_once(room: Room) -> None:
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(lambda _: build(quietly), range(2)))
    assert builds[0] == builds[1]
    assert room.calls() == ALL


def test_old_builds_go(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "KEPT_BUILDS", 2)
    monkeypatch.setattr(building, "KEPT_OBJECTS", 3)
    for answer in range(4):
        room.write("other.h", f"#define ANSWER {answer}\n")
        last = build(quietly)
    assert len(room.builds()) == 2
    assert last.path.parent in room.builds()
    assert len(list((room.cache / "native" / "objects").iterdir())) == 3


# -- what can't be built ---------------------------------------------------------------------------


def test_compiler_error_leaves_no_build(room: Room) -> None:
    room.write("other.cpp", "int other() { return missing; }\n")
    with pytest.raises(BuildError, match=r"other\.cpp:1.*missing"):
        build(quietly)
    assert room.builds() == []
    assert not list((room.cache / "native").glob(".building*"))
    assert not list((room.cache / "native" / "objects").glob("*.part"))


def test_without_a_compiler(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: install"):
        build(quietly)


def test_without_headers_of_python(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(BuildError, match=r"no /nowhere/Python\.h: install"):
        build(quietly)


def test_a_cache_that_others_may_write_to(room: Room) -> None:
    room.build()
    (room.cache / "native").chmod(0o777)
    with pytest.raises(PermissionError, match="only you may write to it"):
        build(quietly)
    fit.find()  # its own directory is private still
    fit.find().path.parent.chmod(0o777)
    with pytest.raises(fit.Misfit, match="only you may write to it"):
        fit.find()


# -- what does not fit -----------------------------------------------------------------------------


def rewrite(made: fit.Build, **changes: str) -> None:
    record = made.path.parent / fit.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"torch": "2.12.1+cpu"}, r"built with torch 2\.12\.1\+cpu, and this is torch 2"),
        ({"python": "cpython-313t-x86_64-linux-gnu"}, "built for cpython-313t.*, and this is"),
        ({"sources": "0"}, "built of other sources than these"),
        ({"checksum": "0"}, "damaged since"),
        ({"more": "0"}, "damaged record"),
    ],
)
def test_incompatible_build_is_reported_and_not_loaded(
    room: Room, changes: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(room.build(), **changes)
    with pytest.raises(fit.Misfit, match=reason):
        fit.find()
    monkeypatch.setenv("LAZYGT_RECORDER", "auto")
    assert native.choice().recorder == "python"
    assert native.load().module is None


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"torch": "2"}', "[" * 100_000, "\x00"])
def test_a_damaged_record_is_mended_by_a_build(room: Room, text: str) -> None:
    made = room.build()
    (made.path.parent / fit.RECORD).write_text(text)
    with pytest.raises(fit.Misfit, match="left with a damaged record"):
        fit.find()
    assert build(quietly) == fit.find() == made


@pytest.mark.parametrize("damage", ["half", "gone", "other"])
def test_damaged_code_is_not_loaded(room: Room, damage: str) -> None:
    made = room.build()
    code = made.path.read_bytes()
    made.path.unlink()
    if damage != "gone":
        made.path.write_bytes(code[: len(code) // 2] if damage == "half" else b"x" + code[1:])
    assert native.load().module is None
    assert build(quietly) == fit.find()


def test_code_that_is_none_falls_back(room: Room) -> None:
    made = room.build()
    made.path.write_bytes(b"no code")
    fit.write_record(made.path.parent, made.facts)
    loaded = native.load()
    assert loaded.module is None
    assert "can't be loaded" in loaded.reason


# -- never at an import or in a session ------------------------------------------------------------

_SESSION = """
import torch, lazygt
with lazygt.session(launcher="inline"):
    print(torch.ones(2).sum().item())
"""


@pytest.mark.parametrize("recorder", ["auto", "python"])
def test_nothing_is_built_by_a_session(room: Room, recorder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SESSION],
        env={**os.environ, "LAZYGT_RECORDER": recorder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert room.calls() == []
    assert not (room.cache / "native").exists()


def test_the_sources_of_the_extension_are_there() -> None:
    assert fit.units()
    assert fit.headers()
    assert Path(native.__file__).parent == fit.SOURCES
