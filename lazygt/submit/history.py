"""History of a session: flushes, plan misses and gathers.

While the session runs only call sites and steps of the trie are recorded; texts are built on
request.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Param, Ref
from lazygt.graph.ops import OpFacts
from lazygt.graph.source import CallSite, expand
from lazygt.record.rng import is_state
from lazygt.record.trie import TrieNode
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.runtime.plan import Plan

if TYPE_CHECKING:
    from lazygt.passes.sharding.gathers import Gather

_MAX_MISSES = 256
_MAX_FLUSHES = 1_000
#: Most known steps, or values, in the report of a miss; a loop over many shapes has many.
_MAX_NAMED = 8


class Flush(NamedTuple):
    """One flush of recorded ops to the workers."""

    reason: str  # the sync point, for example ``backward`` or ``to cpu``
    call_site: CallSite | None  # the user's line that forced the flush
    ops: int  # the number of recorded ops
    digest: bytes | None  # of the plan; None when there was nothing to run
    hit: bool  # True if the plan was cached
    run: int  # the number of the run on the workers


class FirstMiss(NamedTuple):
    """First step of a trace that was not in the trie, as recorded."""

    step: TrieNode  # the last known step, before it
    key: Any  # its key among that step's children
    facts: OpFacts | None  # facts of its op; None for an input
    call_site: CallSite | None  # the user's line


@dataclass
class Miss:
    """A flush without a cached plan, and the cause."""

    flush: str  # the reason of the flush
    first: FirstMiss | None  # the first new step; None when every step was known
    known: tuple[TrieNode, ...] = ()  # earlier steps after the same prefix, newest last
    ended: bool = False  # True if an earlier trace with the same steps ended at the same step
    #: outputs that the earlier trace did not have, each as ``op meta  line``
    alive: tuple[str, ...] = ()
    #: returns the user's line of an earlier step, or ``"?"``
    line_of: Callable[[TrieNode], str] = field(default=lambda step: "?", repr=False)
    resized: bool = False  # the program was cached in other sizes, so that no pass had to run
    digest: bytes = b""  # digest of the new plan
    seconds: float = 0.0  # time to build it

    @staticmethod
    def at(flush: str, noted: tuple[Any, ...], line_of: Callable[[TrieNode], str]) -> Miss:
        """Return the miss that begins at the step that the recorder has noted.

        Args:
            flush: reason of the flush.
            noted: fields of a ``FirstMiss``.
            line_of: see ``Miss``.
        """
        first = FirstMiss(*noted)
        new = first.step.children.get(first.key)
        known = [step for step in first.step.children.values() if step is not new]
        return Miss(flush, first, tuple(known[-_MAX_NAMED:]), line_of=line_of)

    @cached_property
    def op(self) -> str | None:
        """Name of the first new op, or the new input."""
        if self.first is None:
            return None
        if isinstance(self.first.key, TensorMeta):
            return f"input {_text(self.first.key)}"
        return self.first.facts.name if self.first.facts is not None else str(self.first.key[0])

    @cached_property
    def line(self) -> str:
        """Line of the user's program that called the first new op."""
        return "?" if self.first is None else expand(self.first.call_site)

    @cached_property
    def before(self) -> TrieNode | None:
        """Known step that is most similar to the new one."""
        if not self.known:
            return None
        return max(reversed(self.known), key=lambda step: (_name(step) == self.op, _is_input(step)))

    @cached_property
    def reason(self) -> str:
        """Cause of the miss, in one phrase."""
        if self.first is None:
            if self.ended:
                return "another set of values is alive"
            return "the trace ends where no kept plan ends"
        if self.before is None:
            return "a new sequence of ops"
        name = _name(self.before)
        if name == self.op:
            return f"{name} with other arguments or shapes than before"
        return f"{self.op} where {name} was before"

    def summary(self) -> dict[str, Any]:
        """Return the miss as plain data, for ``stats()``."""
        return {"reason": self.reason, "op": self.op, "line": self.line, "flush": self.flush}

    def rows(self) -> list[str]:
        """Return the lines of the report of the miss."""
        rows = [f"plan {self.digest.hex()[:12]}, built in {self.seconds * 1e3:.1f} ms, "
                f"flush {self.flush!r}: {self.reason}"]  # fmt: skip
        if self.first is not None:
            if self.before is not None:
                rows.append(f"  before  {call_text(self.before)}  {self.line_of(self.before)}")
            new = self.first.step.children.get(self.first.key)
            text = call_text(new) if new is not None else str(self.op)
            rows.append(f"  {'now' if self.before is not None else 'first':7} {text}  {self.line}")
        rows += [f"  alive   {value}" for value in self.alive]
        return rows


