"""Errors and warnings of lazygt.

    LazyGTError (RuntimeError)
    ├── NoSession           a lazygt tensor or device used with no open session
    ├── ExecutionError      an op failed on a worker; names the op and the line that recorded it,
    │   │                   and is also of eager torch's class: an IndexError ...
    │   └── CollectiveMismatch  ranks were about to run different collectives
    ├── CodeError           the code of an op or function can't be brought to the workers
    ├── WorkerDied          a worker process ended
    │   └── DeviceLost          a kernel failed in a way that ends all of its process's on the GPU
    ├── WorkerFrozen        a worker process no longer answers
    ├── ProtocolError       a message that is not of the wire schema
    ├── SecurityError       a configuration that would expose the session
    ├── ConnectionLost      another host does not answer, or not any more
    ├── AccessDenied        another host refuses our key, or has not the one that it should
    ├── VersionMismatch     another host runs another lazygt, torch or Python
    ├── CheckpointError     a checkpoint that can't be resumed, or a folder that can't hold any
    ├── PoolError           a pool that can't be reached, that refused a session, or ended one
    │   ├── PoolFull            all workers are taken, and as many sessions wait as may
    │   ├── PoolDraining        it admits nobody any more
    │   ├── GangTooLarge        more workers than it has
    │   ├── OverQuota           more than this client may have
    │   └── SessionEnded        the pool has ended the session
    ├── LaunchError         a job's variables are wrong, or its processes don't meet
    ├── MachineError        a machine file with a figure that is missing or absurd, or no machine
    └── GraphError          a graph or plan that breaks its own rules (a bug in lazygt)

    CompileWarning (UserWarning) a function of torch.compile runs uncompiled in a session
    GatherWarning (UserWarning)  sharded operands of an op were all-gathered
    PipelineWarning (UserWarning)  stages take one microbatch after the other, and wait meanwhile

Errors in the *use* of an op (wrong shape, wrong dtype) are not here: they are torch's own
exceptions, raised by torch at the call.
"""

from __future__ import annotations

import builtins
import os
import sys
from functools import cache
from typing import Any, ClassVar

#: Public names, which are those of ``lazygt`` too.
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

    Mend it by doing the work inside ``with lazygt.session():``, or by fetching the values that
    are needed later (``tensor.cpu()``) before the block ends.
    """


class ExecutionError(LazyGTError):
    """An op failed while a worker ran it.

    The error is also of the class that eager torch would have raised, so that ``except
    IndexError:`` and the like catch it.

    Attributes:
        op: the aten overload, for example ``aten.index_select.default``.
        inputs: one line a tensor argument: dtype and shape.
        where: ``file:line`` of the user's code that recorded the op.
        kind: the name of the exception on the worker.
        detail: its message.
        rank: the worker's rank.
    """

    #: what eager torch would have raised, where that is another class
    _eager: ClassVar[type[Exception] | None] = None

    def __init__(
        self, op: str, inputs: tuple[str, ...], where: str, kind: str, detail: str, rank: int = 0
    ) -> None:
        self.op, self.inputs, self.where = op, inputs, where
        self.kind, self.detail, self.rank = kind, detail, rank
        Exception.__init__(self, self._message())  # the eager class may take other arguments

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError's own would quote it

    def __reduce__(self) -> Any:
        given = self.op, self.inputs, self.where, self.kind, self.detail, self.rank
        return _remade, (self._eager or type(self), given)

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
    made = ExecutionError if eager is None else _as_eager(eager)
    return made(op, inputs, where, kind.rpartition(".")[2].lstrip("_"), detail, rank)


def kind_of(error: BaseException) -> str:
    """Return the name of an exception's class in messages between processes."""
    cls = type(error)
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


def exception_class(kind: str) -> type[Exception] | None:
    """The class that ``kind_of`` told of, if this process has it; nothing is imported for it."""
    found: Any = getattr(builtins, kind, None)
    names = kind.split(".")
    for count in range(len(names) - 1, 0, -1):
        if (module := sys.modules.get(".".join(names[:count]))) is not None:
            found = module
            for name in names[count:]:
                found = getattr(found, name, None)
            break
    return found if isinstance(found, type) and issubclass(found, Exception) else None


@cache
def _as_eager(eager: Any) -> type[ExecutionError]:
    """The class of the ExecutionErrors that are also of class ``eager``."""
    if issubclass(ExecutionError, eager) or issubclass(eager, ExecutionError):
        return ExecutionError
    new = eager.__new__

    def made(cls: type[Any], *_: object) -> Any:
        return new(cls)  # RuntimeError's would come first, and is refused for an OSError

    name = f"{eager.__name__.lstrip('_')}OnWorker"
    own = {"__new__": made, "__module__": __name__, "_eager": eager}
    try:
        both = type(name, (ExecutionError, eager), own)
        both("", (), "", "", "")
    except Exception:  # noqa: BLE001 - a class of the user's that is made in another way
        return ExecutionError
    return both


