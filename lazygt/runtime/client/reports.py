"""Client's state of its workers: runs in flight, and reports of the workers besides answers."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from lazygt.errors import DeviceLost, ExecutionError, ProtocolError, WorkerDied
from lazygt.graph.node import Graph
from lazygt.recovery.recover import RecoveryRecord, RollbackRecovery
from lazygt.runtime.client.console import Observer
from lazygt.runtime.client.failures import Describe, Failures, FirstFailed
from lazygt.runtime.executors.compiled import Cache
from lazygt.runtime.executors.kernel_group import toolchain
from lazygt.runtime.link import Link
from lazygt.runtime.messages import (
    Captured,
    Done,
    Failure,
    Install,
    Installed,
    Left,
    Lost,
    Relaid,
    Snapped,
)
from lazygt.runtime.plan_records import PlanRecord, PlanRecords
from lazygt.runtime.values import Answer, Fetches, Uploads
from lazygt.runtime.wire import Buffer

_log = logging.getLogger("lazygt")

#: Number of answered runs whose kernels may still be running, at most.
_MAX_LAUNCHED = 64


@dataclass(slots=True)
class InFlightRun:
    """A run that some ranks have not answered yet."""

    entry: PlanRecord | None  # record of its plan; None: it runs none
    describe: Describe | None  # describes the plan's nodes in errors
    #: id of its first output
    base: int
    waiting: set[int]  # ranks that have not answered
    #: ranks with answers to read, and the number of values that each of these sends
    fetch_ranks: frozenset[int]
    fetches: int
    answers: dict[int, Answer] = field(default_factory=dict)
    abandoned: bool = False  # True if nobody waits for the answers: they are dropped
    #: errors of the ranks
    errors: list[ExecutionError] = field(default_factory=list)


@dataclass(slots=True)
class Counts:
    """Messages and bytes so far."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_uploaded: int = 0
    bytes_fetched: int = 0
    fetches: int = 0
    plans_sent: int = 0
    largest_run: int = 0
    last_run: int = 0
    snapshot_bytes: int = 0


# -- installation of artifacts on other hosts ------------------------------------------------------
# One rank of each host without the client's cache is queried for artifacts and receives missing
# ones, which stay there for later sessions. A plan is swapped on all ranks at once, after all hosts
# have its artifacts: compiled code may round differently, and ranks must not differ in that.


