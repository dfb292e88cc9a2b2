"""Strategies of composite ops, derived from the strategies of the ops in their decomposition.

Sharding is propagated through the decomposition (``through_ops``). A partial value is reduced if an
inner op needs the full value. A sharding that an inner op would have to gather gives no strategy.

The local program is the op's own kernel if that is equivalent: if the decomposition of the op on
the blocks equals the program of the inner ops' strategies. Otherwise the local program consists of
the inner ops.
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
from lazygt.passes.sharding.lower.builder import Builder, bound
from lazygt.passes.sharding.rules.decompose import Decomposition, alone, decomposition, params_of
from lazygt.passes.sharding.rules.strategy import (
    Call,
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
from lazygt.passes.sharding.rules.through_ops import OpChain, chains

Kind = tuple[Node, tuple[TensorMeta, ...]]
#: Ops under derivation; an op in its own decomposition gets no strategies (no endless recursion).
_pending: ContextVar[frozenset[Kind]] = ContextVar("_pending", default=frozenset())
StrategiesOf = Callable[[Node, Metas, int], Sequence[Strategy]]


def rule(strategies_of: StrategiesOf) -> Rule:
    """Return the rule of composite ops.

    Args:
        strategies_of: strategies of any op, including those of this rule.
    """

    @lru_cache(maxsize=4096)
    def derived(
        node: Node, operands: tuple[TensorMeta, ...], axis_size: int
    ) -> tuple[Strategy, ...]:
        decomposed = decomposition(node, operands)
        if decomposed is None:
            return ()
        options = [
            [
                *strategies_of(inner, decomposed.metas, axis_size),
                *_partial_cast(decomposed, inner, results),
            ]
            for inner, results in decomposed.numbered()
        ]
        candidates = (_Derived.of(node, decomposed, chain) for chain in chains(decomposed, options))
        return tuple([candidate.strategy() for candidate in candidates if candidate.is_valid()])

    def strategies(call: Call) -> Sequence[Strategy]:
        operands = tuple(call.operands)
        if len(operands) < len(call.node.refs()) or not any(
            shardable_dims(m.shape) for m in operands
        ):
            return ()
        key = alone(call.node), operands
        pending = _pending.get()
        if key in pending:
            return ()
        token = _pending.set(pending | {key})
        try:
            return derived(*key, call.axis_size)
        finally:
            _pending.reset(token)

    return strategies


def _partial_cast(decomposed: Decomposition, inner: Node, results: range) -> Sequence[Strategy]:
    """Return the partial strategy of the final cast of an op, which rounds partial sums.

    A kernel that computes in a wider dtype than its operands rounds its result at the end. Rounding
    partial results is acceptable, since a matmul kernel does the same.

    Args:
        inner: node of the decomposition.
        results: value numbers of its results.
    """
    if inner.op != "aten._to_copy.default" or results[0] not in decomposed.outputs:
        return ()
    dtypes = [meta.dtype for meta in decomposed.metas[: decomposed.operands] if meta is not None]
    meta, unrounded = decomposed.metas[results[0]], decomposed.metas[inner.refs()[0]]
    assert meta is not None
    assert unrounded is not None
    rounds_to_operand_dtype = meta.dtype in dtypes and unrounded.dtype not in dtypes
    is_rounding = rounds_to_operand_dtype and unrounded.dtype.is_floating_point
    return (Strategy((P,), (P,)),) if is_rounding else ()


@dataclass(frozen=True, eq=False)
class _Derived:
    """Composite op with one strategy for each inner op."""

    node: Node  # the op, renumbered by ``alone``
    decomposed: Decomposition  # its decomposition
    chain: OpChain  # strategies of the inner ops
    inputs: tuple[Placement, ...]  # inputs, outputs: placements of the op's operands and results
    outputs: tuple[Placement, ...]
    _programs: dict[object, _Program] = field(default_factory=dict)

    @staticmethod
    def of(node: Node, decomposed: Decomposition, chain: OpChain) -> _Derived:
        """Build the derived op from a chain of inner strategies.

        An operand that no inner op reads gets the placement of a read operand, or of a result, of
        the same shape.
        """
        placements = chain.placements
        outputs = tuple(
            [R if number is None else placements[number] for number in decomposed.outputs]
        )
        operands = range(decomposed.operands)
        read = decomposed.read()
        known_placements = [*zip(node.results, outputs, strict=True)]
        known_placements += [
            (decomposed.metas[operand], placements[operand])
            for operand in operands
            if operand in read
        ]
        by_shape = {
            meta.shape: placement
            for meta, placement in known_placements
            if meta is not None and not isinstance(placement, Partial)
        }
        inputs = tuple([
            placements[operand] if operand in read or meta is None else by_shape.get(meta.shape, R)
            for operand, meta in zip(operands, decomposed.metas, strict=False)
        ])  # fmt: skip
        return _Derived(node, decomposed, chain, inputs, outputs)

    def is_valid(self) -> bool:
        """Return whether the chain is a valid strategy of the op.

        Written operands must keep their placement. A partial operand must lead to exactly one
        result, which is partial: several partial results would need several reductions.
        """
        versions = self.outputs[len(self.node.fresh) :]
        if any(
            self.inputs[operand] != placement
            for operand, placement in zip(self.node.writes, versions, strict=True)
        ):
            return False
        results = zip(self.outputs, self.node.results, strict=True)
        outputs = [placement for placement, meta in results if meta is not None]
        if any(isinstance(placement, StridedShard) for placement in outputs):
            return False
        if P in self.inputs:
            return not self.chain.comm and outputs == [P]
        return True

    def strategy(self) -> Strategy:
        """Return the strategy; its lowering is local if those of the inner strategies are."""
        lowerings = [strategy.lower for strategy in self.chain.strategies]
        is_local = all(lower is None or isinstance(lower, LocalLowering) for lower in lowerings)
        lower = LocalLowering(self._lower) if is_local else self._lower_as_derived
        return Strategy(self.inputs, self.outputs, lower, self.chain.comm)

    def _lower_as_derived(self, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        """Add the program for the placements of the derivation."""
        return self._lower(build, Strategy(self.inputs, self.outputs), node, operands)

    def _lower(
        self, build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]
    ) -> Values:
        """Add this rank's program; programs are cached per operand metas, placements and rank."""
        metas = tuple(map(build.meta, operands))
        key = metas, strategy.inputs, build.rank
        program = self._programs.get(key)
        if program is None:
            scratch = build.empty_builder(metas, ["float"] * len(params_of(self.node)))
            program = self._programs[key] = self._program(scratch, strategy)
        return program.add_to(build, operands, params_of(node))

    def _program(self, scratch: Builder, strategy: Strategy) -> _Program:
        """Return one rank's program: the op's own kernel if equivalent, else the inner ops."""
        values, placements = self._add_inner_ops(scratch, strategy)
        outputs = [None if number is None else values[number] for number in self.decomposed.outputs]
        has_elements = all(map(_has_elements, scratch.inputs, self.decomposed.metas))
        if has_elements and not self.chain.comm:
            kernel = self._kernel(
                scratch, outputs, _local_sizes(self.decomposed.metas, placements, scratch, values)
            )
            if kernel is not None:
                return kernel
        for number, (value, meta) in enumerate(zip(outputs, self.node.fresh, strict=False)):
            if value is not None and meta is not None and meta.plain:
                outputs[number] = scratch.contiguous(value)
        return _Program(scratch, outputs)

    def _add_inner_ops(
        self, scratch: Builder, strategy: Strategy
    ) -> tuple[list[Ref | None], list[Placement]]:
        """Add the local programs of the inner nodes; return all values and their placements."""
        values: list[Ref | None] = [ref(number) for number in range(self.decomposed.operands)]
        placements, metas = list(strategy.inputs), self.decomposed.metas
        inner_strategies = _with_strided_shards(strategy, self.chain.strategies)
        for (node, results), inner_strategy in zip(
            self.decomposed.numbered(), inner_strategies, strict=True
        ):
            operands = [
                _convert(scratch, values[number], metas[number], placements[number], want)
                for number, want in zip(node.refs(), inner_strategy.inputs, strict=True)
            ]
            values += lower_strategy(scratch, inner_strategy, node, operands)
            placements += inner_strategy.outputs
            for number in self.chain.reduced.intersection(results):
                values[number] = _convert(
                    scratch, values[number], metas[number], placements[number], R
                )
                placements[number] = R
        return values, placements

    def _kernel(
        self, scratch: Builder, outputs: Sequence[Ref | None], sizes: Mapping[int, int]
    ) -> _Program | None:
        """Return the op's own kernel on the blocks, if equal to the program in ``scratch``.

        Args:
            outputs: results of the op in ``scratch``.
            sizes: global size of each sharded dim -> size of this rank's block.
        """
        output_numbers = tuple([None if value is None else value.index for value in outputs])
        operands = [ref(number) for number in range(self.decomposed.operands)]
        kernels = []
        for changes in _size_changes(self.node, sizes):
            single = scratch.empty_builder(scratch.inputs, scratch.params)
            try:
                results = single.rerun(self.node, operands, **changes)
            except Exception:  # noqa: BLE001  torch's own: the op takes no such sizes
                continue
            kernel = single.nodes[0]
            decomposed = decomposition(alone(kernel), scratch.inputs)
            is_equal = decomposed and (decomposed.nodes, decomposed.outputs) == (
                tuple(scratch.nodes),
                output_numbers,
            )
            if is_equal and self._keeps_trailing_sizes(kernel, scratch.inputs):
                single.differs = scratch.differs
                kernels.append(_Program(single, results))
        return kernels[0] if len(kernels) == 1 else None

    def _keeps_trailing_sizes(self, kernel: Node, local_metas: Metas) -> bool:
        """Return whether arguments equal to an operand's trailing sizes are so on the blocks too.

        An example is ``normalized_shape``. Kernels check these arguments; not every decomposition
        does.
        """
        local_arguments = bound(kernel)
        return all(
            local_meta.shape[-len(arg) :] == local_arguments[name]
            for name, arg in bound(self.node).items()
            if type(arg) is tuple and arg
            for global_meta, local_meta in zip(self.decomposed.metas, local_metas, strict=False)
            if global_meta is not None
            and local_meta is not None
            and global_meta.shape[-len(arg) :] == arg
        )


