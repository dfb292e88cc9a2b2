"""``subprocess.Popen`` for Python programs, which forks a process that has loaded torch already.

Loading torch anew takes a program seconds, and a fork of one that has it milliseconds. Nothing of
lazygt is loaded there: each program imports lazygt itself, in its own environment. Workers of this
process alone are forked from a template that has their modules of lazygt, which read no setting
when they are imported.

    this process --arguments, environment, descriptors--> template (torch, one thread)
    template --fork--> a parent that ends at once --fork--> the program

The program becomes a child of this process, which is a subreaper for that moment. A program may
start others in the same way, for which it has a template of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

#: What lazygt imports of others, when it is imported and when a session opens.
PRELOADED = (
    "torch", "torch.utils._device", "torch.distributed.tensor", "torch._dynamo", "numpy", "zmq",
    "msgspec.json", "msgspec.msgpack", "cloudpickle", "html", "secrets",
)  # fmt: skip
#: The compile process is forked from a template that has its modules, too, and knows the processor.
_COMPILING = "lazygt.runtime.compiling.compile_process"
_WORKING = "lazygt.runtime.launch.process"
_COMPILING_MODULES = (
    "torch._inductor.compile_fx", "torch._inductor.codegen.cpp_wrapper_cpu_array_ref",
    "torch._inductor.fx_passes.fuse_attention", "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.mkldnn_fusion", "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.quantization", "torch._inductor.extern_node_serializer",
    "torch._inductor.loop_body", "torch._inductor.codegen.wrapper_fxir", "torch._export.passes",
)  # fmt: skip
_WORKING_MODULES = (
    "lazygt.net.channel", "lazygt.runtime.worker.worker", "lazygt.runtime.collectives.group",
    "lazygt.runtime.launch.activity", "lazygt.runtime.launch.launcher",
    "lazygt.runtime.launch.session_directory",
)  # fmt: skip
_MESSAGE_BYTES = 200_000  # below what the kernel takes at once
_DESCRIPTORS = 64
_ENVIRONMENT_BYTES = 16_000
_PR_SET_CHILD_SUBREAPER = 36
#: torch's is loaded anew by this one.
Popen = subprocess.Popen
_SIGNATURE = inspect.signature(Popen._execute_child)  # type: ignore[attr-defined]
ROOT = str(Path(__file__).parents[2])
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.support import forking
forking.main(int(sys.argv[2]), sys.argv[3])
"""
#: What `Popen` is told that no fork can do.
_PLAIN: dict[str, Any] = {
    "executable": None, "preexec_fn": None, "close_fds": True, "shell": False, "gid": None,
    "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip


class Program(NamedTuple):
    """What a forked process is to run.

    Attributes:
        kind: ``-c``, ``-m`` or ``file``.
        target: the text, the module or the path.
        numbers: what the descriptors that are sent along are to be in the program; the first,
            a directory, is where it runs, the second takes its process id.
    """

    kind: str
    target: str
    arguments: list[str]
    safe_path: bool
    environment: dict[str, str]
    numbers: list[int]
    new_session: bool

    @staticmethod
    def parse(command: Any) -> tuple[str, str, list[str], bool] | None:
        """Kind, target, arguments and safe path of a command line of this Python; else None."""
        if not isinstance(command, (list, tuple)) or command[0] != sys.executable:
            return None
        rest = [os.fsdecode(part) for part in command[1:]]
        if safe_path := rest[:1] == ["-P"]:
            del rest[0]
        if rest and not rest[0].startswith("-"):
            return "file", rest[0], rest[1:], safe_path
        if len(rest) > 1 and rest[0] in ("-c", "-m"):
            return rest[0], rest[1], rest[2:], safe_path
        return None


class Template:
    """A process with torch that forks whatever it is sent."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self._socket, self._process = sock, process
        self._owner = os.getpid()
        self._lock = threading.Lock()
        atexit.register(self.close)

    @staticmethod
    def start(target: str = "") -> Template:
        """Start one, and let it load torch, and what else this program needs.

        That of workers is forked from the one of all programs.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("LAZYGT_")}
            environment.pop("PYTHONPATH", None)
            environment["LAZYGT_ROOM"] = " " * _ENVIRONMENT_BYTES
            if target == _WORKING:
                environment["LAZYGT_WORKER"] = "1"
            start = Forked if target == _WORKING else Popen
            process = start(
                [sys.executable, "-P", "-c", _PROGRAM, ROOT, str(theirs.fileno()), target],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        return Template(ours, process)

    @property
    def is_usable(self) -> bool:
        """Whether a program would become this process's child."""
        return self._owner == os.getpid()

    def is_process(self, pid: int) -> bool:
        return self._process is not None and self._process.pid == pid

    def fork(self, program: Program, directory: int, descriptors: Sequence[int]) -> int:
        """Start a program as a child of this process; its id."""
        answer, answer_end = os.pipe()
        try:
            sent = [directory, answer_end, *descriptors]
            with self._lock:
                _adopt(True)
                try:
                    socket.send_fds(self._socket, [json.dumps(program).encode()], sent)
                    os.close(answer_end)
                    answer_end = -1
                    pid = os.read(answer, 20)
                finally:
                    _adopt(False)
        finally:
            os.close(answer)
            if answer_end >= 0:
                os.close(answer_end)
        if not pid:
            raise OSError(f"no process was forked for {program.target[:200]!r}")
        return int(pid)

    def close(self) -> None:
        """Let it end."""
        self._socket.close()
        if self._process is not None and self.is_usable:
            self._process.wait()


#: The templates of this process: of the compile process, of workers, and of all else, by "".
_templates: dict[str, Template] = {}
#: Whether this process was forked from a template; everything it starts is forked from one.
_is_forked = False
_starting = threading.RLock()


def template(target: str = "") -> Template:
    """The template for a program, started when it is first asked for."""
    target = target if target in (_COMPILING, _WORKING) and not _is_forked else ""
    with _starting:  # two threads may start their first processes at once, and a worker takes both
        if target not in _templates:
            _templates[target] = Template.start(target)
        return _templates[target]


def is_template(pid: int) -> bool:
    return any(each.is_process(pid) for each in _templates.values())


class Forked(Popen):  # type: ignore[type-arg]
    """A Python program in a forked process; anything else is started as ever."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        parsed = Program.parse(given["args"])
        plain = all(given.get(name, value) == value for name, value in _PLAIN.items())
        if parsed is None or not plain or not template(parsed[1]).is_usable:
            super()._execute_child(*args, **kwargs)  # type: ignore[misc]
            return
        standard = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [place if fd < 0 else fd for place, fd in enumerate(standard)]
        passed = list(given["pass_fds"])
        environment = given["env"] if given["env"] is not None else os.environ
        program = Program(
            *parsed,
            {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
            [0, 1, 2, *passed],
            bool(given["start_new_session"]),
        )
        directory = os.open(given["cwd"] or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.pid = template(program.target).fork(program, directory, [*standard, *passed])
        finally:
            os.close(directory)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _adopt(orphans: bool) -> None:
    """Whether grandchildren whose parent ends become this process's children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# -- in the template -------------------------------------------------------------------------------


def _serve(sock: socket.socket) -> tuple[Program, list[int]]:
    """Fork for each message; returns in the forked process alone."""
    while True:
        text, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, _DESCRIPTORS)
        if not text:
            os._exit(0)
        adopted, ended = os.pipe()
        parent = os.fork()
        if parent == 0:
            if os.fork():
                os._exit(0)
            os.close(ended)
            os.read(adopted, 1)  # until the parent in between has ended, and was waited for
            os.close(adopted)
            sock.close()
            return Program(*json.loads(text)), fds
        os.waitpid(parent, 0)
        for fd in (adopted, ended, *fds):
            os.close(fd)


