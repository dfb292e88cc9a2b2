"""The extension under sanitizers, with nothing to report: drawn programs and models under ASan and
UBSan, threads that record at once under TSan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lazygt.native import fit
from lazygt.native.build import build, compiler
from tests.native.conftest import MODULE, Room

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anew,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.deep,
]
ROOT = Path(__file__).parents[2]


class Kind(NamedTuple):
    """Sanitizers that go together.

    Attributes:
        setting: what LAZYGT_NATIVE_SANITIZE says.
        libraries: theirs; they want to be loaded first.
        fault: C++ of a fault that they report.
        report: how they say so.
    """

    setting: str
    libraries: tuple[str, ...]
    fault: str
    report: str


ADDRESS = Kind(
    "1",
    ("libasan.so", "libubsan.so"),
    """
static PyObject* fault(PyObject*, PyObject*) {
  volatile int* four = new int[4];
  return PyLong_FromLong(four[4]);
}
""",
    "AddressSanitizer: heap-buffer-overflow",
)
THREAD = Kind(
    "thread",
    ("libtsan.so",),
    """
#include <thread>
static long count = 0;
static void add() { for (int i = 0; i < 1000; ++i) ++count; }
static PyObject* fault(PyObject*, PyObject*) {
  std::thread one(add), other(add);
  one.join();
  other.join();
  return PyLong_FromLong(count);
}
""",
    "ThreadSanitizer: data race",
)
_METHODS = """
static PyMethodDef methods[] = {{"fault", fault, METH_NOARGS, ""}, {}};
"""
_CALLING = """
import importlib.machinery, importlib.util, sys, torch
loader = importlib.machinery.ExtensionFileLoader("_lazygt_native", sys.argv[1])
spec = importlib.util.spec_from_file_location("_lazygt_native", sys.argv[1], loader=loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
print("calling", flush=True)
module.fault()
"""


def watched(kind: Kind, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers' libraries loaded first."""
    path = compiler()
    assert path is not None
    libraries = [
        subprocess.check_output([path, f"-print-file-name={name}"], text=True).strip()
        for name in kind.libraries
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # CPython and torch leave much to the end of the process
        "LAZYGT_NATIVE_SANITIZE": kind.setting,
        "LAZYGT_RECORDER": "native",
        "LAZYGT_CHECK_PASSES": "0",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def build_for(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a build that they watch."""
    with monkeypatch.context() as patch:
        patch.setenv("LAZYGT_NATIVE_SANITIZE", kind.setting)
        fit.sources_hash.cache_clear()
        build(print)
    fit.sources_hash.cache_clear()


def reports(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What sanitizers said."""
    said = ("Sanitizer", "runtime error")
    return [line for line in done.stderr.splitlines() if any(word in line for word in said)]


@pytest.mark.parametrize("kind", [ADDRESS, THREAD], ids=["address", "thread"])
def test_a_fault_is_reported(room: Room, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setenv("LAZYGT_NATIVE_SANITIZE", kind.setting)
    definition = 'PyModuleDef_HEAD_INIT, "_lazygt_native", nullptr, -1, nullptr'
    assert definition in MODULE
    text = MODULE.replace(definition, definition.replace("-1, nullptr", "-1, methods"))
    added = kind.fault + _METHODS
    room.write("module.cpp", text.replace("static PyModuleDef", added + "static PyModuleDef"))
    done = watched(kind, "-c", _CALLING, str(build(print).path))
    assert done.stdout == "calling\n", done.stderr
    assert done.returncode != 0
    assert kind.report in done.stderr


@pytest.mark.parametrize(
    ("kind", "arguments"), [("drawn", [2_000, 60]), ("models", [["adamw"], 2])]
)
def test_memory_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, arguments: list[object]
) -> None:
    build_for(ADDRESS, monkeypatch)
    task = json.dumps({"kind": kind, "arguments": arguments, "mutation": None})
    told = tmp_path / "accounts.json"
    done = watched(ADDRESS, "-m", "tests.native.accounts", str(told), task)
    assert (done.returncode, reports(done)) == (0, []), done.stderr[-4000:]
    assert json.loads(told.read_text())["recorder"] == "native"


def test_changed_frames_are_decoded_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    build_for(ADDRESS, monkeypatch)
    count = 1_000_000
    done = watched(ADDRESS, "-m", "tests.native.mutated", str(count), "1")
    assert (done.returncode, reports(done)) == (0, []), done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert all(sum(seen.values()) == count for seen in told.values()), told
    assert min(told["runs"]["run"], told["numbers"]["a number"], told["mailbox"]["taken"]) > 0


def test_threads_do_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    build_for(THREAD, monkeypatch)
    done = watched(THREAD, "-m", "tests.native.threads", "3", "30")
    assert (done.returncode, reports(done)) == (0, []), done.stderr[-8000:]
    assert done.stdout == "native equal\n"
