"""A session in a working directory that was removed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.anew, pytest.mark.timeout(180)]

PROGRAM = """
import os, sys, torch, lazygt
from lazygt.runtime.compiling import compiler
# a compile process at idle priority never ends on a busy machine
compiler.leave_only_spare_time = lambda pid: None
os.rmdir(os.getcwd())
with lazygt.session(launcher=sys.argv[1], workers=1, compile=sys.argv[2]) as s:
    x = torch.ones(4)
    for _ in range(3):
        print(((x * 2 + 1).relu() * x).sum().item(), torch.eye(3).sum().item())
    assert s.compiled()
    assert not [one.error for one in s.compiles() if one.error], s.compiles()
    str(lazygt.why(s))
try:
    os.getcwd()
except FileNotFoundError:
    print("still removed")
"""


@pytest.mark.parametrize(("launcher", "compile_"), [("inline", "off"), ("process", "now")])
def test_the_working_directory_was_removed(launcher: str, compile_: str, tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, launcher, compile_],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n") == ["12.0 3.0"] * 3 + ["still removed", ""]
