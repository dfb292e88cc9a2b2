"""Errors and warnings of lazygt.

    LazyGTError (RuntimeError)
    ├── NoSession           a lazygt tensor or device used with no open session
    ├── ExecutionError      an op failed on a worker; names the op and the line that recorded it,
    │   │                   and is also of eager torch's class: an IndexError ...
    │   └── CollectiveMismatch  ranks were about to run different collectives
    ├── CodeError           the code of an op or function can't be brought to the workers
    ├── WorkerDied          a worker process ended
    │   └── DeviceLost          a kernel failure made the GPU unusable for its process
    ├── WorkerFrozen        a worker process no longer answers
    ├── ProtocolError       a message that violates the wire schema
    ├── SecurityError       a configuration that would expose the session
    ├── ConnectionLost      another host does not answer, or no longer
    ├── AccessDenied        another host refuses this key, or has an unexpected one
    ├── VersionMismatch     another host runs another lazygt, torch or Python
    ├── CheckpointError     a checkpoint that can't be resumed, or a folder that can't hold any
    ├── PoolError           a pool that can't be reached, that refused a session, or ended one
    │   ├── PoolFull            all workers are in use, and the queue is full
    │   ├── PoolDraining        the pool admits no more sessions
    │   ├── GangTooLarge        more workers than the pool has
    │   ├── OverQuota           more than the quota of this key
    │   └── SessionEnded        the pool has ended the session
    ├── LaunchError         a job's variables are wrong, or its processes don't meet
    ├── MachineError        a machine file with a figure that is missing or absurd, or no machine
    └── GraphError          a graph or plan that breaks its own rules (a bug in lazygt)

    CompileWarning (UserWarning) a function of torch.compile runs uncompiled in a session
    GatherWarning (UserWarning)  sharded operands of an op were all-gathered
    PipelineWarning (UserWarning)  stages run microbatches one after the other, and idle

Errors in the *use* of an op (wrong shape, wrong dtype) are torch's own exceptions,
raised by torch at the call.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

#: Public names, also exported by ``lazygt``.
__all__ = [
    "AccessDenied", "CheckpointError", "CodeError", "CollectiveMismatch", "CompileWarning",
    "ConnectionLost", "DeviceLost", "ExecutionError", "GangTooLarge", "GatherWarning",
    "GraphError", "IdleWarning", "LazyGTError", "MachineError", "NoSession", "OverQuota",
    "PipelineWarning", "PoolDraining", "PoolError", "PoolFull", "ProtocolError",
    "SecurityError", "SessionEnded", "VersionMismatch", "WorkerDied", "WorkerFrozen",
]  # fmt: skip


class LazyGTError(RuntimeError):
    """Base of all errors of lazygt."""


class NoSession(LazyGTError):
    """A lazygt tensor was used with no open session, or with one that has been closed.

    To fix this, do the work inside ``with lazygt.session():``, or fetch values for later use
    (``tensor.cpu()``) before the block ends.
    """


class ExecutionError(LazyGTError):
    """An op failed while a worker ran it.

    The error is also of the exception class of eager torch, so that ``except
    IndexError:`` and the like catch it.

    Attributes:
        op: the aten overload, for example ``aten.index_select.default``.
        inputs: dtype and shape of each tensor argument.
        where: ``file:line`` of the user's code that recorded the op.
        kind: name of the exception's class on the worker.
        detail: message of that exception.
        rank: the worker's rank.
    """

    #: exception class of eager torch, if known
    _eager: ClassVar[type[Exception] | None] = None

    def __init__(
        self, op: str, inputs: tuple[str, ...], where: str, kind: str, detail: str, rank: int = 0
    ) -> None:
        self.op, self.inputs, self.where = op, inputs, where
        self.kind, self.detail, self.rank = kind, detail, rank
        Exception.__init__(self, self._message())  # the eager class may have other parameters

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError.__str__ would quote the message

    def __reduce__(self) -> Any:
        arguments = self.op, self.inputs, self.where, self.kind, self.detail, self.rank
        return _rebuild, (self._eager or type(self), arguments)

    def _message(self) -> str:
        return (
            f"{self.op}({', '.join(self.inputs)}) failed on worker {self.rank}: {self.kind}: "
            f"{self.detail}\n"
            f"  recorded at {self.where}\n"
            f"  Values that do not depend on this op are intact and the session goes on; "
            f"what depends on it raises this error when it is read."
        )


def execution_error(
    op: str, inputs: tuple[str, ...], where: str, kind: str, detail: str, rank: int = 0
) -> ExecutionError:
    """Build an ExecutionError that is also of the class named by ``kind_of``, if known."""
    eager: Any = exception_class(kind)
    error_class = ExecutionError if eager is None else _as_eager(eager)
    return error_class(op, inputs, where, kind.rpartition(".")[2].lstrip("_"), detail, rank)


def kind_of(error: BaseException) -> str:
    """Return the name of an exception's class in messages between processes."""
    cls = type(error)
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


