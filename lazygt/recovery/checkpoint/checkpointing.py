"""Checkpoints of a running program: registered objects, written at marked steps.

A moment is saved by a snapshot that the workers take for recovery anyway, and a thread writes the
file from the snapshot's memory while the program goes on. Without snapshots (``recovery="off"``,
inline) the values are fetched, and the same thread writes them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lazygt.config import Config, seconds_of
from lazygt.errors import CheckpointError
from lazygt.graph.mesh import VirtualMesh
from lazygt.record.recorder import Recorder
from lazygt.recovery.checkpoint import states
from lazygt.recovery.checkpoint.checkpoint_file import CheckpointFolder, newest
from lazygt.recovery.checkpoint.encoding import encoded
from lazygt.recovery.checkpoint.saved import Contents, Saved, generators, versions
from lazygt.recovery.checkpoint.states import (
    CapturedValues,
    SavedBlock,
    SnapshotCopies,
    has_all_values,
    memory_of,
    sections,
)
from lazygt.recovery.journal import Snapshot
from lazygt.runtime.arenas import Arena
from lazygt.runtime.client.client import Client
from lazygt.runtime.interrupts import DEFER_INTERRUPT
from lazygt.runtime.messages import Copied

_log = logging.getLogger("lazygt")

#: Minimum seconds between two checkpoints by default.
LEAST_SECONDS = 1.0
#: Niceness of the writing thread: lower priority than the program's threads.
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint that was written."""

    step: int  # the program's number of the step
    path: Path  # path of the file, which may have been replaced by later ones
    nbytes: int  # bytes of the file
    seconds: float  # time from the mark until the file was on the disk
    busy: float  # part of these seconds in which a worker or a thread of the client worked on it


class _Moment(NamedTuple):
    """Marked moment of the program that is being saved."""

    step: int  # the program's number of the step
    begun: float  # time of the mark, by ``time.monotonic``
    contents: Contents  # first section of the file
    sources: list[Tensor | list[SavedBlock]]  # location of each tensor
    about: dict[str, Any]  # the file's description


#: checkpoints of open sessions
_open: weakref.WeakSet[Checkpoints] = weakref.WeakSet()