class Probe(Protocol):
    """Profiler of a session's work from ``attach`` to ``detach``."""

    def attach(self) -> None:
        """Begin."""

    def detach(self, compiles: Iterable[CompileRecord]) -> None:
        """End, and remove everything that was added to the session.

        Args:
            compiles: all compilations that the session requested.
        """

    def flush(self, flushes: deque[Flush]) -> AbstractContextManager[None]:
        """Return the context of a flush; recorded if ``flushes`` has one more at its end."""

    def record(self, what: str, begin: int, args: Mapping[str, Any]) -> None:
        """Record an event within a flush, from ``begin`` (``time.monotonic_ns``) to now.

        Args:
            what: name of the event.
            args: further data to show with it.
        """


class History:
    """Flushes, plan misses and gathers of a session; a profiler records them as well.

    Attributes:
        flushes: reason -> count.
        recent, misses: the last flushes and misses, oldest first.
        resized: the last new plans of cached programs in other sizes, oldest first.
        gathers: (op, line) -> the first gather of sharded operands.
        plans_built, plan_hits: number of flushes with a new plan, and with a cached one.
        plans_resized: number of new plans of cached programs in other sizes.
        last_plan: of the last flush with a plan.
        probe: the profiler; None: no profile is being recorded.
    """

    def __init__(self) -> None:
        self.flushes: Counter[str] = Counter()
        self.recent: deque[Flush] = deque(maxlen=_MAX_FLUSHES)
        self.misses: deque[Miss] = deque(maxlen=_MAX_MISSES)
        self.gathers: dict[tuple[str, str], Gather] = {}
        self.resized: deque[Miss] = deque(maxlen=_MAX_MISSES)
        self.plans_built = self.plan_hits = self.plans_resized = 0
        self.last_plan: Plan | None = None
        self.probe: Probe | None = None

    def record_new_plan(self, miss: Miss, plan: Plan, begin: int) -> None:
        """Record a new plan: a miss, or a cached program in other sizes.

        Args:
            begin: start of its construction, by ``time.monotonic_ns``.
        """
        miss.digest, miss.seconds = plan.digest, (time.monotonic_ns() - begin) / 1e9
        (self.resized if miss.resized else self.misses).append(miss)
        self.plans_resized += miss.resized
        if self.probe is not None:
            what = "resize plan" if miss.resized else "build plan"
            self.probe.record(what, begin, miss.summary())


# -- texts ----------------------------------------------------------------------------


def call_text(step: TrieNode) -> str:
    """Format a step as a call: the op with the metas of its inputs and its numbers."""
    if step.node is None:
        return f"input {_text(step.input)}"
    assert step.parent is not None
    inputs, values = _metas(step.parent)
    keys = iter(step.key[1:] if isinstance(step.key, tuple) else ())

    def show(arg: Arg, key: Any) -> str:
        """Format an argument; ``key`` is its part of the step's key in the trie."""
        if type(arg) is Ref:
            at = arg.index
            return _text(inputs[~at] if at < 0 else values[at])  # inputs are numbered -1, -2 ...
        if type(arg) is Param:  # a run-time number, with its type in the key
            return key.__name__ if isinstance(key, type) else "number"
        if type(arg) is tuple:
            keys = key if isinstance(key, tuple) and len(key) == len(arg) else (None,) * len(arg)
            return f"[{', '.join(map(show, arg, keys))}]"
        return "device" if arg is DEVICE else str(arg)

    arguments = [show(arg, next(keys, None)) for arg in step.node.args]
    for name, arg in step.node.kwargs:
        next(keys, None)  # its name
        arguments.append(f"{name}={show(arg, next(keys, None))}")
    return f"{step.node.op}({', '.join(arguments)})"


def _metas(step: TrieNode) -> tuple[list[TensorMeta | None], list[TensorMeta | None]]:
    """Return the metas of the inputs, and of the results, on the path to a step."""
    inputs: list[TensorMeta | None] = []
    values: list[TensorMeta | None] = []
    for path_step in step.path():
        if path_step.node is None:
            inputs.append(path_step.input)
        else:
            values.extend(path_step.node.results)
    return inputs, values


def _name(step: TrieNode) -> str:
    """Return the name of a step's op, or its input."""
    if step.facts is not None:
        return step.facts.name
    return f"input {_text(step.input)}" if step.node is None else step.node.op


def _text(meta: TensorMeta | None) -> str:
    """Format a meta; a random generator's state has one of its own."""
    return "generator state" if is_state(meta) else str(meta)


def _is_input(step: TrieNode) -> bool:
    return step.input is not None


def newly_alive(
    graph: Graph, outputs: tuple[int, ...], others: Collection[tuple[int, ...]]
) -> tuple[str, ...]:
    """Return the outputs that the most similar of ``others`` lacks, each as ``op meta  line``.

    Args:
        outputs, others: numbers of results of nodes, from 0, without the inputs.
    """
    wanted = set(outputs)
    similar = max(others, key=lambda other: len(wanted.intersection(other)), default=())
    missing = wanted.difference(similar)
    input_count = len(graph.inputs)
    return tuple(
        f"{node.op} {_text(meta)}  {graph.line(number)}"
        for number, (node, results) in enumerate(graph.numbered())
        for index, meta in zip(results, node.results, strict=True)
        if index - input_count in missing
    )[:_MAX_NAMED]