def exception_class(kind: str) -> type[Exception] | None:
    """Look up an exception class by its name of ``kind_of``, without imports; None: unknown."""
    cls: Any = getattr(builtins, kind, None)
    names = kind.split(".")
    for count in range(len(names) - 1, 0, -1):
        if (module := sys.modules.get(".".join(names[:count]))) is not None:
            cls = module
            for name in names[count:]:
                cls = getattr(cls, name, None)
            break
    return cls if isinstance(cls, type) and issubclass(cls, Exception) else None


@cache
def _as_eager(eager: Any) -> type[ExecutionError]:
    """Return a subclass of ExecutionError and ``eager``; ExecutionError if there can be none."""
    if issubclass(ExecutionError, eager) or issubclass(eager, ExecutionError):
        return ExecutionError
    eager_new = eager.__new__

    def create(cls: type[Any], *_: object) -> Any:
        return eager_new(cls)  # the default, RuntimeError.__new__, rejects subclasses of OSError

    name = f"{eager.__name__.lstrip('_')}OnWorker"
    namespace = {"__new__": create, "__module__": __name__, "_eager": eager}
    try:
        error_class = type(name, (ExecutionError, eager), namespace)
        error_class("", (), "", "", "")
    except Exception:  # noqa: BLE001 - a user's class with another constructor
        return ExecutionError
    return error_class


def _rebuild(cls: type[Exception], arguments: tuple[Any, ...]) -> ExecutionError:
    """Rebuild an ExecutionError, for pickle."""
    error_class: Any = cls
    return (error_class if issubclass(cls, ExecutionError) else _as_eager(error_class))(*arguments)


class CollectiveMismatch(ExecutionError):
    """The ranks hold different plans for the same run; raised before anything is launched.

    A bug in lazygt: the plans of all ranks are built together. ``detail`` names the ranks and the
    first collective that differs. The workers have left their process group.
    """

    def _message(self) -> str:
        return (
            f"worker {self.rank} can't begin a plan: the ranks would not meet. {self.detail}\n"
            f"  recorded at {self.where}\n"
            f"  This is a bug in lazygt; please report it. Open a new session to go on."
        )


class CodeError(LazyGTError):
    """The code of a custom op or function can't be sent to the workers.

    Raised when the op is recorded, if the client detects the failure. A failure on a worker (an
    import error) is an ExecutionError that is also a CodeError.

    Attributes:
        name: name of the op or function.
        module: module of its definition; "" if unknown.
    """

    def __init__(self, name: str, module: str, why: str) -> None:
        self.name, self.module = name, module
        where = f" (defined in {module})" if module else ""
        super().__init__(f"{name}{where} can't be brought to the workers: {why}")


class WorkerDied(LazyGTError):
    """A worker process ended while the session needed it.

    Attributes:
        rank: the worker's rank.
        pid: the worker's process id.
        status: cause of the end, for example ``signal SIGKILL``, ``exit code 1`` or ``out of memory
            (signal SIGKILL)``.
        stderr: the last lines of the worker's standard error.
        during: step at which workers died repeatedly; "" if unknown.
        out_of_memory: True if the process was killed for lack of memory.
    """

    def __init__(self, rank: int, pid: int, status: str, stderr: str, during: str = "") -> None:
        self.during = during
        self.rank, self.pid, self.status, self.stderr = rank, pid, status, stderr
        tail = f"\n  the end of its stderr:\n{_indent(stderr)}" if stderr.strip() else ""
        self.out_of_memory = status.startswith("out of memory")
        advice = ""
        if self.out_of_memory:
            advice = (
                " Give it less to hold at a time (smaller batches, `del` of what is not needed), "
                "more workers to share it, or more memory."
            )
        super().__init__(
            f"worker {rank} (pid {pid}) died: {status}.{during and ' ' + during} Its values are "
            f"lost: leave the session and open a new one.{advice}{tail}"
        )


class DeviceLost(WorkerDied):
    """A kernel failure made the GPU unusable for its process.

    Causes are device-side assertions (an index out of range) and illegal addresses. In a session
    with recovery the op fails with an ExecutionError, and all other values are computed again in a
    new process. Without recovery the values are lost, and this error is raised.

    Attributes:
        why: the driver's message.
        culprit: the failed op, if known (see ``messages.Failure``).
    """

    culprit: Any = None

    def __init__(self, rank: int, pid: int, why: str, at: str = "") -> None:
        self.why = why
        location = f"This was met at {at}. " if at else ""
        super().__init__(
            rank, pid, f"it can't use its device any more: {why}", "",
            f"{location}Kernels run while others are launched, so an earlier op may be the cause: "
            f"started with CUDA_LAUNCH_BLOCKING=1 in its environment, a program is told which.",
        )  # fmt: skip