def _convert(
    build: Builder, value: Ref | None, meta: TensorMeta | None, have: Placement, want: Placement
) -> Ref:
    """Convert a value of global ``meta`` from placement ``have`` to ``want``."""
    assert value is not None
    assert meta is not None
    return build.convert(value, meta.shape, have, want)


class _Program:
    """Sequence of nodes that can be added to a rank's graph.

    Args:
        scratch: graph that contains only these nodes.
        outputs: the results of the op in ``scratch``.
    """

    def __init__(self, scratch: Builder, outputs: Sequence[Ref | None]) -> None:
        self._nodes, self._count = tuple(scratch.nodes), len(scratch.inputs)
        self._outputs, self._differs = tuple(outputs), scratch.differs

    def add_to(self, build: Builder, operands: Sequence[Ref], params: Sequence[Param]) -> Values:
        """Add the nodes to ``build``, on its operands and run-time numbers; return the results."""
        numbers = {number: value.index for number, value in enumerate(operands)}
        count = self._count
        for node in self._nodes:
            start = len(build.metas)
            build.add(_with_params(renumbered(node, numbers), params))
            numbers.update((count + n, start + n) for n in range(len(node.results)))
            count += len(node.results)
        build.differs |= self._differs
        return [None if value is None else ref(numbers[value.index]) for value in self._outputs]


