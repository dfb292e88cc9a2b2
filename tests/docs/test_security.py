"""The commands in docs/security.md print what stands there, to the letter."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lazygt.net.connection import Listener
from lazygt.net.reliable import GONE_AFTER, GRACE
from tests.docs.pages import ROOT, commands_in, shell
from tests.support.file_access import places, reads

TEXT = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_documented_commands_print_documented_output(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert len(commands_in(TEXT)) == 6
    for command, output in commands_in(TEXT):
        done = shell(command, tmp_path, env)
        assert done.stdout.strip() == output.strip(), f"{command}\n{done.stderr}"


def test_figures_are_those_of_the_code() -> None:
    assert f"After `grace` seconds ({GRACE:g})" in TEXT
    assert GONE_AFTER == 1.0
    assert "there again within a second" in TEXT


def test_every_count_is_told() -> None:
    names = ("foreign", "malformed", "replayed", "version", "handshake")
    assert all(f"`{name}`" in TEXT for name in names)
    assert all(name in str(Listener.__doc__) for name in names)


# -- the table of readers ----------------------------------------------------------------------

#: Files that read nothing of others', by what they read.
NOT_OF_OTHERS = {
    "names that stand in lazygt's own code, or are of this process's objects": {
        "__init__.py", "config.py", "settings.py", "graph/cost.py", "graph/flags.py",
        "graph/fusion.py",
        "graph/shapes/meta_run.py", "passes/lifetime.py", "passes/sharding/rules/decompose.py",
        "record/autograd.py", "record/factories.py", "record/session_patches.py",
        "record/custom/pickling.py", "record/custom/registry.py", "record/formulas/autocast.py",
        "record/formulas/decompositions.py", "record/formulas/derivatives.py", "record/handlers.py",
        "record/subclasses.py", "record/torch_compile.py", "serving/report.py",
        "serving/stages.py", "transfer/__init__.py",
    },
    "files of the kernel's, and folders to come back to": {
        "calibrate/__init__.py", "observe/doctor.py", "runtime/cluster/job_rendezvous.py",
        "runtime/executors/kernel_group.py", "runtime/launch/start_plan.py",
        "host/processes.py",
    },
    "files of the package": {"observe/page.py", "observe/top/web.py"},
}  # fmt: skip


def test_every_reader_has_a_row() -> None:
    """A new place that reads gets a row in docs/security.md, or its reason above."""
    section = TEXT.partition("## Readers\n")[2].partition("\n## ")[0]
    told = set(re.findall(r"`([\w/]+\.py)`", section))
    excused = set[str]().union(*NOT_OF_OTHERS.values())
    read = set(places(reads))
    assert sorted(read - told - excused) == []
    assert sorted((told | excused) - read) == []
    assert sorted(told & excused) == []


@pytest.mark.parametrize("line", [
    "pickle.loads(data)", "torch.load(path)", "np.load(path)", "getattr(module, name)",
    "import_module(name)", "ctypes.CDLL(path)", "exec(text)", "path.read_bytes()", "open(path)",
    "msgspec.msgpack.decode(data)", "msgpack.unpackb(data)", "queue.map(pickle.loads)",
])  # fmt: skip
def test_reader_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert list(places(reads, tmp_path)) == ["module.py"]


def test_other_lines_are_no_readers(tmp_path: Path) -> None:
    lines = ["getattr(t, 'shape')", "ctypes.CDLL(None)", "data.decode()", "saved.load(model=model)"]
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert places(reads, tmp_path) == {}