class WorkerFrozen(LazyGTError):
    """A worker process is alive but has not answered for ``deadline`` seconds."""

    def __init__(self, rank: int, pid: int, deadline: float) -> None:
        self.rank, self.pid, self.deadline = rank, pid, deadline
        super().__init__(
            f"worker {rank} (pid {pid}) has not answered for {deadline:g} s. It may be stopped or "
            f"swapped out; raise the deadline with "
            f"lazygt.session(workers=Workers(frozen_after=...)) if that is expected."
        )


class ProtocolError(LazyGTError):
    """A message does not follow the wire schema; its sender is dropped."""


class StoreLost(LazyGTError, ConnectionError):
    """The rendezvous store of ranks on several hosts does not answer.

    The store is in the process that opened the session, which has ended or can't be reached.

    Attributes:
        endpoint: the store's address.
        why: the cause, if it is known; else empty.
    """

    def __init__(self, endpoint: str, silence: float, why: str = "") -> None:
        self.endpoint, self.silence, self.why = endpoint, silence, why
        super().__init__(
            f"the session's store at {endpoint} is lost: {why}"
            if why
            else f"the session's store at {endpoint} has said nothing for {silence:g} seconds: its "
            f"process has ended, a firewall keeps its port from this host, or the token is another "
            f"session's (LAZYGT_TOKEN has to be the same on all hosts)"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.silence, self.why)


class SecurityError(LazyGTError):
    """A configuration would expose the session to other users."""


class ConnectionLost(LazyGTError):
    """Another host does not answer, or no longer.

    Attributes:
        endpoint: the host's address.
        why: the cause, as far as it is known.
    """

    def __init__(self, endpoint: str, why: str) -> None:
        self.endpoint, self.why = endpoint, why
        super().__init__(f"no connection to {endpoint}: {why}")

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.why)


class AccessDenied(LazyGTError):
    """Another host refuses this key, or has an unexpected key itself.

    Attributes:
        endpoint: the host's address.
        why: the reason.
    """

    def __init__(self, endpoint: str, why: str) -> None:
        self.endpoint, self.why = endpoint, why
        super().__init__(
            f"{endpoint} refuses us: {why}. All hosts of a session must have the same "
            f"LAZYGT_TOKEN; for a pool ask whoever runs it for a key (`lazygt keys new NAME`)."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.why)


class VersionMismatch(LazyGTError):
    """Another host runs another lazygt, torch or Python, so code and plans can't go there.

    Attributes:
        endpoint: the host's address.
        differences: name, version here, version there.
        why: the host's message.
    """

    def __init__(
        self, endpoint: str, differences: list[tuple[str, str, str]], why: str = ""
    ) -> None:
        self.endpoint, self.differences, self.why = endpoint, differences, why
        texts = [
            f"{name} is {local} here and {remote} there" for name, local, remote in differences
        ]
        super().__init__(
            f"{endpoint} runs other versions: {'; '.join([*texts, *([why] if why else [])])}. "
            f"Install the same ones in both places."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.differences, self.why)


class CheckpointError(LazyGTError):
    """A checkpoint can't be resumed, and nothing was loaded; or a folder can't have checkpoints.

    Attributes:
        path: path of the file or folder.
        why: the reason.
        torn: True if the end of the file is missing.
    """

    def __init__(self, path: str | os.PathLike[str], why: str, torn: bool = False) -> None:
        self.path, self.torn = os.fspath(path), torn
        self.why = why
        super().__init__(f"checkpoint {self.path}: {why}")

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.why, self.torn)


class PoolError(LazyGTError):
    """A pool of workers can't be reached, has refused a session, or has ended one.

    Attributes:
        given: the error's arguments on the wire.
    """

    def __init__(self, text: str, *given: Any) -> None:
        self.given: tuple[Any, ...] = given or (text,)
        super().__init__(text)

    def __reduce__(self) -> Any:
        return type(self), self.given


class PoolFull(PoolError):
    """All workers are in use, and the queue of waiting sessions is full.

    Attributes:
        waiting: number of sessions in the queue.
        workers: number of workers of the pool.
    """

    def __init__(self, waiting: int, workers: int) -> None:
        self.waiting, self.workers = waiting, workers
        super().__init__(
            f"the pool is full: its {workers} worker(s) are taken, and {waiting} session(s) wait "
            f"already. Try again later, or see who has them with `lazygt pool status`.",
            waiting, workers,
        )  # fmt: skip


class PoolDraining(PoolError):
    """The pool admits no more sessions."""

    def __init__(self) -> None:
        super().__init__(
            "the pool is being drained and admits no session any more (lazygt pool drain): use "
            "another pool, or ask whoever runs it."
        )
        self.given = ()


