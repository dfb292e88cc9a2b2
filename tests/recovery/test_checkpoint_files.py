"""Checkpoints as files: whole or not there, every byte checked, and whose folder it is."""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from lazygt.errors import CheckpointError
from lazygt.host.files import crc32
from lazygt.recovery.checkpoint import checkpoint_file
from lazygt.recovery.checkpoint.checkpoint_file import (
    CheckpointFile,
    CheckpointFolder,
    newest,
    write,
)

SECTIONS = [b"state", b"", bytes(range(256)) * 9, b"x"]


def save(folder: CheckpointFolder, step: int) -> Path:
    return folder.write({"step": step}, map(memoryview, SECTIONS))


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def numbers(path: Path) -> list[int]:
    *checkpoints, lock = names(path)
    assert lock == "lazygt.lock"
    return [int(name.removeprefix("checkpoint-").removesuffix(".lazygt")) for name in checkpoints]


def test_checkpoint_file_round_trip(tmp_path: Path) -> None:
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
def test_torn_checkpoint_falls_back_to_previous(tmp_path: Path, left: int) -> None:
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


def test_only_torn_checkpoint_is_error(tmp_path: Path) -> None:
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


def test_partial_file_of_killed_session_is_removed(tmp_path: Path) -> None:
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
    assert CheckpointFolder(tmp_path).retained == [1]


PROGRAM = """
import os, sys
from lazygt.recovery.checkpoint.checkpoint_file import CheckpointFolder
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
        full.setattr(checkpoint_file, "write", onto_full)
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


def test_unusable_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="can't be written"):
        CheckpointFolder(tmp_path / "file")


def test_folder_and_files_are_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = save(CheckpointFolder(tmp_path / "a" / "run"), 1)
    finally:
        os.umask(before)
    made = [path, path.with_name("lazygt.lock"), path.parent, path.parent.parent]
    assert [stat.S_IMODE(each.stat().st_mode) for each in made] == [0o600, 0o600, 0o700, 0o700]


@pytest.mark.parametrize("content", ["", "12\n", "precious"])
def test_lock_of_another_content_is_not_emptied(tmp_path: Path, content: str) -> None:
    lock = tmp_path / "lazygt.lock"
    lock.write_text(content)
    if content == "precious":
        with pytest.raises(CheckpointError, match=r"lazygt\.lock in it is no lock of lazygt"):
            CheckpointFolder(tmp_path)
        assert lock.read_text() == content
    else:
        CheckpointFolder(tmp_path).close()
        assert lock.read_text() == f"{os.getpid()}\n"


def test_lock_that_is_a_link_empties_nothing(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("12\n")
    (tmp_path / "lazygt.lock").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"lazygt\.lock is a link, which is not followed"):
        CheckpointFolder(tmp_path)
    assert target.read_text() == "12\n"


def test_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 1)
    tmp_path.chmod(0o777)
    with pytest.raises(CheckpointError, match=f"`chmod go-w {tmp_path}`"):
        newest(tmp_path)
    (tmp_path / "lazygt.lock").unlink()
    with pytest.raises(CheckpointError, match=f"`chmod go-w {tmp_path}`"):
        CheckpointFolder(tmp_path)
    assert names(tmp_path) == ["checkpoint-000001.lazygt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_checkpoint_of_another_user_is_not_read(tmp_path: Path, which: str) -> None:
    folder = CheckpointFolder(tmp_path / "run")
    path = save(folder, 1)
    folder.close()
    given = path if which == "file" else path.parent
    os.chown(given, 65534, 65534)
    with pytest.raises(CheckpointError, match=f"{given} belongs to user 65534.*`chown -h 0"):
        newest(path.parent)


def test_file_that_others_may_write_to_is_not_read(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    path.chmod(0o620)
    with pytest.raises(CheckpointError, match=f"`chmod 600 {path}`"):
        newest(tmp_path)


def test_overlapping_sections_are_refused(tmp_path: Path) -> None:
    """A file of a megabyte could else have the same bytes checked a million times."""
    path = save(CheckpointFolder(tmp_path), 1)
    data = path.read_bytes()
    begin = struct.unpack_from("<Q", data, 24)[0]
    index = msgspec.msgpack.decode(data[begin:])
    index["sections"] = [index["sections"][0]] * 2
    packed = msgspec.msgpack.encode(index)
    fields = struct.pack("<QQQQ8x", begin + len(packed), begin, len(packed), crc32(packed))
    header = data[:16] + fields
    path.write_bytes(header + struct.pack("<Q", crc32(header)) + data[64:begin] + packed)
    with pytest.raises(CheckpointError, match="section 1 is not where it must be"):
        newest(tmp_path)
