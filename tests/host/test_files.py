"""Private files and folders: modes whatever the umask, and nothing of another user's is touched."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazygt.calibrate import write as write_machine
from lazygt.graph.node import Graph
from lazygt.host.files import (
    bind,
    check_folder,
    create,
    create_whole,
    make_folder,
    open_output,
    open_own,
    replace,
    write_output,
)
from lazygt.machine.find import default_machine
from lazygt.observe.picture import render
from lazygt.runtime.client.console import InstructionLog
from lazygt.runtime.launch.session_directory import RECORD, SessionDirectory
from tests.support.file_access import makes, places

NOBODY = 65534
_OF_THE_KERNEL = "a file of the kernel's, below /proc"
_NAMED_BY_THE_USER = "a folder that the user has named; the umask counts"
_MEMORY = "memory without a name, by its descriptor in a process of this user's"
#: Places outside ``lazygt.host.files`` that make files, and why they may.
MAY_MAKE = {
    "calibrate/__init__.py": {"mkdir": _NAMED_BY_THE_USER},
    "cli/simulate.py": {"TemporaryFile": "it has no name"},
    "native/build.py": {"mkdir": _NAMED_BY_THE_USER},
    "runtime/compiling/compiler.py": {"write_text": _OF_THE_KERNEL},
    "net/channel.py": {"bind": "ZMQ is given the descriptor of a socket that listens"},
    "net/status_file.py": {"open": _MEMORY},
    "sweeps/steps.py": {"write_text": _OF_THE_KERNEL},
    "transfer/transports/broadcast_group.py": {
        "link": "a socket's name in a directory of mode 0700"
    },
    "transfer/transports/shared_memory.py": {"open": _MEMORY},
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture(params=[0, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a" / "b")
    os.close(create(folder / "new"))
    os.close(open_own(folder / "lock", os.O_RDWR | os.O_CREAT))
    replace(folder / "whole", b"x")
    create_whole(folder / "key", b"x")
    with socket.socket(socket.AF_UNIX) as listener:
        bind(listener, folder / "door")
    session = SessionDirectory()
    assert [mode(path) for path in (session.path, session.path / RECORD)] == [0o700, 0o600]
    session.close()
    assert [mode(path) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert {path.name: mode(path) for path in folder.iterdir()} == {
        "new": 0o600, "lock": 0o600, "whole": 0o600, "key": 0o600, "door": 0o600,
    }  # fmt: skip


def test_own_file_with_an_open_mode_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("1")
    path.chmod(0o644)
    os.close(open_own(path, os.O_RDWR | os.O_CREAT))
    assert (mode(path), path.read_text()) == (0o600, "1")


def link(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def others_may_write(path: Path) -> None:
    path.write_text("theirs")
    path.chmod(0o666)


def second_name(path: Path) -> None:
    os.link(path.with_name("target"), path)


def of_another(path: Path) -> None:
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)


REFUSED = {
    link: r"is a link, which is not followed: `rm ",
    pipe: r"is no file",
    others_may_write: r"others may write to .*: `chmod 600 ",
    second_name: r"has another name",
    of_another: r"belongs to user 65534, and this process is of user 0: `chown -h 0 ",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("put", [link, pipe, others_may_write, second_name,
                                 pytest.param(of_another, marks=as_root)])  # fmt: skip
def test_file_that_may_be_another_users_is_refused(
    put: Callable[[Path], None], tmp_path: Path
) -> None:
    target, path = tmp_path / "target", tmp_path / "lock"
    target.write_text("mine")
    put(path)
    with pytest.raises(PermissionError, match=REFUSED[put]):
        open_own(path, os.O_RDWR | os.O_CREAT)
    with pytest.raises(FileExistsError):
        create(path)
    assert target.read_text() == "mine"


def test_whole_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "key"
    create_whole(path, b"first")
    with pytest.raises(FileExistsError):
        create_whole(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_takes_the_place_of_a_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "record"
    target.write_text("mine")
    link(path)
    replace(path, b"new")
    assert (target.read_text(), path.read_bytes(), path.is_symlink()) == ("mine", b"new", False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["record", "target"]


def test_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    for bits in (0o770, 0o707, 0o1777):
        tmp_path.chmod(bits)
        with pytest.raises(
            PermissionError, match=f"others may write to .*: `chmod go-w {tmp_path}`"
        ):
            check_folder(tmp_path)
    make_folder(tmp_path / "inside")  # as the message advises
    tmp_path.chmod(0o755)
    check_folder(tmp_path)


@as_root
def test_folder_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    folder, via = tmp_path / "folder", tmp_path / "via"
    folder.mkdir(0o700)
    via.symlink_to(folder)
    check_folder(via)
    os.chown(via, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"{via} belongs to user {NOBODY}"):
        check_folder(via)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"{folder} belongs to user {NOBODY}"):
        check_folder(folder)


def write(path: Path, append: bool = False) -> None:
    with open(open_output(path, append), "w") as file:
        file.write("new")


def test_output_goes_by_own_links_and_into_devices(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "log"
    target.write_text("older")
    link(path)
    write(path, append=True)
    assert target.read_text() == "oldernew"
    write(path)
    assert target.read_text() == "new"
    write(Path("/dev/null"))


@as_root
@pytest.mark.parametrize("put", [link, of_another])
def test_output_never_goes_where_another_user_leads(
    put: Callable[[Path], None], tmp_path: Path
) -> None:
    target, path = tmp_path / "target", tmp_path / "log"
    target.write_text("mine")
    put(path)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
        write(path)
    assert target.read_text() == "mine"


def save_log(path: Path) -> None:
    InstructionLog(str(path)).close()


def save_picture(path: Path) -> None:
    render(Graph((), (), (), ()), path.rename(path.with_suffix(".dot")))


def save_text(path: Path) -> None:
    write_output(path, "new")


@as_root
@pytest.mark.parametrize("save", [save_log, save_picture, save_text])
def test_exports_never_go_where_another_user_leads(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    target, path = tmp_path / "target", tmp_path / "export"
    target.write_text("mine")
    link(path)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
        save(path)
    assert target.read_text() == "mine"


def test_machine_file_is_written_through_no_name_that_others_know(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "here.toml"
    target.write_text("mine")
    (tmp_path / f".{path.name}.{os.getpid()}").symlink_to(target)
    write_machine(default_machine("cpu"), path)
    assert target.read_text() == "mine"
    assert mode(path) == 0o644


def test_no_other_module_makes_files() -> None:
    """A new place goes by ``lazygt.host.files``, or says above why it may not."""
    made = places(makes)
    assert made.pop("host/files.py")
    assert {path: set(names) for path, names in made.items()} == {
        path: set(reasons) for path, reasons in MAY_MAKE.items()
    }


@pytest.mark.parametrize("line", [
    "open(path, 'w')", "open(path, mode='ab')", "open(fd, mode)", "Path(path).open('x')",
    "path.write_text('')", "path.touch()", "os.open(path, os.O_RDWR | os.O_CREAT)",
    "tempfile.mkdtemp()", "os.mkfifo(path)", "socket.socket(socket.AF_UNIX).bind(path)",
    "figure.savefig(path)", "shared_memory.SharedMemory('name')", "os.link(a, b)",
])  # fmt: skip
def test_place_that_makes_a_file_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f"import os\n{line}\n")
    assert list(places(makes, tmp_path)) == ["module.py"]


def test_places_that_make_no_file_are_left(tmp_path: Path) -> None:
    lines = ["open(path)", "open(create(path), 'wb')", "signature.bind(args)", "trie.touch(3)",
             "os.open(path, os.O_RDONLY)", "figure.savefig(file)"]  # fmt: skip
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert places(makes, tmp_path) == {}
