"""The session's directory: what is removed from a place that others use, and what never is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lazygt
from lazygt.runtime.launch import session_directory
from lazygt.runtime.launch.session_directory import RECORD, SessionDirectory, remove
from tests.support.descriptors import open_descriptors

pytestmark = pytest.mark.timeout(60)

KILLED = """
import os, signal
from lazygt.runtime.launch.session_directory import SessionDirectory
print(SessionDirectory().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path_factory.mktemp("b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    return made


def left_behind() -> Path:
    """The directory of a client that was killed, with a socket and a file in it."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    path = Path(killed.stdout.strip())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "data0"))
    (path / "group.3").touch()
    return path


def test_only_this_user_may_enter_the_directory() -> None:
    made = SessionDirectory()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert len(os.fsencode(made.path)) < 90
    made.close()
    made.close()
    assert not made.path.exists()


def test_a_long_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    made = SessionDirectory()
    assert len(os.fsencode(made.path)) < 90
    made.close()


def test_temporary_directory_that_is_no_text_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ's endpoints are UTF-8."""
    directory = base / "\udcff"
    directory.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    made = SessionDirectory()
    assert str(made.path).encode()
    made.close()


def test_directory_of_killed_client_is_removed(base: Path) -> None:
    path = left_behind()
    assert path.parent == base
    SessionDirectory().close()
    assert list(base.iterdir()) == []


def edited(path: Path, **changes: object) -> None:
    record = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps(record | changes))


def linked_record(path: Path) -> None:
    (path / RECORD).rename(path.parent / "elsewhere")
    (path / RECORD).symlink_to(path.parent / "elsewhere")


def pipe_as_record(path: Path) -> None:
    (path / RECORD).unlink()
    os.mkfifo(path / RECORD)


#: What makes a directory that was left behind one that no session has surely made.
LOOK_ALIKES: dict[str, Callable[[Path], object]] = {
    "no record": lambda path: (path / RECORD).unlink(),
    "a foreign file": lambda path: (path / "epoch3.pt").write_text("weights"),
    "a folder": lambda path: (path / "group").mkdir(),
    "a link": lambda path: (path / "transfer").symlink_to(path / "data0"),
    "others may enter": lambda path: path.chmod(0o755),
    "its client lives": lambda path: edited(path, **session_directory._process(os.getpid())),
    "another system's": lambda path: edited(path, boot="another"),
    "another container's": lambda path: edited(path, namespace="pid:[1]"),
    "not a process": lambda path: edited(path, pid="1"),
    "not a record": lambda path: (path / RECORD).write_text("[1, 2]"),
    "brackets without end": lambda path: (path / RECORD).write_text("[" * 4096),
    "not even text": lambda path: (path / RECORD).write_bytes(b"\xff\x00"),
    "a record elsewhere": linked_record,
    "a pipe for a record": pipe_as_record,
    "the user's name": lambda path: path.rename(path.with_name("lazygt-checkpoints")),
}


def contents(base: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_ino) for path in base.rglob("*"))


@pytest.mark.parametrize("look_alike", LOOK_ALIKES)
def test_possible_user_directory_is_kept(base: Path, look_alike: str) -> None:
    LOOK_ALIKES[look_alike](left_behind())
    for path in base.iterdir():
        if path.is_dir():
            os.utime(path, (1.0, 1.0))
    before = contents(base)
    SessionDirectory().close()
    assert contents(base) == before


def test_a_full_disk_leaves_nothing_behind(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session_directory.json, "dump", full)
    before = open_descriptors()
    with pytest.raises(OSError, match="No space left"):
        SessionDirectory()
    assert open_descriptors() == before
    assert contents(base) == []


def test_a_locked_directory_stays(base: Path) -> None:
    """A process that its client forked still uses it."""
    path = left_behind()
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = contents(base)
    SessionDirectory().close()
    os.close(lock)
    assert contents(base) == before


def test_links_to_directories_are_not_followed(base: Path) -> None:
    path, aside = left_behind(), base / "aside"
    shutil.move(path, aside)
    path.symlink_to(aside)
    before = contents(base)
    SessionDirectory().close()
    assert contents(base) == before


def test_user_file_in_session_directory_is_kept(base: Path) -> None:
    made = SessionDirectory()
    (made.path / "notes").write_text("mine")
    made.close()
    assert (made.path / "notes").read_text() == "mine"


def test_a_worker_removes_the_directory_of_its_client_and_no_other(base: Path) -> None:
    path, other = left_behind(), base / "lazygt-0123456789abcdef"
    other.mkdir()
    (other / "group").touch()
    for each in (path, other, base / "nothing"):
        remove(each)
    assert [each.name for each in base.iterdir()] == [other.name]
    assert (other / "group").exists()


@pytest.mark.slow
def test_opening_a_session_leaves_the_users_folders_alone(base: Path) -> None:
    names = ["lazygt-checkpoints", "lazygt-1", "lazygt-cache", "lazygt-" + "0" * 16]
    for name in names:
        (base / name / "deep").mkdir(parents=True)
        (base / name / "deep" / "weights.pt").write_text("weights")
        os.utime(base / name, (1.0, 1.0))
    before = contents(base)
    with lazygt.session(compile="off"):
        assert torch.ones(3).sum().item() == 3.0
        assert len(list(base.iterdir())) == len(names) + 1
    assert contents(base) == before
