"""Checkpoints as files: whole or not there, every byte checked, and whose folder it is."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from lazygt.errors import CheckpointError
from lazygt.runtime.recovery import checkpoint_folder
from lazygt.runtime.recovery.checkpoint_file import CheckpointFile, write
from lazygt.runtime.recovery.checkpoint_folder import CheckpointFolder, newest

SECTIONS = [b"state", b"", bytes(range(256)) * 9, b"x"]


def save(folder: CheckpointFolder, step: int) -> Path:
    return folder.write({"step": step}, map(memoryview, SECTIONS))


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def numbers(path: Path) -> list[int]:
    *checkpoints, lock = names(path)
    assert lock == "lazygt.lock"
    return [int(name.removeprefix("checkpoint-").removesuffix(".lazygt")) for name in checkpoints]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 7)
    file = CheckpointFile(path)
    assert file.about == {"step": 7, "number": 1}
    assert [bytes(file.section(number)) for number in range(len(file))] == SECTIONS


def test_every_flipped_byte_is_noticed_and_named(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 7)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"is not what was written") as raised:
            newest(tmp_path)
        assert raised.value.path == str(path)
        assert not raised.value.torn


@pytest.mark.parametrize("left", [0, 10, 64, 500, -1])
def test_of_a_torn_one_the_one_before_is_used(tmp_path: Path, left: int) -> None:
    folder = CheckpointFolder(tmp_path)
    before, last = save(folder, 1), save(folder, 2)
    last.write_bytes(last.read_bytes()[:left])
    with pytest.warns(RuntimeWarning, match=f"{last}.*The one before it is used.*{before}"):
        file = folder.newest()
    assert file is not None
    assert file.about["step"] == 1
    assert names(tmp_path) == [before.name, last.name, "lazygt.lock"]
    after = save(folder, 3)
    assert names(tmp_path) == [before.name, after.name, "lazygt.lock"]


def test_torn_ones_alone_are_no_beginning(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"lost 1 bytes, and there is no other$") as raised:
        newest(tmp_path)
    assert raised.value.torn


def test_bytes_after_the_end_are_damage(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(CheckpointError, match=r"1 bytes more than were written"):
        newest(tmp_path)


def test_the_last_two_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    others = ["checkpoint-000000.lazygt", "checkpoint-000001.lazygt.part", "checkpoint-1.lazygt",
              "checkpoint-000002.lazygt.bak", "model.pt", "notes.txt"]  # fmt: skip
    for name in others:
        (tmp_path / name).write_text("mine")
    link, target = tmp_path / "checkpoint-000003.lazygt.part", tmp_path.with_name("elsewhere")
    target.write_bytes(b"lazygt checkpt 1")
    link.symlink_to(target)
    folder = CheckpointFolder(tmp_path)
    for step in range(5):
        save(folder, step)
    # numbers begin after those that are somebody's
    written = ["checkpoint-000007.lazygt", "checkpoint-000008.lazygt"]
    assert names(tmp_path) == sorted([*others, link.name, *written, "lazygt.lock"])
    assert target.exists()
    for name in others:
        assert (tmp_path / name).read_text() == "mine"


def test_what_a_killed_session_left_is_removed(tmp_path: Path) -> None:
    part = tmp_path / "checkpoint-000009.lazygt.part"
    part.write_bytes(bytes(1000))
    CheckpointFolder(tmp_path)
    assert not part.exists()


def test_a_folder_is_one_sessions_alone(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=f"another session.*process {os.getpid()}"):
        CheckpointFolder(tmp_path)
    save(folder, 1)
    folder.close()
    assert CheckpointFolder(tmp_path).whole == [1]


PROGRAM = """
import os, sys
from lazygt.runtime.recovery.checkpoint_folder import CheckpointFolder
folder = CheckpointFolder(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_lets_go_though_a_child_of_it_lives(tmp_path: Path) -> None:
    """As the processes of a DataLoader do, for a while."""
    other = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    child = int(other.stdout.readline())
    with pytest.raises(CheckpointError, match=f"process {other.pid}"):
        CheckpointFolder(tmp_path)
    other.kill()
    other.wait()
    CheckpointFolder(tmp_path).close()
    os.kill(child, 0)  # it is there
    other.stdin.close()
    other.stdout.read()  # until it has ended
    other.stdout.close()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_full_disk_leaves_nothing_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 1), save(folder, 2)

    class FullAfter:
        def __init__(self, file: IO[bytes]) -> None:
            self.file, self.writes = file, 0

        def write(self, data: Any) -> None:
            self.writes += 1
            if self.writes > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.file.write(data)

    def onto_full(file: IO[bytes], about: Any, sections: Any) -> None:
        write(FullAfter(file), about, sections)  # type: ignore[arg-type]

    with monkeypatch.context() as full:
        full.setattr(checkpoint_folder, "write", onto_full)
        with pytest.raises(OSError, match="No space left"):
            save(folder, 3)
    assert names(tmp_path) == [
        "checkpoint-000001.lazygt",
        "checkpoint-000002.lazygt",
        "lazygt.lock",
    ]
    save(folder, 4)
    assert names(tmp_path) == [
        "checkpoint-000002.lazygt",
        "checkpoint-000003.lazygt",
        "lazygt.lock",
    ]


def test_a_folder_that_can_not_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="can't be written"):
        CheckpointFolder(tmp_path / "file")