def _remade(cls: type[Exception], given: tuple[Any, ...]) -> ExecutionError:
    """An unpickled ExecutionError."""
    made: Any = cls
    return (made if issubclass(cls, ExecutionError) else _as_eager(made))(*given)


class CollectiveMismatch(ExecutionError):
    """The ranks hold different plans for the same run; raised before anything is launched.

    A bug in lazygt: the plans of all ranks are made together. ``detail`` names the ranks and the
    first collective that differs. The workers have left their process group.
    """

    def _message(self) -> str:
        return (
            f"worker {self.rank} can't begin a plan: the ranks would not meet. {self.detail}\n"
            f"  recorded at {self.where}\n"
            f"  This is a bug in lazygt; please report it. Open a new session to go on."
        )


class CodeError(LazyGTError):
    """The code of an op or a function, which is not torch's, can't be brought to the workers.

    Raised where the op is recorded if the client knows; a failure on a worker (a module that
    it can't import) is an ExecutionError that is a CodeError, too.

    Attributes:
        name: of the op or function.
        module: where it is defined, if that is known.
    """

    def __init__(self, name: str, module: str, why: str) -> None:
        self.name, self.module = name, module
        where = f" (defined in {module})" if module else ""
        super().__init__(f"{name}{where} can't be brought to the workers: {why}")


