"""Templates: optimised programs, reused in other sizes (symbolic shapes).

Sizes change from step to step (a smaller batch, a longer sequence), the program does not. A
template is an optimised program with its recorded steps. Another recorded program that equals these
steps, up to a mapping of sizes, gets the template's plan with its own sizes substituted. That is
what the passes would make of it if, in the new sizes,

- the passes' questions about sizes (``passes.guards``) have the same answers, and
- no two tensors or calls have become equal (``specialization_key``).

Both are checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, verify
from lazygt.graph.sizes import MIN_SYMBOLIC_SIZE, Resize, Sizes, size_positions, sizes_in
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.guards import Guards, recorded_guards, specialization_key

#: Recorded program: its inputs' metas and its calls, in their order.
Steps = Sequence[TensorMeta | Node]
Stages = list[tuple[str, Graph]]

#: Approximate Python memory of a recorded step and of a question.
_BYTES_A_STEP, _BYTES_A_QUESTION = 300, 500


class Resizable(Protocol):
    """Plan of a graph that can be converted to other sizes."""

    @property
    def graph(self) -> Graph:
        """Optimised graph."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the graph."""

    @property
    def nbytes(self) -> int:
        """Approximate memory of the plan."""

    def resized(self, sizes: Sizes) -> Self:
        """Return the same plan in other sizes."""


P = TypeVar("P", bound=Resizable)


class Template(Generic[P]):
    """Optimised program, to be reused in other sizes.

    Args:
        steps: the recorded program.
        guards: the passes' questions about its sizes, with their answers.
        plan: the plan of the optimised graph.
    """

    def __init__(self, steps: Steps, guards: Guards, plan: P) -> None:
        self.plan = plan
        self._outline, self._guards = Outline(steps), guards

    @staticmethod
    def of(
        graph: Graph,
        steps: Steps,
        passes: Sequence[Pass],
        make: Callable[[Graph], P],
        check: bool = False,
        stages: Stages | None = None,
    ) -> Template[P]:
        """Optimise a recorded graph.

        Args:
            steps: the program that the graph was built of.
            passes: in their order.
            make: builds the plan of an optimised graph.
            check: verify the graph after every pass.
            stages: list to which every pass appends its result.

        Raises:
            GraphError: the optimised graph is invalid; with ``check`` the error names the pass.
        """
        with recorded_guards() as guards:
            optimised = run_passes(graph, passes, check, stages)
        verify(optimised)
        return Template(steps, guards, make(optimised))

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        outline_bytes = _BYTES_A_STEP * len(self._outline)
        return outline_bytes + _BYTES_A_QUESTION * len(self._guards) + self.plan.nbytes

    def resized(self, steps: Steps) -> P | None:
        """Return the plan of another program; None: it differs in more than sizes, or by a guard.

        A plan with a computed size, one that is not a size of the program, is never reused.

        Args:
            steps: the other program, with the same ``outline_key``.
        """
        mapping = self._outline.mapping(steps)
        if mapping is None or not self._guards.hold(Resize(mapping)):
            return None
        sizes = [mapping.get(size) for size in self.plan.sizes]
        if None in sizes:
            return None
        plan = self.plan.resized(tuple(sizes))  # type: ignore[arg-type]
        if len(set(sizes)) < len(sizes) and not _alike(self.plan.graph, plan.graph):
            return None
        return plan


def _alike(graph: Graph, other: Graph) -> bool:
    """Return whether two graphs differ in sizes only, although some sizes have become equal."""
    counts = [specialization_key(each.inputs, each.nodes) for each in (graph, other)]
    return counts[0] == counts[1]


# -- comparison of recorded programs: equality up to a mapping of sizes ----------------------------
# 0, 1 and negative numbers are no sizes here: they stay as they are.


def outline_key(steps: Steps) -> tuple[Any, ...]:
    """Return the common key of programs that may differ in sizes only: ops and input dtypes."""
    return tuple([step.op if isinstance(step, Node) else step.dtype for step in steps])


