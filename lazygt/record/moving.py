"""Steps with a run-time position: the decision for them, and their creation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, params_in
from lazygt.graph.ops import OpFacts
from lazygt.graph.source import CallSite, user_call_site
from lazygt.record.infer import Inference
from lazygt.record.positions import NARROW, SAMPLE, Key, Moved, hoist_position
from lazygt.record.repeats import Repeat
from lazygt.record.trie import TraceTrie, TrieNode


class StepTaker(Protocol):
    """Interface of a trace, as far as this module needs it."""

    inference: Inference
    serial: int
    split: int
    step: TrieNode
    trie: TraceTrie

    @property
    def params(self) -> list[Any]:
        """The run-time numbers of the trace."""

    @property
    def repeat(self) -> Repeat:
        """The earlier trace that this one repeats in other sizes."""

    def note_miss(self, key: Any, f: OpFacts | None, call_site: CallSite | None) -> None:
        """Note that a step is about to be added."""

    def reach(self, step: TrieNode) -> None:
        """Advance to the step of an internal op, which the user did not write."""

    def settle(self) -> None:
        """Roll the trace's lists back to the step that was reached, after an exception."""


def hoist_varying_position(
    trace: StepTaker, f: OpFacts, key: Key, source: TensorMeta | None
) -> Moved | None:
    """Return an op with its varying position as a run-time number; None: a constant.

    The position stays a constant of the step until a second one occurs at the same program point.

    Args:
        key: key of the op's step with a constant position.
        source: meta of the op's first argument.
    """
    op = hoist_position(f, key, source)
    if op is None or op.key in trace.step.children or f is NARROW:
        return op
    call = op.facts, *op.key[1 + op.tensors :]
    return op if position_varies(trace, call, op.numbers) else None


def position_varies(trace: StepTaker, call: Key, numbers: tuple[int, ...]) -> bool:
    """Return whether an op at this program point has been called with several positions.

    A program point is the user's line and the number of ops before it. An unrolled loop that is
    recorded as one trace has one program point for each iteration, and the same positions every
    time.

    Args:
        call: the op, and its arguments besides tensors and positions.
        numbers: the positions of this call.
    """
    program_point = user_call_site(1), trace.step.ops - trace.split, call
    return trace.trie.positions.change(program_point, numbers)


def existing_step(trace: StepTaker, op: Moved) -> TrieNode | None:
    """Return the op's step with run-time positions, or None; append its numbers to the trace's."""
    trace.params.extend(op.numbers)
    return trace.step.children.get(op.key)


def new_step(trace: StepTaker, op: Moved, metas: Mapping[int, TensorMeta]) -> TrieNode:
    """Return a new step of an op with run-time positions; the caller adds it to the trie.

    The op's numbers are in the trace already. Steps of the op at single positions are superseded.

    Args:
        metas: metas of its operands.
    """
    f, first = op.facts, trace.step.params
    args, source = op.args(first), metas[op.key[1]]
    samples = [*trace.params[:first], *[SAMPLE] * len(op.numbers)]
    results = trace.inference.results(f, args, (), dict(metas), samples)
    assert results is not None, f"{f.name}: its results' shapes depend on values"
    trace.note_miss(op.key, f, user_call_site(1))
    trace.trie.superseded += _fixed_position_steps(trace.step, op, source)
    step = TrieNode(trace.step, op.key, Node(f.name, args, (), results.fresh), facts=f)
    step.moves = True
    if f.views:
        step.make = None
        step.pitch = pitch(op.key, source)
    return step


def _fixed_position_steps(parent: TrieNode, op: Moved, source: TensorMeta) -> list[TrieNode]:
    """Return the steps below ``parent`` that do the op at one constant position."""
    steps = []
    for key, child in parent.children.items():
        f, node = child.facts, child.node
        if f is None or f.position is None or node is None or params_in(node.args):
            continue
        hoisted = hoist_position(f, key, source) if key[1] == op.key[1] else None
        if hoisted is not None and hoisted.key == op.key:
            steps.append(child)
    return steps


def pitch(key: Key, source: TensorMeta) -> int:
    """Return the bytes between neighbouring positions of a view of ``source``."""
    step: int = source.stride[key[2]] * source.dtype.itemsize
    return step
