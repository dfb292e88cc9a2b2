"""The extension under ASan and UBSan: drawn programs and models, with nothing to report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lazygt.native import fit
from lazygt.native.build import build, compiler
from tests.native.conftest import MODULE, Room

pytestmark = [
    pytest.mark.slow,
    pytest.mark.anew,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        os.environ.get("HYPOTHESIS_PROFILE") != "deep", reason="minutes: `make test-deep`"
    ),
]
ROOT = Path(__file__).parents[2]
_FAULTY = """
static PyObject* read_beyond(PyObject*, PyObject*) {
  volatile int* four = new int[4];
  return PyLong_FromLong(four[4]);
}
static PyMethodDef methods[] = {{"read_beyond", read_beyond, METH_NOARGS, ""}, {}};
"""
_READING = """
import importlib.machinery, importlib.util, sys, torch
loader = importlib.machinery.ExtensionFileLoader("_lazygt_native", sys.argv[1])
spec = importlib.util.spec_from_file_location("_lazygt_native", sys.argv[1], loader=loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
print("reading", flush=True)
module.read_beyond()
"""


def watched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers' libraries loaded first, as they want to be."""
    path = compiler()
    assert path is not None
    libraries = [
        subprocess.check_output([path, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # CPython and torch leave much to the end of the process
        "LAZYGT_NATIVE_SANITIZE": "1",
        "LAZYGT_CHECK_PASSES": "0",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_a_fault_is_reported(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYGT_NATIVE_SANITIZE", "1")
    definition = 'PyModuleDef_HEAD_INIT, "_lazygt_native", nullptr, -1, nullptr'
    assert definition in MODULE
    text = MODULE.replace(definition, definition.replace("-1, nullptr", "-1, methods"))
    room.write("module.cpp", text.replace("static PyModuleDef", _FAULTY + "static PyModuleDef"))
    done = watched("-c", _READING, str(build(print).path))
    assert done.stdout == "reading\n", done.stderr
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize(
    ("kind", "arguments"), [("drawn", [2_000, 60]), ("models", [["adamw"], 2])]
)
def test_nothing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, arguments: list[object]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("LAZYGT_NATIVE_SANITIZE", "1")
        fit.sources_hash.cache_clear()
        build(print)
    fit.sources_hash.cache_clear()
    task = json.dumps({"kind": kind, "arguments": arguments, "mutation": None})
    told = tmp_path / "accounts.json"
    done = watched("-m", "tests.native.accounts", str(told), task)
    reports = [line for line in done.stderr.splitlines() if "Sanitizer" in line
               or "runtime error" in line]  # fmt: skip
    assert (done.returncode, reports) == (0, []), done.stderr[-4000:]
    assert json.loads(told.read_text())["extension"]
