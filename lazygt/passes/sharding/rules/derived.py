"""Strategies of composite ops, by the strategies of the ops in their decomposition.

A cut is followed through the decomposition. A partial value is reduced where an inner op needs it
whole. A cut that an inner op would have to gather is no strategy.

A strategy runs the op's own kernel on the blocks where that is the same: where the decomposition of
the op on the blocks equals the program that the strategies made of its decomposition on the whole.
Else it runs the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Param, Ref, map_arg, ref
from lazygt.graph.placement import Cut, Partial, Placement, Shard, StridedShard
from lazygt.passes.base import renumbered
from lazygt.passes.sharding.builder import Builder, bound
from lazygt.passes.sharding.rules.decompose import Decomposition, alone, decomposition, params_of
from lazygt.passes.sharding.rules.strategy import (
    LocalLowering,
    Metas,
    P,
    R,
    Rule,
    Strategy,
    Values,
    lower_strategy,
    shardable_dims,
)
from lazygt.passes.sharding.rules.through_ops import Chain, chains

Kind = tuple[Node, tuple[TensorMeta, ...]]
#: Ops that are being derived: an op that leads to itself has no strategies on the way.
_pending: ContextVar[frozenset[Kind]] = ContextVar("_pending", default=frozenset())
StrategiesOf = Callable[[Node, Metas, int], Sequence[Strategy]]


def rule(strategies_of: StrategiesOf) -> Rule:
    """Return the rule of composite ops.

    Args:
        strategies_of: the strategies of any op, those that this rule finds among them.
    """

    @lru_cache(maxsize=4096)
    def derived(node: Node, operands: tuple[TensorMeta, ...], parts: int) -> tuple[Strategy, ...]:
        made = decomposition(node, operands)
        if made is None:
            return ()
        options = [
            [*strategies_of(inner, made.metas, parts), *_rounded(made, inner, results)]
            for inner, results in made.numbered()
        ]
        found = (_Derived.of(node, made, chain) for chain in chains(made, options))
        return tuple([each.strategy() for each in found if each.is_right()])

    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        operands = tuple([meta for number in node.refs() if (meta := metas[number]) is not None])
        if len(operands) < len(node.refs()) or not any(shardable_dims(m.shape) for m in operands):
            return ()
        kind = alone(node), operands
        pending = _pending.get()
        if kind in pending:
            return ()
        token = _pending.set(pending | {kind})
        try:
            return derived(*kind, parts)
        finally:
            _pending.reset(token)

    return strategies


def _rounded(steps: Decomposition, inner: Node, results: range) -> Sequence[Strategy]:
    """Return the strategy that rounds partial values, for a cast at the end of an op.

    A kernel that computes wider than its operands are rounds its results at the end. Partial ones
    it rounds too, as that of a matmul does.
    """
    if inner.op != "aten._to_copy.default" or results[0] not in steps.outputs:
        return ()
    dtypes = [meta.dtype for meta in steps.metas[: steps.operands] if meta is not None]
    meta, wide = steps.metas[results[0]], steps.metas[inner.refs()[0]]
    assert meta is not None
    assert wide is not None
    is_own = meta.dtype in dtypes and wide.dtype not in dtypes
    return (Strategy((P,), (P,)),) if is_own and wide.dtype.is_floating_point else ()


@dataclass(frozen=True, eq=False)
class _Derived:
    """Composite op as a chain of inner strategies.

    Attributes:
        node: the op, see ``alone``.
        inputs, outputs: its placements.
    """

    node: Node
    made: Decomposition
    chain: Chain
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    _programs: dict[object, _Program] = field(default_factory=dict)

    @staticmethod
    def of(node: Node, made: Decomposition, chain: Chain) -> _Derived:
        """Build it from a chain.

        An operand that nothing reads is cut as a read operand, or a result, of its shape is.
        """
        placements = chain.placements
        outputs = tuple([R if number is None else placements[number] for number in made.outputs])
        places = range(made.operands)
        read = made.read()
        known = [*zip(node.results, outputs, strict=True)]
        known += [(made.metas[place], placements[place]) for place in places if place in read]
        by_shape = {
            meta.shape: placement
            for meta, placement in known
            if meta is not None and not isinstance(placement, Partial)
        }
        inputs = tuple([
            placements[place] if place in read or meta is None else by_shape.get(meta.shape, R)
            for place, meta in zip(places, made.metas, strict=False)
        ])  # fmt: skip
        return _Derived(node, made, chain, inputs, outputs)

    def is_right(self) -> bool:
        """Return whether the chain is a strategy of the op.

        Written values keep their placement, and a partial operand leads to one partial result: to
        several, it would be reduced as often.
        """
        versions = self.outputs[len(self.node.fresh) :]
        if any(self.inputs[at] != to for at, to in zip(self.node.writes, versions, strict=True)):
            return False
        results = zip(self.outputs, self.node.results, strict=True)
        outputs = [placement for placement, meta in results if meta is not None]
        if any(isinstance(placement, StridedShard) for placement in outputs):
            return False
        if P in self.inputs:
            return not self.chain.comm and outputs == [P]
        return True

    def strategy(self) -> Strategy:
        """Return the strategy of the op; for any blocks where its inner strategies are."""
        inner = [strategy.lower for strategy in self.chain.strategies]
        is_local = all(lower is None or isinstance(lower, LocalLowering) for lower in inner)
        lower = LocalLowering(self._lower) if is_local else self._lowered
        return Strategy(self.inputs, self.outputs, lower, self.chain.comm)

    def _lowered(self, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        return self._lower(build, Strategy(self.inputs, self.outputs), node, operands)

    def _lower(
        self, build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]
    ) -> Values:
        metas = tuple(map(build.meta, operands))
        key = metas, strategy.inputs, build.rank
        program = self._programs.get(key)
        if program is None:
            scratch = build.beside(metas, ["float"] * len(params_of(self.node)))
            program = self._programs[key] = self._program(scratch, strategy)
        return program.added(build, operands, params_of(node))

    def _program(self, scratch: Builder, strategy: Strategy) -> _Program:
        """Return one rank's program: the op's own kernel where that is as good."""
        values, placements = self._walk(scratch, strategy)
        outputs = [None if number is None else values[number] for number in self.made.outputs]
        whole = all(map(_has_some, scratch.inputs, self.made.metas))
        if whole and not self.chain.comm:
            kernel = self._kernel(
                scratch, outputs, _sizes(self.made.metas, placements, scratch, values)
            )
            if kernel is not None:
                return kernel
        for place, (value, meta) in enumerate(zip(outputs, self.node.fresh, strict=False)):
            if value is not None and meta is not None and meta.plain:
                outputs[place] = scratch.contiguous(value)
        return _Program(scratch, outputs)

    def _walk(
        self, scratch: Builder, strategy: Strategy
    ) -> tuple[list[Ref | None], list[Placement]]:
        """Add the inner nodes as their strategies say; return every value and its placement."""
        values: list[Ref | None] = [ref(number) for number in range(self.made.operands)]
        placements, metas = list(strategy.inputs), self.made.metas
        steps = _cut_as(strategy, self.chain.strategies)
        for (node, results), step in zip(self.made.numbered(), steps, strict=True):
            operands = [
                _converted(scratch, values[number], metas[number], placements[number], wanted)
                for number, wanted in zip(node.refs(), step.inputs, strict=True)
            ]
            values += lower_strategy(scratch, step, node, operands)
            placements += step.outputs
            for number in self.chain.reduced.intersection(results):
                values[number] = _converted(
                    scratch, values[number], metas[number], placements[number], R
                )
                placements[number] = R
        return values, placements

    def _kernel(
        self, scratch: Builder, outputs: Sequence[Ref | None], sizes: Mapping[int, int]
    ) -> _Program | None:
        """Return the op itself on the blocks, if that equals the program in ``scratch``."""
        wanted = tuple([None if value is None else value.index for value in outputs])
        operands = [ref(number) for number in range(self.made.operands)]
        found = []
        for changes in _changes(self.node, sizes):
            single = scratch.beside(scratch.inputs, scratch.params)
            try:
                results = single.rerun(self.node, operands, **changes)
            except Exception:  # noqa: BLE001  torch's own: the op takes no such sizes
                continue
            kernel = single.nodes[0]
            made = decomposition(alone(kernel), scratch.inputs)
            same = made and (made.nodes, made.outputs) == (tuple(scratch.nodes), wanted)
            if same and self._names_sizes(kernel, scratch.inputs):
                single.differs = scratch.differs
                found.append(_Program(single, results))
        return found[0] if len(found) == 1 else None

    def _names_sizes(self, kernel: Node, local: Metas) -> bool:
        """Return whether arguments that are the last sizes of an operand still are.

        Kernels look at them, but not every decomposition does.
        """
        given = bound(kernel)
        return all(
            meta.shape[-len(arg) :] == given[name]
            for name, arg in bound(self.node).items()
            if type(arg) is tuple and arg
            for whole, meta in zip(self.made.metas, local, strict=False)
            if whole is not None and meta is not None and whole.shape[-len(arg) :] == arg
        )


def _converted(
    build: Builder, value: Ref | None, meta: TensorMeta | None, have: Placement, want: Placement
) -> Ref:
    assert value is not None
    assert meta is not None
    return build.convert(value, meta.shape, have, want)


class _Program:
    """Nodes on the operands, to be added to a rank's graph.

    Args:
        scratch: has them alone.
        outputs: the results of the op.
    """

    def __init__(self, scratch: Builder, outputs: Sequence[Ref | None]) -> None:
        self._nodes, self._count = tuple(scratch.nodes), len(scratch.inputs)
        self._outputs, self._differs = tuple(outputs), scratch.differs

    def added(self, build: Builder, operands: Sequence[Ref], params: Sequence[Param]) -> Values:
        """Add the nodes; return the results."""
        numbers = {place: value.index for place, value in enumerate(operands)}
        count = self._count
        for node in self._nodes:
            start = len(build.metas)
            build.add(_with_params(renumbered(node, numbers), params))
            numbers.update((count + n, start + n) for n in range(len(node.results)))
            count += len(node.results)
        build.differs |= self._differs
        return [None if value is None else ref(numbers[value.index]) for value in self._outputs]


def _with_params(node: Node, params: Sequence[Param]) -> Node:
    def leaf(arg: Arg) -> Arg:
        return params[arg.index] if type(arg) is Param else arg

    if not params_of(node):
        return node
    kwargs = tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])
    return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs)


def _has_some(local: TensorMeta, whole: TensorMeta | None) -> bool:
    """Return whether a rank's block has elements, where the whole has."""
    return bool(local.numel) or whole is None or not whole.numel