class Outline:
    """Recorded program, to be matched with programs that differ in sizes only."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._sizes = [sizes_in(step) if type(step) is Node else () for step in steps]
        self._all_sizes = [_all_sizes(step) for step in steps]

    def __len__(self) -> int:
        return len(self._steps)

    def mapping(self, steps: Steps) -> dict[int, int] | None:
        """Return the mapping from this program's sizes to the other's; None: another program.

        Two sizes may map to one, if no two tensors or calls become equal by that.

        Args:
            steps: the other program, with the same ``outline_key``.
        """
        match = _SizeMatch()
        for old, sizes, all_sizes, new in zip(
            self._steps, self._sizes, self._all_sizes, steps, strict=True
        ):
            if old is new:
                matches = match.unchanged(all_sizes)
            elif type(old) is TensorMeta:
                matches = match.meta(old, new)  # type: ignore[arg-type]
            else:
                matches = match.node(old, sizes, new)  # type: ignore[arg-type]
            if not matches:
                return None
        collapsed = len(set(match.sizes.values())) < len(match.sizes)
        if collapsed and _distinct_count(steps) != _distinct_count(self._steps):
            return None
        return match.sizes


def _distinct_count(steps: Steps) -> int:
    """Return the number of distinct metas and nodes, as ``specialization_key`` counts them."""
    nodes = [step for step in steps if isinstance(step, Node)]
    metas = [step for step in steps if isinstance(step, TensorMeta)]
    return specialization_key(metas, nodes)


def _all_sizes(step: TensorMeta | Node) -> frozenset[int]:
    """Return all sizes of an input, or in a node's arguments and results."""
    metas = step.results if isinstance(step, Node) else (step,)
    sizes = [
        size
        for meta in metas
        if meta is not None
        for size in (*meta.shape, *meta.stride, meta.offset)
        if size >= MIN_SYMBOLIC_SIZE
    ]
    return frozenset([*sizes_in(step), *sizes] if isinstance(step, Node) else sizes)


class _SizeMatch:
    """Consistent mapping of old sizes to new ones, built step by step (first-order matching).

    Attributes:
        sizes: old -> new.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._metas: dict[int, TensorMeta] = {}
        #: sizes that match themselves
        self._same: set[int] = set()

    def unchanged(self, sizes: frozenset[int]) -> bool:
        """Map each of these sizes to itself; return whether the mapping stays consistent."""
        if sizes <= self._same:
            return True
        self._same |= sizes
        return all(map(self.size, sizes, sizes))

    def size(self, old: int, new: int) -> bool:
        """Map a size to another; return whether the mapping stays consistent."""
        if old < MIN_SYMBOLIC_SIZE or new < MIN_SYMBOLIC_SIZE:
            return old == new
        return self.sizes.setdefault(old, new) == new

    def meta(self, old: TensorMeta | None, new: TensorMeta | None) -> bool:
        """Match the sizes of two metas; return whether they agree in all else."""
        if old is None or new is None:
            return old is new
        known = self._metas.get(id(old))
        if known is not None:
            return known is new or known == new
        if (old.dtype, len(old.shape), old.conj, old.neg) != (
            new.dtype, len(new.shape), new.conj, new.neg):  # fmt: skip
            return False
        self._metas[id(old)] = new
        return (
            self.size(old.offset, new.offset)
            and all(map(self.size, old.shape, new.shape))
            and all(map(self.size, old.stride, new.stride))
        )

    def node(self, old: Node, sizes: tuple[int, ...], new: Node) -> bool:
        """Match the sizes of two nodes; return whether they agree in all else.

        Args:
            sizes: sizes in the old node's arguments.
        """
        if old.args is new.args and old.kwargs is new.kwargs:
            alike = all(map(self.size, sizes, sizes))
        else:
            alike = self._match_arguments(old, new)
        return (
            alike
            and old.op == new.op
            and old.writes == new.writes
            and old.dynamic == new.dynamic
            and len(old.fresh) == len(new.fresh)
            and len(old.written) == len(new.written)
            and all(map(self.meta, old.results, new.results))
        )

    def _match_arguments(self, old: Node, new: Node) -> bool:
        """Match the arguments of two calls; return whether they agree but for sizes."""
        if len(old.args) != len(new.args) or len(old.kwargs) != len(new.kwargs):
            return False
        size_arguments = size_positions(old.op)
        for position, (old_arg, new_arg) in enumerate(zip(old.args, new.args, strict=True)):
            if not self._match_argument(old_arg, new_arg, position in size_arguments):
                return False
        return all(
            name == other and self._match_argument(old_arg, new_arg, name in size_arguments)
            for (name, old_arg), (other, new_arg) in zip(old.kwargs, new.kwargs, strict=True)
        )

    def _match_argument(self, old: Arg, new: Arg, sizes: bool) -> bool:
        """Match two arguments; ``sizes``: whether ints in them are sizes."""
        kind = type(old)
        if kind is not type(new):
            return False
        if kind is Ref or kind is Param:
            return bool(old.index == new.index)
        if kind is tuple:
            return len(old) == len(new) and all(
                self._match_argument(a, b, sizes) for a, b in zip(old, new, strict=True)
            )
        if kind is int and sizes:
            return self.size(old, new)
        return bool(typed_key(old) == typed_key(new))
