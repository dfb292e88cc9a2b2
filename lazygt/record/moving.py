"""Steps that get their position at run time: when they are used, and their making."""

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
        """Advance to the step of an op that the user did not write."""

    def settle(self) -> None:
        """Make all agree with the step that was reached, after an exception."""


def hoist_varying_position(
    trace: StepTaker, f: OpFacts, key: Key, source: TensorMeta | None
) -> Moved | None:
    """Return an op that has no step here in the form with its position as a number.

    None: it is not recorded so, since there was but one position so far.

    Args:
        key: key of the step that it has otherwise.
        source: meta of its first argument.
    """
    op = hoist_position(f, key, source)
    if op is None or op.key in trace.step.children or f is NARROW:
        return op
    call = op.facts, *op.key[1 + op.tensors :]
    return op if position_varies(trace, call, op.numbers) else None


def position_varies(trace: StepTaker, call: Key, numbers: tuple[int, ...]) -> bool:
    """Return whether the op being recorded is called with positions that change.

    A place is the user's line and the number of ops before it: a loop that is recorded as one trace
    has as many places as iterations, since it has the same positions every time.

    Args:
        what: the op, and its arguments besides tensors and positions.
    """
    program_point = user_call_site(1), trace.step.ops - trace.split, call
    return trace.trie.places.change(program_point, numbers)


def existing_step(trace: StepTaker, op: Moved) -> TrieNode | None:
    """Return the step of such an op, if any; its numbers are the trace's from here on."""
    trace.params.extend(op.numbers)
    return trace.step.children.get(op.key)


def new_step(trace: StepTaker, op: Moved, metas: Mapping[int, TensorMeta]) -> TrieNode:
    """Return a new step of such an op, not in the trie yet; the trace has its numbers.

    It supersedes the steps of single positions.

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
    """Return the steps after ``parent`` that do the same at one position."""
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
    """Return the bytes from one position of a view of ``source`` to the next."""
    step: int = source.stride[key[2]] * source.dtype.itemsize
    return step
