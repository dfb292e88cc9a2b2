"""Tiered compilation: chooses the plans that run compiled code, and swaps it in.

A *tier* is a way to run a plan, as in a JIT compiler: eager or compiled. A *group* is a fused node.

A new plan runs at once, node by node. When it is seen again its fused nodes are compiled, in
another process, unless the cache has their artifacts. When all of a plan's groups are compiled or
have failed, and all hosts have the artifacts, the faster ones are swapped in on every worker,
between two runs.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from lazygt.graph.flags import Flags, flags_of_code
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.runtime.client.client import Client
from lazygt.runtime.client.reports import Installs
from lazygt.runtime.compiling.compiler import Compiler
from lazygt.runtime.executors.compiled import Cache, Record
from lazygt.runtime.executors.kernel_group import Dims, KernelGroup
from lazygt.runtime.plan import Plan
from lazygt.runtime.plan_records import PlanRecord

#: Number of groups of one structure whose sizes are compared, to find dynamic dims.
_MAX_SIMILAR = 8
#: The run of a plan after which it counts as hot.
_HOT_RUN = 2
#: Seconds from the first hot plan to the first compile: a shorter program would gain nothing.
_COMPILE_DELAY = 0.5
#: Seconds of waiting between two checks that the compile process still runs.
_POLL_SECONDS = 0.5
#: The run of a plan from which swapping in its finished compiled code is worthwhile.
_SWAP_RUN = 4


@dataclass(slots=True)
class CompileRecord:
    """State of the compile of one group."""

    key: str  # of its artifact
    ops: int  # its members
    line: str  # the user's line of the first of them
    status: str  # compiling, compiled, cached or failed
    seconds: float = 0.0  # duration of the compile alone
    gain: float = 0.0  # speedup over its members one by one; 0.0 while unknown
    error: str = ""  # the reason of a failure, in one line
    #: time of the request, in seconds of the monotonic clock
    at: float = field(default_factory=time.monotonic)
    took: float = 0.0  # seconds from then to the answer
    names: str = ""  # of its members' ops, see ``named_ops``

    @property
    def tier(self) -> str:
        """The group's tier: compiled, or eager if it failed or gains nothing."""
        return "compiled" if self.gain > 1 else "eager"