class WorkerDied(LazyGTError):
    """A worker process ended while the session needed it.

    Attributes:
        rank: its rank.
        pid: its process id.
        status: how it ended, for example ``signal SIGKILL``, ``exit code 1`` or ``out of memory
            (signal SIGKILL)``.
        stderr: the end of its standard error.
        during: the step at which it died repeatedly; "" if nothing points to one.
        out_of_memory: True if it ended for want of memory.
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
    """A kernel failed in a way after which its process can't use the GPU any more.

    So it is after an assertion on the device (an index out of range) and an illegal address. Where
    a session recovers, the op fails with an ExecutionError, and all other values are computed again
    in a new process; without that they are lost, and this is raised.

    Attributes:
        why: the driver's message.
        culprit: the failed op, where it is known (see ``messages.Failure``).
    """

    culprit: Any = None

    def __init__(self, rank: int, pid: int, why: str, at: str = "") -> None:
        self.why = why
        met = f"This was met at {at}. " if at else ""
        super().__init__(
            rank, pid, f"it can't use its device any more: {why}", "",
            f"{met}Kernels run while others are launched, so an earlier op may be the cause: "
            f"started with CUDA_LAUNCH_BLOCKING=1 in its environment, a program is told which.",
        )  # fmt: skip


class WorkerFrozen(LazyGTError):
    """A worker process is alive but has not answered for ``deadline`` seconds."""

    def __init__(self, rank: int, pid: int, deadline: float) -> None:
        self.rank, self.pid, self.deadline = rank, pid, deadline
        super().__init__(
            f"worker {rank} (pid {pid}) has not answered for {deadline:g} s. It may be stopped or "
            f"swapped out; raise the deadline with lazygt.session(frozen_after=...) if that is "
            f"expected."
        )


class ProtocolError(LazyGTError):
    """A message does not follow the wire schema; its sender is dropped."""


class StoreLost(LazyGTError, ConnectionError):
    """The store in which ranks on several hosts meet does not answer.

    It is in the process that opened the session: that has ended, or its host can't be reached.

    Attributes:
        endpoint: where it was.
    """

    def __init__(self, endpoint: str, silence: float) -> None:
        self.endpoint, self.silence = endpoint, silence
        super().__init__(
            f"the session's store at {endpoint} has said nothing for {silence:g} seconds: its "
            f"process has ended, a firewall keeps its port from this host, or the token is another "
            f"session's (LAZYGT_TOKEN has to be the same on all hosts)"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.silence)


class SecurityError(LazyGTError):
    """A configuration that would let strangers reach the session."""


class ConnectionLost(LazyGTError):
    """Another host does not answer, or not any more.

    Attributes:
        endpoint: its address.
        why: the cause, as far as it is known.
    """

    def __init__(self, endpoint: str, why: str) -> None:
        self.endpoint, self.why = endpoint, why
        super().__init__(f"no connection to {endpoint}: {why}")

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.why)


class AccessDenied(LazyGTError):
    """Another host refuses our key, or does not have the key that it should.

    Attributes:
        endpoint: its address.
        why: which of both.
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
        endpoint: its address.
        differences: name, version here, version there.
        why: its message.
    """

    def __init__(
        self, endpoint: str, differences: list[tuple[str, str, str]], why: str = ""
    ) -> None:
        self.endpoint, self.differences, self.why = endpoint, differences, why
        said = [f"{name} is {here} here and {there} there" for name, here, there in differences]
        super().__init__(
            f"{endpoint} runs other versions: {'; '.join([*said, *([why] if why else [])])}. "
            f"Install the same ones in both places."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.endpoint, self.differences, self.why)


class CheckpointError(LazyGTError):
    """A checkpoint can't be resumed, and nothing of it was loaded; or a folder can't hold any.

    Attributes:
        path: of the file, or of the folder.
        why: the fault.
        torn: the file was not written to its end, or has lost it.
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
        given: its arguments, as they travel.
    """

    def __init__(self, text: str, *given: Any) -> None:
        self.given: tuple[Any, ...] = given or (text,)
        super().__init__(text)

    def __reduce__(self) -> Any:
        return type(self), self.given


class PoolFull(PoolError):
    """All workers are taken, and as many sessions wait for some as may.

    Attributes:
        waiting: sessions in the queue.
        workers: of the pool.
    """

    def __init__(self, waiting: int, workers: int) -> None:
        self.waiting, self.workers = waiting, workers
        super().__init__(
            f"the pool is full: its {workers} worker(s) are taken, and {waiting} session(s) wait "
            f"already. Try again later, or see who has them with `lazygt pool status`.",
            waiting, workers,
        )  # fmt: skip


class PoolDraining(PoolError):
    """The pool admits nobody any more."""

    def __init__(self) -> None:
        super().__init__(
            "the pool is being drained and admits no session any more (lazygt pool drain): use "
            "another pool, or ask whoever runs it."
        )
        self.given = ()


class GangTooLarge(PoolError):
    """A session asked for more workers than the pool has, so it would wait for ever.

    Attributes:
        asked: workers.
        workers: of the pool.
    """

    def __init__(self, asked: int, workers: int) -> None:
        self.asked, self.workers = asked, workers
        super().__init__(
            f"a session of {asked} worker(s) can never fit: the pool has {workers}. Ask for at "
            f"most so many with lazygt.session(workers=...), or have it served with more.",
            asked, workers,
        )  # fmt: skip


class OverQuota(PoolError):
    """A client asked for more than its key may have, or its workers hold more.

    Attributes:
        what: ``sessions``, ``workers``, ``cores``, or ``memory`` (bytes).
        wanted: by this session; used: by the client's other sessions and published weights.
        limit: of them all.
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
        session: its name.
        why: evicted, or expired.
    """

    def __init__(self, session: str, why: str) -> None:
        self.session, self.why = session, why
        super().__init__(
            f"the pool has ended session {session}: {why}. Its values are lost; open a new one.",
            session, why,
        )  # fmt: skip


class LaunchError(LazyGTError):
    """The processes of a job can't become one session.

    The variables of their ranks contradict one another, one is missing, or the processes don't
    meet.

    Where the job's variables are not meant for lazygt, ``LAZYGT_LAUNCHER=process`` or
    ``lazygt.session(launcher="process")`` leaves them alone.

    Attributes:
        variable: of the environment, which to look at; "" where none is at fault.
        why: the fault, and a remedy.
    """

    def __init__(self, variable: str, why: str) -> None:
        self.variable, self.why = variable, why
        super().__init__(f"{variable} {why}" if variable else why)

    def __reduce__(self) -> Any:
        return type(self), (self.variable, self.why)


class MachineError(LazyGTError, ValueError):
    """A machine file is wrong, or there is none of that name.

    Attributes:
        path: of the file, or the name.
        key: the figure, such as ``memory.bandwidth``; empty where it is not about one.
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

    The numbers are those of eager torch. Said once a process, with the line.
    """


class GatherWarning(UserWarning):
    """Sharded operands of an op were all-gathered, though no placement asked for that.

    The op has no sharding rule, or no strategy that takes less time. The numbers are right. Said
    once a session, op and line, with the bytes and a remedy; ``lazygt why`` lists all.
    """


class IdleWarning(UserWarning):
    """The client does the work that a session was opened for.

    The numbers are right; they are computed in this process. Said once a session, with the line
    and the code to write instead.
    """


class PipelineWarning(UserWarning):
    """The stages of a pipeline take one microbatch after the other: 1F1B order can't be kept.

    The numbers are right, but each stage waits while the others work. Said once a session, with
    the obstacle.
    """


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


def in_one_line(error: BaseException) -> str:
    """Return an error's type and message without line breaks, for a log or a table.

    Compilers write pages: after the first line only the first one that names an error is kept.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:] if "error:" in line]
    return ": ".join([type(error).__name__, *lines[:1], *named[:1]])[:400]