def _cut_as(strategy: Strategy, steps: Sequence[Strategy]) -> Iterable[Strategy]:
    """Return the strategies of the inner nodes, cut as the op's is: in blocks, or interleaved."""
    wanted = next(
        (placement for placement in strategy.inputs if isinstance(placement, StridedShard)), None
    )
    if wanted is None:
        return steps

    def cut(placement: Placement) -> Placement:
        return replace(wanted, dim=placement.dim) if isinstance(placement, Shard) else placement

    return [
        replace(step, inputs=tuple(map(cut, step.inputs)), outputs=tuple(map(cut, step.outputs)))
        for step in steps
    ]


def _sizes(
    metas: Metas, placements: Sequence[Placement], scratch: Builder, values: Sequence[Ref | None]
) -> dict[int, int]:
    """Map the size of each cut dim to the size of this rank's block."""
    return {
        meta.shape[placement.dim]: scratch.shape(value)[placement.dim]
        for meta, placement, value in zip(metas, placements, values, strict=True)
        if isinstance(placement, Cut) and meta is not None and value is not None
    }


def _changes(node: Node, sizes: Mapping[int, int]) -> Iterator[dict[str, Arg]]:
    """Yield changes of the arguments that may name a rank's sizes: none, all, each alone."""
    changed = {name: to for name, arg in bound(node).items() if (to := _resized(arg, sizes)) != arg}
    yield {}
    if changed:
        yield changed
    if len(changed) > 1:
        yield from ({name: to} for name, to in changed.items())


def _resized(arg: Arg, sizes: Mapping[int, int]) -> Arg:
    if type(arg) is tuple:
        return tuple([_resized(item, sizes) for item in arg])
    return sizes.get(arg, arg) if type(arg) is int else arg