class Tiers:
    """Scheduler of compiles: compiles the groups of hot plans and swaps them in.

    Args:
        mode: ``auto``; ``now``: a new plan waits for its compiled code; ``off``.
        frozen_after, compile_timeout: see ``Compiler``.
    """

    def __init__(
        self,
        client: Client,
        device: str,
        mode: str,
        cache: Cache,
        frozen_after: float,
        compile_timeout: float,
    ) -> None:
        self.mode = mode
        #: True if there is work after any plan's run
        self.busy = False
        #: number of runs of a plan after each of which there may be work
        self.warmup_runs = _SWAP_RUN if mode != "off" else 0
        #: compiles by key, in the order of their requests
        self.compiles: dict[str, CompileRecord] = {}
        self._client = client
        self._device = device
        self._cache = cache
        self._compiler = Compiler(device, cache, frozen_after, compile_timeout)
        client.swap_failed = self._set_busy
        self._installs: Installs | None = None
        if client.link.elsewhere and device != "cpu":
            self.mode = "off"  # a GPU's code names files of the host that has compiled it
        elif client.link.elsewhere:
            self._installs = Installs(lambda: client.link.elsewhere, cache, device, client.install)
            client.installs, client.installing = self._installs, self._installs.pending
        #: True if some plan waits only for the installation of artifacts on other hosts
        self._waits_for_hosts = False
        #: key -> record of its artifact; None: the compile has failed
        self._records: dict[str, Record | None] = {}
        #: plans with unanswered groups, with (node number, key, elements) of each group
        self._waiting: dict[bytes, tuple[PlanRecord, list[list[tuple[int, str, int]]]]] = {}
        #: structure without sizes -> fused nodes of different sizes, for ``_varying_dims``
        self._similar_nodes: dict[str, list[Node]] = {}
        #: hot plans that have not been considered, and the time of the first one
        self._hot: list[PlanRecord] = []
        self._first_hot_time: float | None = None
        self._has_warned = False

    @property
    def pid(self) -> int | None:
        """Process id of the compile process; None without one."""
        return self._compiler.pid

    def on_new_plan(self, entry: PlanRecord) -> None:
        """Note that a plan will run for the first time; in mode ``now``, wait for its code."""
        if self.mode == "now":
            self._hot.append(entry)
            self.wait()

    def on_run(self, entry: PlanRecord) -> None:
        """Note that a run of a plan was sent; request compiles of hot plans, swap in finished ones.

        Does not wait.
        """
        if self.mode == "off":
            return
        if self._compiler.pending:
            self._handle_answers(self._compiler.answers())
        if self._client.swap_errors:
            self._report_swap_errors()
        if entry.runs == _HOT_RUN and not entry.considered:
            self._hot.append(entry)
            self._first_hot_time = self._first_hot_time or time.monotonic()
        if (
            self._hot
            and self._first_hot_time
            and time.monotonic() - self._first_hot_time > _COMPILE_DELAY
        ):
            self._consider_hot()
        elif self._waiting and (entry.runs == _SWAP_RUN or self._waits_for_hosts):
            self._swap_in()
        self._update_busy()

    def _set_busy(self) -> None:
        self.busy = True

    def _update_busy(self) -> None:
        swaps = self._client.entries.swapping or self._client.swap_errors
        self.busy = bool(self._hot or self._compiler.pending or swaps or self._waits_for_hosts)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being compiled and everything compiled is swapped in.

        Returns:
            False if ``timeout`` seconds were not enough.

        Raises:
            WorkerDied, WorkerFrozen: while waiting.
        """
        begin = time.monotonic()
        end = None if timeout is None else begin + timeout
        self._consider_hot()
        while self._hot:
            if not self._client.wait_compiled(end):
                return False
            self._consider_hot()
        while self._compiler.pending:
            remaining = _POLL_SECONDS if end is None else min(end - time.monotonic(), _POLL_SECONDS)
            if remaining <= 0:
                return False
            self._client.wait_for_message_or(self._compiler.descriptor, remaining)
            self._handle_answers(self._compiler.answers() or self._compiler.end_if_stuck(begin))
        self._swap_in(now=True)
        while in_time := self._client.wait_compiled(end):
            self._report_swap_errors()
            if not self._waits_for_hosts and not self._client.entries.swapping:
                break
            self._swap_in(now=True)
        self._update_busy()
        return in_time

    def close(self) -> None:
        """End the compile process."""
        self._compiler.close()

    def _consider_hot(self) -> None:
        """Consider the hot plans, once all hosts are known to run locally compiled code."""
        if not self._installed_everywhere([""]):
            return
        while self._hot:
            self._consider(self._hot.pop())

    # -- one plan ------------------------------------------------------------------------

    def _consider(self, entry: PlanRecord) -> None:
        """Look up the artifacts of a plan's fused nodes, or request their compilation."""
        entry.considered = True
        try:
            keys = [self._artifact_keys(plan) for plan in entry.plans]
        except OSError as error:
            self._stop_compiling(error)
            return
        if any(keys):
            self._waiting[entry.names[0]] = entry, keys
            self._swap_in()

    def _artifact_keys(self, plan: Plan) -> list[tuple[int, str, int]]:
        """List (node, artifact key, elements) of a plan's fused nodes; request missing artifacts.

        Raises:
            OSError: the cache can't be used, or no process can be started.
        """
        keys = []
        flags = flags_of_code(plan.flags)
        for number, group, line in self._groups(plan):
            key = group.key(self._device, flags)
            keys.append((number, key, group.numel))
            if key not in self._records and key not in self._compiler.pending:
                self._look_up_or_compile(key, group, line, flags)
        return keys

    def _groups(self, plan: Plan) -> Iterator[tuple[int, KernelGroup, str]]:
        """Yield the number, the group and the user's line of each fused node of a plan."""
        graph = plan.graph
        for number, node in enumerate(graph.nodes):
            if node.body is not None:
                group = KernelGroup.of(node)
                if not group.flat:
                    group = KernelGroup.of(node, self._varying_dims(group, node))
                yield number, group, graph.line(number)

    def _varying_dims(self, group: KernelGroup, node: Node) -> Dims:
        """Return the operand dims whose sizes vary among groups of the same structure."""
        others = self._similar_nodes.setdefault(group.structure_without_sizes(), [])
        if len(others) < _MAX_SIMILAR and all(other.body != node.body for other in others):
            others.append(node)
        return dynamic_dims([other.body.inputs for other in others if other.body is not None])

    def _look_up_or_compile(self, key: str, group: KernelGroup, line: str, flags: Flags) -> None:
        """Read the record of a cached artifact, or request its compile; note it in ``compiles``."""
        names = named_ops(group.body.nodes)
        compile = CompileRecord(key, len(group.body.nodes), line, "compiling", names=names)
        self.compiles[key] = compile
        record = self._cache.find(key)
        if record is None:
            self._compiler.request(key, group, flags)
            return
        self._records[key] = record
        compile.status, compile.seconds = "cached", record.seconds
        compile.gain = record.gain(group.numel)

    def _handle_answers(self, answers: dict[str, str]) -> None:
        """Record finished compiles, and swap in the plans that are complete with them.

        Args:
            answers: key -> error, as ``Compiler.answers`` returns them.
        """
        for key, error in answers.items():
            try:
                record = None if error else self._cache.find(key)
            except OSError as unusable:
                self._stop_compiling(unusable)
                return
            self._records[key] = record
            compile = self.compiles[key]
            compile.took = time.monotonic() - compile.at
            if record is None:
                compile.status, compile.error = "failed", error or "the cache was emptied meanwhile"
                self._warn(f"a fused group of {compile.ops} ops ({compile.names}; {compile.line}) "
                           f"could not be compiled: {compile.error}")  # fmt: skip
            else:
                compile.status, compile.seconds = "compiled", record.seconds
                compile.gain = max(record.gain(rows[0]) for rows in record.times)
        if answers:
            self._swap_in()

    def _stop_compiling(self, error: OSError | str) -> None:
        """Stop compiling.

        The cache can't be used, or no process can be started, or a host can't run the code.
        """
        self.mode = "off"
        self._compiler.close()
        self._hot.clear()
        self._waiting.clear()
        for compile in self.compiles.values():
            if compile.status == "compiling":
                compile.status, compile.error = "failed", str(error)
        self._warn(f"no fused group can be compiled: {error}")

    def _swap_in(self, now: bool = False) -> None:
        """Swap in the plans whose groups are all compiled or failed, and that had enough runs.

        Args:
            now: however few runs they had.
        """
        self._waits_for_hosts = False
        for digest, (entry, wanted) in list(self._waiting.items()):
            if entry.runs < _SWAP_RUN and not now:
                continue
            if any(key not in self._records for groups in wanted for _, key, _ in groups):
                continue
            groups = [[one[:2] for one in each if self._is_faster(*one[1:])] for each in wanted]
            if not self._installed_everywhere({key for each in groups for _, key in each}):
                self._waits_for_hosts = self.mode != "off"
                continue
            del self._waiting[digest]
            if any(groups):
                self._client.swap(entry, groups)

    def _installed_everywhere(self, keys: Collection[str]) -> bool:
        """Return whether all hosts have these artifacts; stop compiling if one can't run code."""
        if self._installs is None:
            return True
        installed = self._installs.ready(keys)
        if self._installs.error and self.mode != "off":
            self._stop_compiling(f"a host can't run it: {self._installs.error}")
        return installed and self.mode != "off"

    def _is_faster(self, key: str, numel: int) -> bool:
        """Return whether a group of so many elements is faster compiled."""
        record = self._records[key]
        return record is not None and record.saved(numel) > 0

    # -- failures ------------------------------------------------------------------------

    def _report_swap_errors(self) -> None:
        """Warn of plans that a rank could not swap; all ranks go back to that rank's tier."""
        errors, self._client.swap_errors = self._client.swap_errors, []
        for digest, error in errors:
            entry = next((each for each in self._client.entries if digest in each.names), None)
            if entry is not None and any(entry.swap):
                self._client.swap(entry, [() for _ in entry.plans])
            self._warn(f"plan {digest.hex()[:12]} stays on the eager tier: {error}")

    def _warn(self, what: str) -> None:
        """Warn, once, of the loss and its remedy."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lazygt: {what}\nIt runs op by op, as before, which is right but slower. "
                f"lazygt.why(session) lists every compile; lazygt.session(compile='off') asks for "
                f"none.",
                RuntimeWarning,
                stacklevel=2,
            )


def named_ops(nodes: Sequence[Node]) -> str:
    """Return the ops of a group as torch names them, most frequent first: ``mul x4, add_``."""
    counts = Counter(node.op.split(".")[1] for node in nodes)
    return ", ".join(f"{op} x{count}" if count > 1 else op for op, count in counts.most_common())


def dynamic_dims(shapes: list[tuple[TensorMeta, ...]]) -> Dims:
    """Return, for each operand, the dims with sizes that differ among the groups' operands.

    A dim of size 1 somewhere stays fixed: there it is broadcast.
    """
    if len(shapes) < 2:
        return ()
    dims = []
    for metas in zip(*shapes, strict=True):
        sizes = list(zip(*(meta.shape for meta in metas), strict=True))
        dims.append(
            tuple(d for d, seen in enumerate(sizes) if len(set(seen)) > 1 and 1 not in seen)
        )
    return tuple(dims)
