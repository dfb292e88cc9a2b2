"""Trie (prefix tree) of recorded steps: shape cache, plan cache and guard in one.

Each node is one step of a trace: an input that enters, or an op. Its key has all that is
structural: the op, the numbers of its operands, its int and flag arguments, the *types* of its
Python numbers. Since Python really runs every step, reaching a node proves that the program up to
there is one that was recorded before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lazygt.errors import ProtocolError
from lazygt.graph.flags import Flags
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, params_in
from lazygt.graph.ops import OpFacts, title
from lazygt.graph.recent import Recent
from lazygt.graph.source import CallSite, expand
from lazygt.passes.base import renumbered
from lazygt.passes.sharding.marks import MARKS
from lazygt.record.positions import PositionsByPoint
from lazygt.record.tensor import NATIVE, ViewOp

#: Plans of every step at which no trace has ended; stays empty.
_NO_PLANS: dict[tuple[int, ...], Any] = {}


class TrieNode:
    """Recorded step of a trace.

    Attributes:
        children: key -> the steps that have followed.
        plans: numbers of the outputs -> cached plan of a trace that ends here.
        make: the meta of the result, for the common op that returns one new tensor.
        itself: the op writes its first argument, keeps the shape, and returns it.
        view_ops: for an op that returns views, the view ops of their chains, once computed.
        pitch: bytes between neighbouring positions, for a view with a run-time position.
        full: a trace that reaches this step has to be flushed: it has its maximum length.
        node: the op with Ref numbers as in the trace (inputs negative); None for an input.
        numbers: ints that the op returns besides tensors.
        input: the meta of the input that enters here; None for an op.
        key: see the module; for a root, the flags under which traces begin there.
        forward: for a backward op, the number of the forward op in the same trace, or -1.
        backward: autograd ran the op.
        nbytes: bytes on a rank of the values up to here, including those of handles that died since
            the last count.
        operands: metas of the values that the op reads, in the order of ``Node.refs``, once noted.
        placed: a value up to here is placed on the mesh.
        moves: the op's position is a run-time number.
        native: the same step in the native recorder, once it has reached the step.
        first: number of the op's first result.
        ops, values, params, inputs: number of each up to here, this step included.
    """

    __slots__ = (
        "backward", "children", "depth", "facts", "first", "forward", "full", "input", "inputs",
        "itself", "key", "make", "moves", "native", "nbytes", "node", "numbers", "operands", "ops",
        "params", "parent", "pitch", "placed", "plans", "values", "view_ops",
    )  # fmt: skip

    def __init__(
        self,
        parent: TrieNode | None,
        key: Any,
        node: Node | None = None,
        input: TensorMeta | None = None,
        facts: OpFacts | None = None,
    ) -> None:
        self.parent, self.key, self.node, self.input, self.facts = parent, key, node, input, facts
        self.children: dict[Any, TrieNode] = {}
        self.plans: dict[tuple[int, ...], Any] = _NO_PLANS
        self.depth = self.nbytes = self.ops = self.values = self.params = self.inputs = 0
        if parent is not None:
            self.depth, self.nbytes = parent.depth + 1, parent.nbytes
            self.ops, self.values = parent.ops, parent.values
            self.params, self.inputs = parent.params, parent.inputs + (input is not None)
        self.first = self.values
        self.full = False
        self.native: Any = None
        self.itself = self.moves = False
        self.view_ops: tuple[ViewOp, ...] | None = None
        self.operands: tuple[TensorMeta | None, ...] | None = None
        self.pitch: int | None = None
        self.make: TensorMeta | None = None
        self.placed: bool = parent is not None and (parent.placed or _is_placed(node, key))
        self.numbers: tuple[int, ...] = ()
        self.forward = -1
        self.backward = False
        if node is not None:
            self.ops += 1
            self.values += len(node.fresh) + len(node.written)
            # a write through a view uses run-time numbers of the view
            used = params_in((node.args, node.kwargs))
            self.params = max([self.params, *[number + 1 for number in used]])
            single = facts is not None and facts.outputs == ("f",)
            if single and not node.writes and not node.dynamic:
                self.make = node.fresh[0]

    def copy_below(self, parent: TrieNode) -> TrieNode:
        """Return a copy of this step below another one, where its operands have the same metas."""
        before = self.parent
        assert before is not None
        # without ``__init__``, which would compute known values again: many are made at a time
        step = TrieNode.__new__(TrieNode)
        step.parent, step.key, step.node, step.facts = parent, self.key, self.node, self.facts
        step.input, step.children, step.plans, step.native = self.input, {}, _NO_PLANS, None
        step.depth, step.nbytes = parent.depth + 1, parent.nbytes
        step.ops = parent.ops + self.ops - before.ops
        step.inputs = parent.inputs + self.inputs - before.inputs
        step.first = parent.values
        step.values = parent.values + self.values - before.values
        step.params = parent.params + self.params - before.params
        step.full, step.forward, step.backward = False, -1, False
        step.placed = parent.placed or self.placed
        step.make, step.itself, step.pitch = self.make, self.itself, self.pitch
        step.numbers, step.view_ops, step.moves = self.numbers, self.view_ops, self.moves
        step.operands = self.operands
        return step

    def note_operands(self) -> tuple[TensorMeta | None, ...]:
        """Return ``operands``; note them up to here, and below as far as the path does not fork."""
        if self.operands is None:
            metas: dict[int, TensorMeta | None] = {}
            steps = self.path()
            while len(steps[-1].children) == 1:
                steps += steps[-1].children.values()
            for step in steps:
                if step.node is None:
                    metas[-step.inputs] = step.input
                    continue
                if step.operands is None:
                    step.operands = tuple(map(metas.get, step.node.refs()))
                metas.update(enumerate(step.node.results, step.first))
            assert self.operands is not None
        return self.operands

    def forget(self, child: TrieNode) -> None:
        """Remove a child step, here and in the native recorder."""
        del self.children[child.key]
        if NATIVE is not None:
            NATIVE.forget(self, child)

    def path(self) -> list[TrieNode]:
        """Return the steps from the root (excluded) to here."""
        steps: list[TrieNode] = []
        step: TrieNode = self
        while step.parent is not None:
            steps.append(step)
            step = step.parent
        steps.reverse()
        return steps


class TraceTrie:
    """Trie of steps, with plans where traces ended. An LRU policy evicts plans.

    Args:
        max_plans, max_plan_bytes: limits of all plans together.
        max_steps: limit of all traces together.
        max_depth, max_bytes: limits of one trace: its steps, and bytes of their results on a rank.
        ranks: number of ranks that share the values placed on the mesh.
    """

    def __init__(
        self,
        max_plans: int,
        max_plan_bytes: int,
        max_steps: int,
        max_depth: int,
        max_bytes: int,
        ranks: int = 1,
    ) -> None:
        #: torch's flags -> the root of the traces under them
        self._roots: dict[Flags, TrieNode] = {}
        self.set_root(())
        self.max_depth, self.max_bytes, self._ranks = max_depth, max_bytes, ranks
        self.steps = 0
        self.positions = PositionsByPoint()
        #: prefetched steps, each below the previous one; not reached yet
        self._ahead: list[TrieNode] = []
        #: steps to remove when the current trace has its plan
        self.superseded: list[TrieNode] = []
        self._max_steps = max_steps
        #: a plan's id -> its step and its outputs
        self._recent: Recent[int, tuple[TrieNode, tuple[int, ...]]] = Recent(
            max_plans, max_plan_bytes
        )
        #: mark the plan of this id as used
        self.touch = self._recent.touch

    def set_root(self, flags: Flags) -> None:
        """Set the root for traces under these flags of torch."""
        self.root = self._roots.setdefault(flags, TrieNode(None, flags))

    def add(self, step: TrieNode, alive: Callable[[], int] | None = None) -> TrieNode:
        """Add a step below its parent, and count its bytes.

        Args:
            alive: function that returns the bytes of the trace's earlier values that handles show.
        """
        assert step.parent is not None
        fresh = () if step.node is None else step.node.fresh
        nbytes = sum(meta.nbytes for meta in fresh if meta is not None)
        step.nbytes += self._per_rank(step, nbytes)
        if alive is not None and step.nbytes >= self.max_bytes:
            step.nbytes = self._per_rank(step, alive() + nbytes)
        step.full = step.depth >= self.max_depth or step.nbytes >= self.max_bytes
        step.parent.children[step.key] = step
        self.steps += 1
        return step

    def add_ahead(self, step: TrieNode) -> bool:
        """Add a prefetched step below the previous one; return False for one that is not added.

        A step is not added if the trace might have to be flushed there.
        """
        parent, node = step.parent, step.node
        assert parent is not None
        nbytes = parent.nbytes
        for meta in () if node is None else node.fresh:
            nbytes += 0 if meta is None else meta.nbytes
        if step.depth >= self.max_depth or nbytes >= self.max_bytes:
            return False
        step.nbytes = nbytes
        self._ahead.append(step)
        parent.children[step.key] = step
        self.steps += 1
        return True

    def reached(self, step: TrieNode) -> None:
        """Note that a trace is at ``step``; remove the prefetched steps that it did not reach."""
        ahead, self._ahead = self._ahead, []
        if not ahead:
            return
        position = step.depth - ahead[0].depth
        count = position + 1 if 0 <= position < len(ahead) and ahead[position] is step else 0
        for unreached in ahead[count : count + 1]:
            assert unreached.parent is not None
            if unreached.parent.children.get(unreached.key) is unreached:
                unreached.parent.forget(unreached)
                self._uncount(unreached)

    def half_full(self, step: TrieNode, alive: Callable[[], int]) -> bool:
        """Return whether a trace that ends here has at least half the maximum length."""
        if 2 * step.depth >= self.max_depth:
            return True
        may_be = 2 * step.nbytes >= self.max_bytes
        return may_be and 2 * self._per_rank(step, alive()) >= self.max_bytes

    def _per_rank(self, step: TrieNode, nbytes: int) -> int:
        """Return a rank's share of ``nbytes`` bytes.

        In a trace that is placed on the mesh they count as sharded among all ranks: the placement
        of each value is decided only when the trace is planned.
        """
        return nbytes // self._ranks if step.placed else nbytes

    def plans(self) -> list[Any]:
        """Return all plans, least recently used first."""
        return [step.plans[outputs] for _, (step, outputs) in self._recent.items()]

    def keep(self, step: TrieNode, outputs: tuple[int, ...], plan: Any, nbytes: int) -> list[Any]:
        """Store a plan of ``nbytes`` bytes at the last step of its trace; return evicted plans."""
        self.reached(step)
        if step.plans is _NO_PLANS:
            step.plans = {}
        step.plans[outputs] = plan
        evicted = self._recent.keep(id(plan), (step, outputs), nbytes)
        dropped = [self._remove_plan(location, step) for _, location in evicted]
        dropped += self._remove_superseded(step)
        while len(self._recent) > 1 and self.steps > self._max_steps:
            _, location = self._recent.pop_oldest()
            dropped.append(self._remove_plan(location, step))
        return dropped

    def remove_stale(self, stale: Callable[[TrieNode], bool]) -> list[Any]:
        """Remove the steps for which ``stale`` holds, with their subtrees; return their plans."""
        pending, dropped = [*self._roots.values()], []
        while pending:
            step = pending.pop()
            for child in list(step.children.values()):
                if stale(child):
                    step.forget(child)
                    dropped += self._uncount(child)
                else:
                    pending.append(child)
        return dropped

    def _remove_superseded(self, current: TrieNode) -> list[Any]:
        """Remove the superseded steps, except on the path to ``current``; return their plans."""
        on_path = {id(current), *map(id, current.path())}
        superseded, self.superseded = self.superseded, []
        dropped = []
        for step in superseded:
            assert step.parent is not None
            if step.parent.children.get(step.key) is step and id(step) not in on_path:
                step.parent.forget(step)
                dropped += self._uncount(step)
        return dropped

    def _uncount(self, removed: TrieNode) -> list[Any]:
        """Subtract a removed subtree from the counts; return its plans."""
        pending, dropped = [removed], []
        while pending:
            step = pending.pop()
            self.steps -= 1
            for plan in step.plans.values():
                self._recent.drop(id(plan))
                dropped.append(plan)
            step.plans.clear()
            pending += step.children.values()
        return dropped

    def _remove_plan(self, location: tuple[TrieNode, tuple[int, ...]], current: TrieNode) -> Any:
        """Remove a plan and the steps that led only to it, up to ``current``; return the plan."""
        step, outputs = location
        plan = step.plans.pop(outputs)
        self._prune(step, current)
        return plan

    def _prune(self, step: TrieNode, current: TrieNode) -> None:
        """Remove a step and its ancestors that have neither children nor plans."""
        while step.parent is not None and step is not current:
            if step.children or step.plans:
                return
            step.parent.forget(step)
            self.steps -= 1
            step = step.parent


def _is_placed(node: Node | None, key: Any) -> bool:
    """Return whether a step is a mark, or an input that enters with a sharding."""
    return type(key) is tuple if node is None else node.op in MARKS


def build_graph(
    steps: list[TrieNode], outputs: tuple[int, ...], lines: tuple[str, ...], kinds: tuple[str, ...]
) -> Graph:
    """Build the graph of a path through the trie; values are renumbered, inputs first."""
    inputs = tuple([step.input for step in steps if step.input is not None])
    recorded = [step.node for step in steps if step.node is not None]
    shift, results = len(inputs), sum([len(node.results) for node in recorded])
    numbers = {value: value + shift for value in range(results)}
    numbers.update({~value: value for value in range(shift)})
    nodes = tuple([renumbered(node, numbers) for node in recorded])
    return Graph(inputs, kinds, nodes, tuple([numbers[value] for value in outputs]), lines)


def flags_of(steps: list[TrieNode]) -> Flags:
    """Return torch's flags under which a path through the trie was recorded."""
    root = steps[0].parent
    assert root is not None
    flags: Flags = root.key
    return flags


