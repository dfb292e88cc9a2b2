"""History of a session: flushes, plan misses and gathers.

It notes little while the session runs (call sites and steps of the trie); texts are made on
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
from lazygt.runtime.compiling.tiers import Compile
from lazygt.runtime.plan import Plan

if TYPE_CHECKING:
    from lazygt.passes.sharding.gathers import Gather

_KEPT_MISSES = 256
_KEPT_FLUSHES = 1_000
#: Known steps, or values, that a miss names at most; a loop over many shapes has many.
_NAMED = 8


class Flush(NamedTuple):
    """One flush.

    Attributes:
        reason: the sync point, for example ``backward`` or ``to cpu``.
        call_site: the user's line that forced it.
        ops: the number of ops recorded.
        digest: the plan's name; None when there was nothing to run.
        hit: True if the plan was there already.
        run: the number of the run.
    """

    reason: str
    call_site: CallSite | None
    ops: int
    digest: bytes | None
    hit: bool
    run: int


class FirstMiss(NamedTuple):
    """The first step of a trace that was not in the trie, as the recorder notes it."""

    step: TrieNode
    key: Any
    facts: OpFacts | None
    call_site: CallSite | None


@dataclass
class Miss:
    """A flush without a cached plan, and the cause.

    Attributes:
        flush: the reason of the flush.
        first: the first new step; None when every step was known.
        known: the steps that had followed the same beginning before, newest last.
        ended: True if an earlier trace with the same steps had ended at the same place.
        alive: values that had not been outputs then, each as ``op meta  line``.
        line_of: finds the user's line of a step that was recorded earlier, or ``"?"``.
        resized: the program was known in other sizes, so that no pass had to run.
        digest, seconds: the plan, and the time of its passes.
    """

    flush: str
    first: FirstMiss | None
    known: tuple[TrieNode, ...] = ()
    ended: bool = False
    alive: tuple[str, ...] = ()
    line_of: Callable[[TrieNode], str] = field(default=lambda step: "?", repr=False)
    resized: bool = False
    digest: bytes = b""
    seconds: float = 0.0

    @staticmethod
    def at(flush: str, noted: tuple[Any, ...], line_of: Callable[[TrieNode], str]) -> Miss:
        """Build the miss that began at the step that the recorder noted."""
        first = FirstMiss(*noted)
        new = first.step.children.get(first.key)
        known = [step for step in first.step.children.values() if step is not new]
        return Miss(flush, first, tuple(known[-_NAMED:]), line_of=line_of)

    @cached_property
    def op(self) -> str | None:
        """The first new op (or input)."""
        if self.first is None:
            return None
        if isinstance(self.first.key, TensorMeta):
            return f"input {_text(self.first.key)}"
        return self.first.facts.name if self.first.facts is not None else str(self.first.key[0])

    @cached_property
    def line(self) -> str:
        """The user's line of the first new op."""
        return "?" if self.first is None else expand(self.first.call_site)

    @cached_property
    def before(self) -> TrieNode | None:
        """The known step that the new one is most like."""
        if not self.known:
            return None
        return max(reversed(self.known), key=lambda step: (_name(step) == self.op, _is_input(step)))

    @cached_property
    def reason(self) -> str:
        """One sentence."""
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
        """Plain data, as ``stats()`` shows it."""
        return {"reason": self.reason, "op": self.op, "line": self.line, "flush": self.flush}

    def rows(self) -> list[str]:
        """The text of the miss."""
        rows = [f"plan {self.digest.hex()[:12]}, built in {self.seconds * 1e3:.1f} ms, "
                f"flush {self.flush!r}: {self.reason}"]  # fmt: skip
        if self.first is not None:
            if self.before is not None:
                rows.append(f"  before  {shown(self.before)}  {self.line_of(self.before)}")
            new = self.first.step.children.get(self.first.key)
            text = shown(new) if new is not None else str(self.op)
            rows.append(f"  {'now' if self.before is not None else 'first':7} {text}  {self.line}")
        rows += [f"  alive   {value}" for value in self.alive]
        return rows


class Probe(Protocol):
    """Observer that draws a session's work from ``attach`` to ``detach``."""

    def attach(self) -> None:
        """Begin."""

    def detach(self, compiles: Iterable[Compile]) -> None:
        """Leave the session as it was.

        Args:
            compiles: all that the session asked for.
        """

    def flush(self, flushes: deque[Flush]) -> AbstractContextManager[None]:
        """Return the context of a flush, drawn if ``flushes`` has one more at its end."""

    def did(self, what: str, begin: int, args: Mapping[str, Any]) -> None:
        """Something within a flush, from ``begin`` to now."""