def _with_params(node: Node, params: Sequence[Param]) -> Node:
    """Replace the renumbered run-time numbers of a node by ``params``."""

    def leaf(arg: Arg) -> Arg:
        return params[arg.index] if type(arg) is Param else arg

    if not params_of(node):
        return node
    kwargs = tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])
    return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs)


def _has_elements(local: TensorMeta, global_meta: TensorMeta | None) -> bool:
    """Return whether a rank's block has elements, if the global value has any."""
    return bool(local.numel) or global_meta is None or not global_meta.numel


def _with_strided_shards(strategy: Strategy, strategies: Sequence[Strategy]) -> Iterable[Strategy]:
    """Replace Shard by StridedShard in the inner strategies if the op's operands are strided."""
    strided = next(
        (placement for placement in strategy.inputs if isinstance(placement, StridedShard)), None
    )
    if strided is None:
        return strategies

    def to_strided(placement: Placement) -> Placement:
        return replace(strided, dim=placement.dim) if isinstance(placement, Shard) else placement

    return [
        replace(
            step,
            inputs=tuple(map(to_strided, step.inputs)),
            outputs=tuple(map(to_strided, step.outputs)),
        )
        for step in strategies
    ]


def _local_sizes(
    metas: Metas, placements: Sequence[Placement], scratch: Builder, values: Sequence[Ref | None]
) -> dict[int, int]:
    """Map the global size of each sharded dim to the size of this rank's block."""
    return {
        meta.shape[placement.dim]: scratch.shape(value)[placement.dim]
        for meta, placement, value in zip(metas, placements, values, strict=True)
        if isinstance(placement, Cut) and meta is not None and value is not None
    }


def _size_changes(node: Node, sizes: Mapping[int, int]) -> Iterator[dict[str, Arg]]:
    """Yield candidate changes of arguments with sharded sizes: none, all, each alone."""
    changed = {
        name: to for name, arg in bound(node).items() if (to := _replace_sizes(arg, sizes)) != arg
    }
    yield {}
    if changed:
        yield changed
    if len(changed) > 1:
        yield from ({name: to} for name, to in changed.items())


def _replace_sizes(arg: Arg, sizes: Mapping[int, int]) -> Arg:
    """Replace global sizes by local ones in an argument."""
    if type(arg) is tuple:
        return tuple([_replace_sizes(item, sizes) for item in arg])
    return sizes.get(arg, arg) if type(arg) is int else arg