def producers(steps: list[TrieNode]) -> list[int]:
    """Return, for each value that a trace's ops compute, the number of the op."""
    nodes = [step.node for step in steps if step.node is not None]
    return [number for number, node in enumerate(nodes) for _ in node.results]


# -- source lines of steps -----------------------------------------------------------------


@dataclass(slots=True)  # not frozen: it is made in every flush
class Provenance:
    """Map from a run's steps to recorded ops and the user's lines, used when an error is raised."""

    step: TrieNode
    call_sites: Sequence[CallSite | None]
    backward: CallSite | None
    #: for each plan, step -> recorded op; empty: the same numbers
    origins: tuple[tuple[int, ...], ...]

    def is_last(self, number: int) -> bool:
        """Return whether a step of the plan is the op that was recorded last."""
        return self.op_of(number, 0) == len(self.call_sites) - 1

    def op_of(self, number: int, rank: int) -> int:
        """Return the recorded op behind a step of a rank's plan."""
        origins = self._origins(rank)
        try:
            return origins[number] if origins else range(len(self.call_sites))[number]
        except IndexError:
            raise ProtocolError(f"it names step {number}, which its plan does not have") from None

    def _origins(self, rank: int) -> tuple[int, ...]:
        """Return the origins of a rank's plan."""
        return self.origins[rank if len(self.origins) > 1 else 0]

    def lines(self, rank: int) -> tuple[str, ...]:
        """Return the user's line of each step of a rank's plan."""
        lines = lines_of(self.step.path(), self.call_sites, self.backward)
        origins = self._origins(rank)
        return tuple(lines[origin] for origin in origins) if origins else lines

    def __call__(self, number: int, rank: int) -> tuple[str, tuple[str, ...], str]:
        """Return a step's op, its arguments as text, and the user's line: for an error."""
        number = self.op_of(number, rank)
        steps = self.step.path()
        lines = lines_of(steps, self.call_sites, self.backward)
        graph: Graph = build_graph(steps, (), lines, ())
        node = graph.nodes[number]
        values = graph.values

        def show(arg: Arg) -> str:
            if isinstance(arg, Ref):
                return str(values[arg.index])
            if isinstance(arg, tuple):
                return f"[{', '.join(map(show, arg))}]"
            return "a number" if isinstance(arg, Param) else str(arg)

        argument_texts = [show(arg) for arg in node.args]
        return title(node.op), tuple(argument_texts), graph.line(number)