class History:
    """Flushes, plan misses and gathers; while a profile is taken, they are drawn as well.

    Attributes:
        flushes: reason -> count.
        recent, misses: the last ones, oldest first.
        resized: the last plans that are known programs in other sizes, oldest first.
        gathers: (op, line) -> the first time that its sharded operands were gathered.
        plans_built, plan_hits: numbers of flushes with a new plan, and with a cached one.
        plans_resized: number of the new ones that were known programs in other sizes.
        last_plan: of the last flush that had one.
        probe: draws; None: no profile is being taken.
    """

    def __init__(self) -> None:
        self.flushes: Counter[str] = Counter()
        self.recent: deque[Flush] = deque(maxlen=_KEPT_FLUSHES)
        self.misses: deque[Miss] = deque(maxlen=_KEPT_MISSES)
        self.gathers: dict[tuple[str, str], Gather] = {}
        self.resized: deque[Miss] = deque(maxlen=_KEPT_MISSES)
        self.plans_built = self.plan_hits = self.plans_resized = 0
        self.last_plan: Plan | None = None
        self.probe: Probe | None = None

    def missed(self, miss: Miss, plan: Plan, begin: int) -> None:
        """Note a new plan, made since ``begin``: a miss, or a known program in other sizes."""
        miss.digest, miss.seconds = plan.digest, (time.monotonic_ns() - begin) / 1e9
        (self.resized if miss.resized else self.misses).append(miss)
        self.plans_resized += miss.resized
        if self.probe is not None:
            what = "resize plan" if miss.resized else "build plan"
            self.probe.did(what, begin, miss.summary())


# -- words ----------------------------------------------------------------------------


def shown(step: TrieNode) -> str:
    """A step as the user would know it: the op with its inputs' metas and its numbers."""
    if step.node is None:
        return f"input {_text(step.input)}"
    assert step.parent is not None
    inputs, values = _metas(step.parent)
    keys = iter(step.key[1:] if isinstance(step.key, tuple) else ())

    def show(arg: Arg, key: Any) -> str:
        if type(arg) is Ref:
            at = arg.index
            return _text(inputs[~at] if at < 0 else values[at])
        if type(arg) is Param:
            return key.__name__ if isinstance(key, type) else "number"
        if type(arg) is tuple:
            keys = key if isinstance(key, tuple) and len(key) == len(arg) else (None,) * len(arg)
            return f"[{', '.join(map(show, arg, keys))}]"
        return "device" if arg is DEVICE else str(arg)

    parts = [show(arg, next(keys, None)) for arg in step.node.args]
    for name, arg in step.node.kwargs:
        next(keys, None)  # its name
        parts.append(f"{name}={show(arg, next(keys, None))}")
    return f"{step.node.op}({', '.join(parts)})"


def _metas(step: TrieNode) -> tuple[list[TensorMeta | None], list[TensorMeta | None]]:
    """The metas of the inputs and of the results on the way to a step."""
    inputs: list[TensorMeta | None] = []
    values: list[TensorMeta | None] = []
    for passed in step.path():
        if passed.node is None:
            inputs.append(passed.input)
        else:
            values.extend(passed.node.results)
    return inputs, values


def _name(step: TrieNode) -> str:
    if step.facts is not None:
        return step.facts.name
    return f"input {_text(step.input)}" if step.node is None else step.node.op


def _text(meta: TensorMeta | None) -> str:
    return "generator state" if is_state(meta) else str(meta)


def _is_input(step: TrieNode) -> bool:
    return step.input is not None


def newly_alive(
    graph: Graph, outputs: tuple[int, ...], others: Collection[tuple[int, ...]]
) -> tuple[str, ...]:
    """The outputs that the most similar of ``others`` lacks, each as ``op meta  line``.

    Both number the results of nodes from 0, without the inputs.
    """
    needed = set(outputs)
    similar = max(others, key=lambda other: len(needed.intersection(other)), default=())
    missing = needed.difference(similar)
    shift = len(graph.inputs)
    return tuple(
        f"{node.op} {_text(meta)}  {graph.line(number)}"
        for number, (node, results) in enumerate(graph.numbered())
        for index, meta in zip(results, node.results, strict=True)
        if index - shift in missing
    )[:_NAMED]