class Checkpoints:
    """The checkpoints of one session.

    Raises:
        CheckpointError: the folder can't be written, or another session writes there.

    Attributes:
        resumed: True if the program has read the last checkpoint.
        records: records of the written checkpoints.
    """

    def __init__(self, config: Config) -> None:
        assert config.checkpoint is not None
        self.folder = CheckpointFolder(config.checkpoint)
        self.resumed, self._had_checkpoints = False, bool(self.folder.retained)
        self.records: list[CheckpointRecord] = []
        every = config.checkpoint_every
        self._every = every if isinstance(every, int) else None
        self._seconds = seconds_of(every) if isinstance(every, str) else None
        self._cost = config.snapshot_cost
        self._objects: dict[str, Any] = {}
        self._recorder: Recorder
        self._client: Client
        self._mesh: VirtualMesh
        self._settings: dict[str, str] = {}
        self._arenas: dict[int, Arena] = {}
        #: number of marks since the last saved one
        self._marks = 0
        #: True if the program has called `mark` or `resume`
        self._used = False
        #: time from which on the next mark is saved, by ``time.monotonic``
        self._due = 0.0
        #: the moment of the pending snapshot, and the write under way
        self._pending: _Moment | None = None
        self._writing: Future[CheckpointRecord] | None = None
        #: time of the last saved mark
        self._begun = 0.0
        #: error of the last write, and True once the program was warned of it
        self._problem, self._warned = "", False
        self._thread = ThreadPoolExecutor(1, "lazygt-checkpoint", _lower_priority)
        _open.add(self)

    def connect(self, recorder: Recorder, client: Client, mesh: VirtualMesh, about: Config) -> None:
        """Connect to the session's recorder and client.

        Args:
            about: settings of the session.
        """
        self._recorder, self._client, self._mesh = recorder, client, mesh
        self._settings = {
            "mesh": str(mesh.workers),
            "invariant": str(mesh.ranks) if about.invariant else "off",
            "device": recorder.worker_device,
            "threads": str(about.threads),
            "compile": about.compile,
        }
        self._due = time.monotonic() + LEAST_SECONDS
        if client.recovery is not None and about.checkpoint_every is None:
            client.recovery.waits_for_marks = True

    # -- calls of the program ------------------------------------------------------------

    def register(self, objects: Mapping[str, Any]) -> None:
        """Register objects to save and resume under these names."""
        for name, obj in objects.items():
            states.check_registered(name, obj)
        self._objects.update(objects)

    def mark(self, step: int, values: Mapping[str, Any], now: bool) -> bool:
        """Mark that ``step`` steps are done; return whether this moment is being saved.

        Args:
            values: plain values to save with the objects, by name.
            now: save this moment in any case, and wait for the disk.
        """
        self._used = True
        self._check_mark(step, values)
        with self._recorder.lock, DEFER_INTERRUPT:
            self._collect_result()
            if self._mesh.ranks.world_size > 1 and self._recorder.trace.step.ops:
                # the end of a plan affects the order of sums over ranks, so every mark flushes,
                # whether or not the clock makes this moment a saved one
                self._recorder.flush("checkpoint")
            self._marks += 1
            saved = self._save_now(step, values) if now else self._is_due()
            if saved and not now:
                self._save(step, values)
        self._warn_of_problem()
        return saved

    def resume(self) -> Saved:
        """Load the last checkpoint, if there is one, into the registered objects."""
        self._used = True
        file = self.folder.newest()
        saved = Saved(file)
        if file is not None and saved.objects != set(self._objects):
            raise CheckpointError(
                file.path,
                f"it is of another program: {_listed(saved.objects)} were registered, and "
                f"{_listed(self._objects)} are here. Nothing was loaded. Register all of them "
                f"before resume()",
            )
        if file is not None:
            saved.load(**self._objects)
            self._warn_of_settings(saved)
        self.resumed = True
        return saved

    def _check_mark(self, step: int, values: Mapping[str, Any]) -> None:
        """Raise an error for invalid arguments, or a folder with another run's checkpoints."""
        if type(step) is not int or step < 0:
            raise ValueError(f"checkpoint({step!r}): expected how many steps are done, at least 0")
        if not self._objects:
            raise RuntimeError(
                "checkpoint() has nothing to save: register(model=..., optimizer=...) first"
            )
        for name in values:
            if name in self._objects:
                raise ValueError(f"checkpoint({name}=...): {name!r} is registered already")
        if self._had_checkpoints and not self.resumed:
            raise CheckpointError(
                self.folder.path,
                "it holds the checkpoints of a run, which this one would replace. Call resume() "
                "to go on from there, or give this run a folder of its own",
            )

    def _warn_of_settings(self, saved: Saved) -> None:
        """Warn of settings that differ from those of the saved session."""
        changed = [
            f"{name} {saved.settings[name]} (now {value})"
            for name, value in self._settings.items()
            if saved.settings.get(name, value) != value
        ]
        if changed:
            warnings.warn(
                f"lazygt: {saved.path} was saved with {', '.join(changed)}. Its values are whole; "
                f"results from here on may have other bits than that run's",
                RuntimeWarning,
                stacklevel=4,
            )

    # -- a moment ------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Return whether the moment of this mark is to be saved."""
        recovery = self._client.recovery
        if (
            self._pending
            or self._writing
            or (recovery is not None and recovery.journal.snapshot_under_way)
        ):
            return False
        if self._every is not None:
            return self._marks >= self._every
        return time.monotonic() >= self._due

    def _save_now(self, step: int, values: Mapping[str, Any]) -> bool:
        """Save this moment, and wait for the disk; return whether it is saved.

        Raises:
            ExecutionError: a value could not be computed.
        """
        self._finish()
        recovers = self._client.recovery is not None
        self._save(step, values)
        saved = self._finish()
        if recovers and self._client.recovery is None:  # recovery was turned off meanwhile
            self._save(step, values)
            saved = self._finish()
        if not saved:
            self._client.raise_failure()
        return saved

    def _save(self, step: int, values: Mapping[str, Any]) -> None:
        """Begin to save this moment: capture the states, and request a snapshot.

        Without snapshots the values are fetched here.
        """
        self._begun, self._marks = time.monotonic(), 0
        with torch.no_grad():
            captured, texts, random_state = self._capture(values)
            captured.ship()
            classes = {name: states.class_of(obj) for name, obj in self._objects.items()}
            contents = Contents(texts, classes, random_state, captured.leaves())
        about = {**versions(), "step": step, "settings": self._settings}
        moment = _Moment(step, self._begun, contents, captured.sources(), about)
        self._pending = moment
        if not self._client.snap(partial(self._on_snapshot, moment)):
            self._pending = None
            self._write({}, 0.0, moment._replace(sources=list(captured.fetched())))

    def _capture(self, values: Mapping[str, Any]) -> tuple[CapturedValues, dict[str, bytes], bytes]:
        """Capture all states; return the tensors, the encoded states and the encoded generators."""
        captured = CapturedValues(self._recorder, self._mesh)
        registered = {name: states.state_of(each) for name, each in self._objects.items()}
        texts = {
            name: encoded(name, state, captured.leaf)
            for name, state in {**registered, **values}.items()
        }
        random_states = encoded("generators", generators(self._recorder), captured.leaf)
        return captured, texts, random_states

    def _on_snapshot(self, moment: _Moment, snapshot: Snapshot) -> None:
        """Begin to write a moment from its complete snapshot, which stays until the write's end."""
        self._pending = None
        recovery = self._client.recovery
        copies = {
            rank: {copy.id: copy for copy in rank_snapshot.values}
            for rank, rank_snapshot in snapshot.parts.items()
        }
        if recovery is None or not has_all_values(moment.sources, copies):
            return  # a value has failed, which is raised where the program waits for it
        seconds = max(rank_snapshot.nanoseconds for rank_snapshot in snapshot.parts.values()) / 1e9
        self._write(copies, seconds, moment)
        recovery.checkpoint_write = self._writing

    def _write(self, copies: SnapshotCopies, busy: float, moment: _Moment) -> None:
        """Start the write of a moment on the writing thread.

        Args:
            busy: seconds that workers have spent on it.
        """
        memory = memory_of(self._memories(copies), self._client.link.upload)
        self._writing = self._thread.submit(
            _write_moment, self.folder, moment, copies, memory, busy
        )

    def _memories(self, ranks: SnapshotCopies) -> Mapping[int, Arena]:
        """Return the mapped snapshot memory of each rank."""
        for rank in ranks:
            if rank not in self._arenas:
                self._arenas[rank] = self._client.link.snapshot_arena(rank)
        return self._arenas

    # -- the result of a write -----------------------------------------------------------

    def _collect_result(self) -> bool:
        """Collect the result of the write, if it has ended; return whether it has succeeded."""
        if self._client.recovery is None:
            self._pending = None  # its snapshot will not be taken
        writing = self._writing
        if writing is None or not writing.done():
            return False
        self._writing = None
        if isinstance(error := writing.exception(), OSError | MemoryError):
            self._due = time.monotonic() + (self._seconds or LEAST_SECONDS)
            self._problem = f"{type(error).__name__}: {error}"
            return False
        record = writing.result()
        self.records.append(record)
        self._problem, self._warned = "", False
        self._due = self._begun + (self._seconds or max(record.busy / self._cost, LEAST_SECONDS))
        _log.info("%s: step %d, %d bytes", record.path, record.step, record.nbytes)
        return True

    def _warn_of_problem(self) -> None:
        """Warn once of a failed write."""
        if not self._problem or self._warned:
            return
        self._warned = True
        last = f"since step {self.records[-1].step}" if self.records else "in this session"
        warnings.warn(
            f"lazygt: no checkpoint was saved {last}: {self._problem}. A program that is killed "
            f"now loses the later steps. It is tried again at later marks",
            RuntimeWarning,
            stacklevel=4,
        )

    def _finish(self) -> bool:
        """Wait for the checkpoint under way; return whether it is on the disk."""
        if self._pending is not None:
            self._client.wait_snapped()
        if self._writing is not None:
            wait([self._writing])
        return self._collect_result()

    def end_well(self) -> None:
        """Finish the write under way at the end of a session without an error."""
        with self._recorder.lock, DEFER_INTERRUPT:
            self._finish()
        self._warn_of_problem()
        if not self._used:
            warnings.warn(
                f"lazygt: session(checkpoint={os.fspath(self.folder.path)!r}) has saved nothing: "
                f"call session.checkpoint(step) where a step is done",
                RuntimeWarning,
                stacklevel=3,
            )

    def close(self) -> None:
        """Wait for the write under way, and release the folder."""
        self._thread.shutdown()
        for arena in self._arenas.values():
            arena.close()
        self.folder.close()