def sites_of(
    steps: list[TrieNode], call_sites: Sequence[CallSite | None], backward: CallSite | None
) -> tuple[CallSite | None, ...]:
    """Return the user's call of each op; a backward op has its forward op's."""
    sites = []
    ops = [step for step in steps if step.node is not None]
    for step, call_site in zip(ops, call_sites, strict=True):
        if step.forward >= 0 and (call_site is None or call_site == backward):
            call_site = call_sites[step.forward]
        sites.append(call_site or backward)
    return tuple(sites)


def lines_of(
    steps: list[TrieNode], call_sites: Sequence[CallSite | None], backward: CallSite | None
) -> tuple[str, ...]:
    """Return the user's file:line of each op; a backward op has its forward op's."""
    return tuple(map(expand, sites_of(steps, call_sites, backward)))


def line_of(step: TrieNode) -> str:
    """Return the user's line of a step recorded earlier, from any cached plan below it, or "?"."""
    if step.node is None:
        return "?"
    number = sum(passed.node is not None for passed in step.path()) - 1
    below = [step]
    while below:
        step_below = below.pop()
        for plan in step_below.plans.values():
            for rank_plan, recorded_ops in zip(plan.entry.plans, plan.origins, strict=True):
                origins = recorded_ops or range(len(rank_plan.steps.graph.nodes))
                if number in origins:
                    line: str = rank_plan.steps.graph.line(origins.index(number))
                    return line
        below.extend(step_below.children.values())
    return "?"