class GangTooLarge(PoolError):
    """A session requested more workers than the pool has, and would wait for ever.

    Attributes:
        asked: number of requested workers.
        workers: number of workers of the pool.
    """

    def __init__(self, asked: int, workers: int) -> None:
        self.asked, self.workers = asked, workers
        super().__init__(
            f"a session of {asked} worker(s) can never fit: the pool has {workers}. Ask for at "
            f"most so many with lazygt.session(workers=...), or have it served with more.",
            asked, workers,
        )  # fmt: skip


class OverQuota(PoolError):
    """A client requested or uses more than the quota of its key.

    Attributes:
        what: ``sessions``, ``workers``, ``cores``, or ``memory`` (bytes).
        wanted: amount of this session.
        used: amount of the client's other sessions and published weights.
        limit: quota of all of them.
    """

    def __init__(self, what: str, wanted: int, used: int, limit: int) -> None:
        self.what, self.wanted, self.used, self.limit = what, wanted, used, limit
        unit = " bytes of memory" if what == "memory" else f" {what}"
        super().__init__(
            f"over this key's quota of {limit:,}{unit}: this session takes {wanted:,}, and others "
            f"of the same key {used:,}. Use less, close what is not needed, or ask whoever runs "
            f"the pool for more.",
            what, wanted, used, limit,
        )  # fmt: skip


class SessionEnded(PoolError):
    """The pool has ended a session; its values are lost.

    Attributes:
        session: name of the session.
        why: the reason: evicted, or expired.
    """

    def __init__(self, session: str, why: str) -> None:
        self.session, self.why = session, why
        super().__init__(
            f"the pool has ended session {session}: {why}. Its values are lost; open a new one.",
            session, why,
        )  # fmt: skip


class LaunchError(LazyGTError):
    """The processes of a job can't form one session.

    The variables of the ranks contradict one another, one is missing, or the processes can't
    connect.

    If the job's variables are not meant for lazygt, ``LAZYGT_LAUNCHER=process`` or
    ``lazygt.session(launcher="process")`` leaves them alone.

    Attributes:
        variable: the faulty environment variable; "" if none is at fault.
        why: the fault, and a remedy.
    """

    def __init__(self, variable: str, why: str) -> None:
        self.variable, self.why = variable, why
        super().__init__(f"{variable} {why}" if variable else why)

    def __reduce__(self) -> Any:
        return type(self), (self.variable, self.why)


class MachineError(LazyGTError, ValueError):
    """A machine file is invalid, or no machine has that name.

    Attributes:
        path: path of the file, or the name.
        key: the invalid figure, such as ``memory.bandwidth``; "" if the error is about no figure.
        why: the fault, and the expected value.
    """

    def __init__(self, path: str | os.PathLike[str], key: str, why: str) -> None:
        self.path, self.key, self.why = os.fspath(path), key, why
        where = f"{self.path}: {key}" if key else self.path
        super().__init__(f"machine {where} {why}")

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.key, self.why)


class GraphError(LazyGTError):
    """A graph or plan breaks its own rules: a bug in lazygt, not in the user's code."""


class CompileWarning(UserWarning):
    """A function of ``torch.compile`` runs uncompiled, because a session is open.

    The numbers are those of eager torch. Emitted once per process, with the line.
    """


class GatherWarning(UserWarning):
    """Sharded operands of an op were all-gathered, though no placement asked for that.

    The op has no sharding rule, or no strategy that takes less time. The numbers are right. Emitted
    once per session, op and line, with the bytes and a remedy; ``lazygt why`` lists all.
    """


class IdleWarning(UserWarning):
    """Work inside an open session runs in the client.

    The numbers are right; they are computed in this process. Emitted once per session, with the
    line and the code to write instead.
    """


class PipelineWarning(UserWarning):
    """The stages of a pipeline run microbatches one after the other, because 1F1B is impossible.

    The numbers are right, but each stage waits while the others work. Emitted once per
    session, with the obstacle.
    """


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def in_one_line(error: BaseException) -> str:
    """Return an error's type and message without line breaks, for a log or a table.

    Of long compiler output only the first line, and the first one with an error, are included.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:] if "error:" in line]
    return ": ".join([type(error).__name__, *lines[:1], *named[:1]])[:400]


# -- former names ------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")


def renamed(old: str, new: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept a keyword by its former name, with a DeprecationWarning."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if old in options and new in options:
                raise TypeError(
                    f"{function.__name__}() got {new}, and {old}, which is its former name"
                )
            if old in options:
                text = f"{function.__name__}({old}=...) is deprecated: use {new}=..."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` of a module that takes its former names, with a DeprecationWarning.

    Args:
        names: former name -> present name.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is deprecated: use {module}.{names[name]}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return find