def _write_moment(
    folder: CheckpointFolder,
    moment: _Moment,
    copies: SnapshotCopies,
    memory: Callable[[int, Copied], Tensor],
    busy: float,
) -> CheckpointRecord:
    """Write a moment to the folder; runs on the writing thread.

    Args:
        memory: returns the bytes of a rank's copy.
        busy: seconds that workers have spent on it.
    """
    begin = time.thread_time()
    values: Iterator[memoryview] = sections(moment.contents.leaves, moment.sources, copies, memory)
    contents = memoryview(msgspec.msgpack.encode(moment.contents))
    path = folder.write(moment.about, chain([contents], values))
    busy += time.thread_time() - begin
    seconds = time.monotonic() - moment.begun
    return CheckpointRecord(moment.step, path, path.stat().st_size, seconds, busy)


def _lower_priority() -> None:
    """Lower this thread's priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _listed(names: Any) -> str:
    """Format names for an error text."""
    return ", ".join(map(repr, sorted(names))) or "none"


def resume(folder: str | os.PathLike[str]) -> Saved:
    """Read the last checkpoint in a folder, inside a session or without one.

    ``saved[name]`` is the state registered under a name, ``saved.step`` the last step of the run,
    and ``saved.load(model=model, ...)`` loads the states of objects and of the random generators.
    A session that continues a run calls ``session.resume()`` instead.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, or it was saved by another
            version of torch or lazygt.
    """
    path = Path(os.path.abspath(folder))
    try:
        file = newest(path)
    except OSError as error:
        raise CheckpointError(path, f"it can't be read: {error}") from error
    if file is None:
        raise CheckpointError(path, "there is no checkpoint in it")
    for checkpoints in _open:
        checkpoints.resumed = checkpoints.resumed or checkpoints.folder.path == path
    return Saved(file)