def _become(program: Program, fds: list[int]) -> None:
    """Take the program's environment, directory and descriptors."""
    directory, answer, *rest = fds
    os.fchdir(directory)
    os.close(directory)
    if program.new_session:
        os.setsid()  # before anybody knows of it: its group can be killed from then on
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    above = max(program.numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in rest]
    for fd in rest:
        os.close(fd)
    for fd, number in zip(moved, program.numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(program.environment)
    _show_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _show_environment() -> None:
    """Write the environment to where ``/proc/PID/environ`` reads it, as far as it fits.

    Nothing else reads it any more: since it was cleared, all variables lie in memory of their own.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = map(int, fields[47:49])  # env_start and env_end
    text = b"".join(k + b"=" + v + b"\0" for k, v in os.environb.items())
    ctypes.memmove(start, text[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _give_template(fds: Sequence[int]) -> tuple[Program, list[int]] | None:
    """Fork a template for what this program starts; returns work in what that forks alone."""
    global _is_forked
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for fd in (ours.detach(), *fds):
            os.close(fd)
        return _serve(theirs)
    theirs.close()
    _templates[""], _is_forked = Template(ours, None), True
    subprocess.Popen = Forked  # type: ignore[misc]
    return None


def _run(program: Program, path: list[str]) -> None:
    """Run it as ``__main__``, with Python's own exit and tracebacks."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    first = {"-c": "", "-m": os.getcwd(), "file": os.path.dirname(os.path.abspath(program.target))}
    variable = program.environment.get("PYTHONPATH", "")
    sys.path[:] = [
        *([] if program.safe_path else [first[program.kind]]),
        *filter(None, variable.split(os.pathsep)),
        *path,
    ]
    sys.argv = [program.kind if program.kind != "file" else program.target, *program.arguments]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # as multiprocessing names it
    try:
        if program.kind == "-m":
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            text, name = program.target, "<string>"
            if program.kind == "file":
                name = main.__dict__["__file__"] = program.target
                with open(name, "rb") as file:
                    text = file.read()  # type: ignore[assignment]
            exec(compile(text, name, "exec"), main.__dict__)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - as the interpreter would
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_signal()
        sys.exit(1)


def _end_by_signal() -> None:
    """End as Python does after an interrupt that nobody caught; what is registered runs before."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _load(target: str) -> None:
    """Import what programs do; for the compile process, find the vector instructions, too."""
    for name in (*PRELOADED, *(_WORKING_MODULES if target == _WORKING else ())):
        importlib.import_module(name)
    if target == _COMPILING:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # read with the first import
        for name in _COMPILING_MODULES:
            importlib.import_module(name)
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()


def main(descriptor: int, target: str) -> None:
    """Be a template, and whatever it forks.

    Args:
        target: the module that it is for; "" for any program.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load(target)
    sys.path.remove(ROOT)
    path = list(sys.path)
    gc.collect()
    gc.freeze()  # pages that no collection writes to stay shared
    work: tuple[Program, list[int]] | None = _serve(socket.socket(fileno=descriptor))
    while work is not None:
        program, fds = work
        # workers start nobody
        work = None if "LAZYGT_WORKER" in program.environment else _give_template(fds)
    _become(program, fds)
    _run(program, path)