class Notify(Protocol):
    """Function that sends a rank a message; does not wait."""

    def __call__(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None: ...


class Installs:
    """State of artifacts on other hosts.

    Args:
        remote_hosts: returns the current hosts, each with one of its ranks.
        cache: the client's.
        device: type of the workers' device.
        send_message: sends a rank a message.

    Attributes:
        pending: (key of the artifact, host) of unanswered requests.
        error: a host's reason against compiled code; empty: none was reported.
    """

    def __init__(
        self,
        remote_hosts: Callable[[], Mapping[int, int]],
        cache: Cache,
        device: str,
        send_message: Notify,
    ) -> None:
        self._remote_hosts, self._cache, self._device, self._send_message = (
            remote_hosts,
            cache,
            device,
            send_message,
        )
        self.pending: set[tuple[str, int]] = set()
        #: those of ``pending`` with code that was sent
        self._sent_code: set[tuple[str, int]] = set()
        self._installed: set[tuple[str, int]] = set()
        self.error = ""

    def ready(self, keys: Iterable[str]) -> bool:
        """Return whether all hosts have these artifacts; request those not requested before.

        Args:
            keys: keys of artifacts; the empty key queries whether locally compiled code runs there.
        """
        if self.error:
            return False
        hosts = self._remote_hosts()
        wanted = [(key, host) for key in keys for host in hosts]
        for key, host in wanted:
            if (key, host) not in self._installed | self.pending:
                self.pending.add((key, host))
                self._request(key, hosts[host])
        return self._installed.issuperset(wanted)

    def _request(self, key: str, rank: int) -> None:
        """Query a rank's host for an artifact."""
        self._send_message(rank, Install(key, toolchain(self._device)))

    def answered(self, rank: int, installed: Installed) -> None:
        """Handle a rank's answer: send missing code, or note success or failure."""
        hosts = self._remote_hosts()
        for request in [
            (installed.key, host) for host, host_rank in hosts.items() if host_rank == rank
        ]:
            if request not in self.pending:
                continue  # requested twice, before a recovery and after it
            if installed.lacks and not installed.error and request not in self._sent_code:
                self._sent_code.add(request)
                self._send_code(installed.key, rank)
                continue
            self.pending.discard(request)
            self._sent_code.discard(request)
            error = installed.error or (
                "its cache does not keep what it is given" if installed.lacks else ""
            )
            if error:
                self.error = self.error or f"worker {rank}: {error}"
            else:
                self._installed.add(request)

    def _send_code(self, key: str, rank: int) -> None:
        """Send an artifact to a rank's host; if that is impossible, note a failed installation."""
        try:
            artifact = self._cache.copy_of(key)
            self._send_message(rank, Install(key, toolchain(self._device)), artifact)
        except (OSError, ValueError) as error:  # no longer there, or longer than a message may be
            self.answered(rank, Installed(key, error=f"it could not be sent: {error}"))

    def repeat_requests(self) -> None:
        """Repeat requests after workers were replaced, before they get any other message.

        New workers may be on new hosts. Unanswered requests are repeated. Installed artifacts are
        sent, without a query, to all hosts that may lack them, before the plans that use them.
        """
        hosts = self._remote_hosts()
        self._sent_code.clear()
        known = {key for key, _ in self._installed}
        self.pending &= {(key, host) for key, _ in self.pending for host in hosts}
        for key, host in sorted(self.pending):
            self._request(key, hosts[host])
        for key in sorted(known):
            for host, rank in hosts.items():
                if (key, host) not in self._installed | self.pending:
                    self.pending.add((key, host))
                    self._sent_code.add((key, host))
                    if key:  # the empty key is a query, see ``ready``
                        self._send_code(key, rank)
                    else:
                        self._request(key, rank)


# -- state of the workers --------------------------------------------------------------------------


class Reports:
    """State of a client's workers, with the handlers of reports.

    Args:
        uploads: values on their way to the workers.
        max_ahead: runs that may be unanswered before another one waits.
        launches_ahead: workers answer when kernels are launched, not when they have ended.
    """

    def __init__(
        self,
        link: Link,
        observer: Observer | None,
        uploads: Uploads,
        max_ahead: int,
        launches_ahead: bool,
    ) -> None:
        self.link = link
        self._all_ranks = frozenset(range(link.world_size))
        self._launches_ahead = launches_ahead
        #: observer of messages, waits and timed runs, if there is one
        self.observer = observer
        self.counts = Counts()
        self.entries = PlanRecords(link.world_size)
        #: (plan, error) of swaps that failed
        self.swap_errors: list[tuple[bytes, str]] = []
        #: artifacts on their way to other hosts; None: no other hosts
        self.installs: Installs | None = None
        #: the ``pending`` of ``installs``
        self.installing: Set[tuple[str, int]] = frozenset()
        #: callback after a rank's failure to swap a plan
        self.swap_failed: Callable[[], object] = _nothing_to_undo
        #: errors that have turned the capture of CUDA graphs off
        self.capture_errors: list[str] = []
        #: (graph, rows of a Relaid message): results with other strides than inferred, until the
        #: session has read them
        self.unexpected_strides: list[tuple[Graph, Sequence[tuple[int, int, tuple[int, ...]]]]] = []
        self._death: WorkerDied | None = None
        #: error after which no answer can come, raised by every later wait
        self._fatal_error: ProtocolError | DeviceLost | None = None
        self._max_ahead = max_ahead
        #: see ``RecoveryClient``
        self.quiet_until = inf
        self.recovery: RollbackRecovery | None = None
        #: callback before an error is raised: rolls back to before a failed op, and returns
        #: the op's error
        self.undo: Callable[[], ExecutionError | None] = _nothing_to_undo
        #: the recovery that was turned off
        self._disabled_recovery: RollbackRecovery | None = None
        #: reason for turning recovery off when the current one has ended
        self._disable_reason = ""
        self.recoveries: list[RecoveryRecord] = []
        #: callbacks after the replacement of workers
        self.on_recovery: list[Callable[[RecoveryRecord], object]] = []
        self._uploads, self._fetches, self._failures = uploads, Fetches(link), Failures()
        #: number of the last run
        self._seq = 0
        self._in_flight: OrderedDict[int, InFlightRun] = OrderedDict()
        #: answered runs that may still fail: their kernels are launched but not finished
        self._launched: dict[int, InFlightRun] = {}
        #: runs answered during a recovery, whose answers may not have been read yet
        self._early_answers: dict[int, InFlightRun] = {}
        self._finished_writes: list[tuple[Any, ...]] = []
        #: recovery epoch of the last request to write
        self._write_epoch = 0
        #: number of the workers' process group
        self._group = 0
        #: id of the first value for which ranks may not have met, once one has left the group
        self._broken_since: int | None = None

    @property
    def next_run(self) -> int:
        """Number of the next run."""
        return self._seq + 1

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """Number of unanswered runs, and the ranks that owe the oldest answer. Thread-safe."""
        runs = list(self._in_flight.values())
        return len(runs), tuple(sorted(runs[0].waiting)) if runs else ()

    @property
    def oldest_open(self) -> int:
        """Oldest run that is unanswered by some rank, has failed, or may still fail."""
        first = self._failures.first_failed()
        failed = self.next_run if first is None else first.seq
        launched = [seq for seq in self._launched if seq > self._seq - _MAX_LAUNCHED]
        return min(next(iter(self._in_flight), self.next_run), failed, *launched)

    def _remember_launched(self, seq: int, run: InFlightRun) -> None:
        """Remember a run that devices may not have finished."""
        self._launched[seq] = run
        if len(self._launched) > _MAX_LAUNCHED:
            del self._launched[next(iter(self._launched))]

    def _forget_finished(self, seq: int) -> None:
        """Note that all devices have finished a run, and those before it."""
        for launched in [each for each in self._launched if each <= seq]:
            del self._launched[launched]

    @property
    def failed(self) -> bool:
        """True if an op has failed and the error was not raised yet."""
        return self._failures.first_failed() is not None

    def first_failed(self) -> FirstFailed | None:
        """Return the failures of the oldest run that has unreported ones."""
        return self._failures.first_failed()

    def _left(self, left: Left) -> None:
        """Note that a rank has left the process group; others may still do earlier runs."""
        if left.number != self._group or not self._in_flight:
            raise ProtocolError(f"it left process group {left.number} in no run")
        if self._broken_since is None:
            self._broken_since = next(run.base for run in self._in_flight.values())

    def _relaid(self, rank: int, relaid: Relaid) -> None:
        """Note results of a plan that have other strides than inferred."""
        entry = next((each for each in self.entries if each.name(rank) == relaid.digest), None)
        if entry is None:
            return  # forgotten meanwhile
        graph = entry.plan_of(rank).steps.graph
        for number, position, strides in relaid.rows:
            fresh = graph.nodes[number].fresh if number < len(graph.nodes) else ()
            meta = fresh[position] if position < len(fresh) else None
            if meta is None or len(meta.shape) != len(strides):
                raise ProtocolError(
                    f"plan {relaid.digest.hex()[:12]} has no result {relaid.rows!r:.80}"
                )
        self.unexpected_strides.append((graph, relaid.rows))

    def _captured(self, rank: int, captured: Captured) -> None:
        """Note a rank's decision about CUDA graphs for a plan."""
        entry = next((each for each in self.entries if each.name(rank) == captured.digest), None)
        if entry is not None:
            entry.captures[rank] = captured
        if captured.failed:
            self.capture_errors.append(f"worker {rank}: {captured.error}")

    def _swapped(self, rank: int, digest: bytes, error: str) -> None:
        """Note a rank's answer to a swap to compiled code."""
        self.entries.swapped(rank, digest)
        if error:
            self.swap_errors.append((digest, f"worker {rank}: {error}"))
            self.swap_failed()

    def _installed(self, rank: int, installed: Installed) -> None:
        if self.installs is None:
            raise ProtocolError("it was not asked for compiled code")
        self.installs.answered(rank, installed)

    def _snapped(self, rank: int, snapped: Snapped) -> None:
        """Note a rank's share of a snapshot; once it is complete, uploads before it are freed."""
        if self.recovery is None:
            return
        if snapped.error:
            self._disable_recovery(f"worker {rank} could not take a snapshot: {snapped.error}")
            return
        self.counts.snapshot_bytes += snapped.nbytes
        if self.observer is not None:
            self.observer.snapped(rank, snapped)
        covered = self.recovery.add_part(rank, snapped)
        if covered is not None:
            self._uploads.free_up_to(covered)

    def _disable_recovery(self, why: str) -> None:
        """Turn recovery off and warn, once: from here on a worker's death loses values."""
        assert self.recovery is not None
        if self.recovery.under_way:  # the current recovery needs its snapshots
            self._disable_reason = why
            return
        self.recovery.suspected.trust_all()
        self._disabled_recovery, self.recovery, self.quiet_until = self.recovery, None, inf
        self._uploads.stop_retaining()
        warnings.warn(
            f"lazygt: {why}. From here on the death of a worker loses values: save what matters. "
            f"lazygt.session(recovery='off') takes no snapshots.",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- interface of recovery -----------------------------------------------------------

    @property
    def group(self) -> int:
        """Number of the workers' process group."""
        return self._group

    def new_group(self) -> int:
        """Advance the number of the process group; return the new one."""
        self._broken_since, self._group = None, self._group + 1
        return self._group

    def oldest_unanswered(self, rank: int) -> int | None:
        """Return the number of the oldest run that a rank has not answered; None: there is none."""
        return next((seq for seq, run in self._in_flight.items() if rank in run.waiting), None)

    def will_fail(self, rank: int, failure: Failure) -> None:
        """Note the failure of an op that can't be repeated: its run fails on all ranks."""
        seq = failure.seq
        run = self._in_flight.get(seq) or self._launched.get(seq)
        describe, errors = (None, []) if run is None else (run.describe, run.errors)
        self._failures.note_for_all(rank, failure, describe, errors, self.link.world_size)

    def device_lost(self, rank: int, message: Lost) -> DeviceLost:
        """Return the error for the loss of a worker's device."""
        failure, location = message.failure, ""
        run = self._in_flight.get(failure.seq)
        if run is not None and run.describe is not None and failure.node >= 0:
            op, inputs, where = run.describe(failure.node, rank)
            location = f"{op}({', '.join(inputs)}), recorded at {where}"
        error = DeviceLost(rank, self.link.pids[rank], failure.detail.partition("\n")[0], location)
        error.culprit = failure if message.is_culprit else None
        return error

    def step_of(self, seq: int, rank: int, step: int | None) -> str:
        """Describe a step of an unanswered run: its op, its results' bytes and the user's line.

        Args:
            seq: number of the run.
            step: number of the step; None if unknown.
        """
        run = self._in_flight[seq]
        if run.entry is None or run.describe is None:
            return "the upload of its values"
        if step is None:
            return f"one of its {len(run.entry.plan_of(rank).steps.graph.nodes)} steps"
        op, inputs, where = run.describe(step, rank)
        nodes = run.entry.plan_of(rank).steps.graph.nodes
        fresh = nodes[step].fresh if step < len(nodes) else ()
        nbytes = sum(meta.nbytes for meta in fresh if meta is not None)
        return f"{op}({', '.join(inputs)}), which makes {nbytes:,} bytes, recorded at {where}"

    def waiting_for(self, seq: int) -> Set[int]:
        """Return the ranks that have not answered a run."""
        run = self._in_flight.get(seq)
        return set() if run is None else run.waiting

    def forget_fetches(self, rank: int) -> None:
        """Forget the values in the arena of a rank that has died."""
        self._fetches.renew(rank)

    def drop_answer(self, rank: int, done: Done) -> None:
        """Drop an answer that the rank will repeat."""
        self._fetches.drop(rank, done)

    def restored(self) -> None:
        """Note that all ranks have a snapshot's state; messages sent after it are lost."""
        if self.installs is not None:
            self.installs.repeat_requests()

    def recovered(self, record: RecoveryRecord) -> None:
        """Note the end of a recovery: workers were replaced, and all values restored."""
        self.entries.swapping.clear()
        self.recoveries.append(record)
        _log.warning("%s", record)
        if self.observer is not None:
            self.observer.recovered(self._seq, record)
        for callback in self.on_recovery:
            callback(record)

    def settled(self) -> None:
        """Note that all journaled runs have been repeated."""
        if self._disable_reason:
            self._disable_recovery(self._disable_reason)


def _nothing_to_undo() -> None:
    return None
