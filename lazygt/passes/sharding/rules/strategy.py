"""Building blocks of sharding rules: strategies, local programs, and arguments by name.

A strategy is one way to run one op on the ranks of one mesh axis: the placement of every operand,
the placement of every result, and the local program that each rank runs on its blocks. A rule lists
the strategies of an op. Running the op replicated (R everywhere) is always possible, so no rule
lists that strategy. A listed strategy must be correct for every size of its dims, including uneven
and empty blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Partial, Placement, Replicate, Shard, shard_bounds
from lazygt.passes.sharding.lower.builder import Builder, bound, numbers
from lazygt.passes.sharding.lower.halo import RowExchange

R = Replicate()
P = Partial("sum")
PMAX, PMIN, PPROD = Partial("max"), Partial("min"), Partial("prod")
#: Partial placements that pass through ops that move elements.
PARTIALS = (P, PMAX, PMIN)
S = Shard

Metas = Sequence[TensorMeta | None]
Values = Sequence[Ref | None]
#: Adds a node's local program; returns its results. ``operands`` are local, in order of refs().
Lowering = Callable[[Builder, Node, Sequence[Ref]], Values]
#: Adds the local program of a strategy.
Program = Callable[[Builder, "Strategy", Node, Sequence[Ref]], Values]


@dataclass(frozen=True, slots=True)
class LocalLowering:
    """Local program that is correct for any blocks of the dims that its strategy shards.

    The program depends on the size of a rank's block, never on the block's offset. It reads
    placements from the strategy.
    """

    program: Program


def local_lowering(lower: Lowering) -> LocalLowering:
    """Return a program that is the same for all placements."""
    return LocalLowering(lambda build, strategy, node, operands: lower(build, node, operands))


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective in a strategy, for its cost."""

    kind: str  # its name without ``lazygt.``
    nbytes: int  # payload bytes a rank
    reduce_op: str = "sum"  # the op of a reduction


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on the ranks of one axis."""

    #: a placement for each of ``node.refs()``; a repeated value counts each time
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]  # a placement for each of ``node.results``
    #: function that adds the local program; None: the same op runs on the blocks
    lower: Lowering | LocalLowering | None = None
    comm: tuple[Collective, ...] = ()  # the collectives that ``lower`` adds
    #: numbers of operands that must already have their placement. The strategy is not a reason to
    #: reshard these operands.
    preplaced: tuple[int, ...] = ()
    #: fraction of the arithmetic on the busiest rank; None: it follows from the placements. Of
    #: several strategies with the same placements the fastest is used.
    share: float | None = None
    #: number of turns in which collectives overlap with compute. The collectives of one turn run
    #: together. 0: compute waits for the collectives.
    overlapped_turns: int = 0

    def by(
        self, lower: Lowering | LocalLowering | None, comm: Sequence[Collective] = ()
    ) -> Strategy:
        """Return a copy with another local program and the collectives inside that program."""
        return replace(self, lower=lower, comm=tuple(comm))

    def wrapped(self, program: Program) -> Strategy:
        """Return a copy with a program around the local one; local if that one is."""
        if self.lower is None or isinstance(self.lower, LocalLowering):
            return replace(self, lower=LocalLowering(program))
        return replace(self, lower=lambda *args: program(args[0], self, *args[1:]))

    def __str__(self) -> str:
        inputs, outputs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        inside = "".join(f" +{c.kind}" for c in self.comm)
        return f"({inputs}) -> ({outputs}){inside}"


#: Placement of an argument or of the results: one for all tensors of a list, or one per tensor.
Labels = Placement | Sequence[Placement]


class Call:
    """Node on an axis of ``axis_size`` ranks.

    Args:
        metas: the meta of every value of the node's graph, by number.
    """

    def __init__(self, node: Node, metas: Metas, axis_size: int) -> None:
        self.node, self.metas, self.axis_size = node, metas, axis_size

    @cached_property
    def args(self) -> dict[str, Arg]:
        """Arguments by schema name, defaults filled in."""
        return bound(self.node)

    @property
    def operands(self) -> list[TensorMeta]:
        """Global metas of the operands that are defined, in order of ``node.refs()``."""
        return [meta for n in self.node.refs() if (meta := self.metas[n]) is not None]

    def __getitem__(self, name: str) -> Arg:
        return self.args[name]

    def has(self, name: str) -> bool:
        """Return whether the argument is a tensor."""
        return type(self.args.get(name)) is Ref

    def meta(self, name: str) -> TensorMeta:
        """Return the global meta of a tensor argument."""
        number: int = self.args[name].index
        meta = self.metas[number]
        assert meta is not None, f"{self.node.op}: {name} is an undefined tensor"
        return meta

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor argument."""
        return self.meta(name).shape

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each rank's block of a dim of ``size``."""
        return [shard_bounds(size, self.axis_size, rank) for rank in range(self.axis_size)]

    @property
    def rank(self) -> int:
        """Number of dims of the argument ``self``."""
        return len(self.shape("self"))

    def dim(self, name: str = "dim", rank: int | None = None) -> int:
        """Return a dim argument as a non-negative dim of a tensor with ``rank`` dims.

        Args:
            rank: by default that of the argument ``self``.
        """
        rank = self.rank if rank is None else rank
        return int(self.args[name]) % rank if rank else 0

    def dims(self, name: str = "dim") -> frozenset[int]:
        """Return an argument of one or several dims of ``self`` as non-negative dims.

        None, and no dims, mean all.
        """
        dims: Arg = self.args.get(name)
        if dims is None or dims == ():
            return frozenset(range(self.rank))
        dims = dims if isinstance(dims, tuple) else (dims,)
        return frozenset(dim % self.rank for dim in dims if self.rank)

    def result(self, number: int = 0) -> TensorMeta:
        """Return the global meta of result ``number``."""
        meta = self.node.results[number]
        assert meta is not None, f"{self.node.op}: result {number} is undefined"
        return meta

    def strategy(
        self,
        outputs: Labels,
        /,
        **placements: Labels,
    ) -> Strategy:
        """Return a strategy from placements by argument name.

        Tensor arguments that are not named and undefined results are R.

        Args:
            outputs: one placement for all results, or one per result.
        """
        inputs: list[Placement] = []
        for name, arg in self.args.items():
            refs = numbers(arg)
            label = placements.get(name, R)
            inputs += [label] * len(refs) if isinstance(label, Placement) else label
        results = self.node.results
        result_placements = [outputs] * len(results) if isinstance(outputs, Placement) else outputs
        output_placements = tuple(
            R if meta is None else placement
            for meta, placement in zip(results, result_placements, strict=True)
        )
        return Strategy(tuple(inputs), output_placements)


#: Strategies of a call, without the all-R strategy.
Rule = Callable[[Call], Sequence[Strategy]]


def passing(
    call: Call,
    dims: Sequence[int | None],
    partials: Sequence[Partial] = (),
    lower: Lowering | LocalLowering | None = None,
    names: Sequence[str] = ("self",),
) -> list[Strategy]:
    """Return the strategies of placements that pass through an op.

    Args:
        dims: dim of the result for each dim of the operands; None: the op needs the full dim.
        partials: partial placements that the op commutes with.
        lower: local program along a sharded dim; None: the op itself.
        names: names of the operands.
    """
    sharded = [
        call.strategy(S(result_dim), **dict.fromkeys(names, S(dim))).by(lower)
        for dim in shardable_dims(call.shape(names[0]))
        if (result_dim := dims[dim]) is not None
    ]
    return sharded + [
        call.strategy(partial, **dict.fromkeys(names, partial)) for partial in partials
    ]


def without(rank: int, dims: Collection[int], removed: bool = False) -> list[int | None]:
    """Map the dims of an operand with ``rank`` dims to those of a result; ``dims`` to None.

    Args:
        removed: whether the result lacks ``dims``.
    """
    return [
        None if dim in dims else dim - removed * sum(other < dim for other in dims)
        for dim in range(rank)
    ]


def broadcast_placement(shape: tuple[int, ...], into: tuple[int, ...], dim: int) -> Placement:
    """Return the placement of a value broadcast to shape ``into``, sharded along ``dim``."""
    own_dim = dim - (len(into) - len(shape))
    return S(own_dim) if own_dim >= 0 and shape[own_dim] == into[dim] else R


def sized(shape: tuple[int, ...], name: str = "size") -> LocalLowering:
    """Return the lowering that passes the local sizes of a result of global ``shape``.

    Args:
        name: name of the argument with the sizes.
    """

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        return build.rerun(node, operands, **{name: build.local(shape, strategy.outputs[0])})

    return LocalLowering(program)


def shardable_dims(shape: tuple[int, ...]) -> list[int]:
    """Return the dims that may be sharded: those with more than one element."""
    return [dim for dim, size in enumerate(shape) if size > 1]


def table(names: str, rule: Rule) -> Mapping[str, Rule]:
    """Map each of several ops to one rule.

    Args:
        names: op names without ``aten.``, separated by spaces.
    """
    return {f"aten.{name}": rule for name in names.split()}


def lower_strategy(
    build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]
) -> Values:
    """Add the local program of ``node`` by ``strategy``; return its results.

    Args:
        node: of the global graph.
        operands: local values with the strategy's input placements, in order of ``node.refs()``.
    """
    if isinstance(strategy.lower, LocalLowering):
        return strategy.lower.program(build, strategy, node, operands)
    if strategy.lower is not None:
        return strategy.lower(build, node, operands)
    return build.rerun(node, operands)


def exchange_comm(
    exchange: RowExchange, meta: TensorMeta, reverse_too: bool = False
) -> list[Collective]:
    """Return the send_recv collectives of a row exchange, for the cost model.

    The list is empty if no rows leave their rank.

    Args:
        meta: global meta of the value whose rows along ``exchange.dim`` are sent.
        reverse_too: whether the reverse exchange (gradients back to the owners) is counted too.
    """
    row_bytes = meta.nbytes // max(meta.shape[exchange.dim], 1)
    counts = (
        (exchange.most_rows_sent, exchange.most_rows_returned)
        if reverse_too
        else (exchange.most_rows_sent,)
    )
    return [Collective("send_recv", count * row_bytes) for count in counts] if exchange.sent else []


def zeros_when_empty(call: Call, strategy: Strategy) -> Strategy:
    """Return the strategy for a kernel that rejects empty blocks.

    A rank with an empty block returns zeros instead of running the kernel. Valid for results that
    are empty on that rank too, and for partial sums.
    """
    kernel_program, results = strategy.lower, call.node.results
    sharded_operands = [
        number for number, placement in enumerate(strategy.inputs) if isinstance(placement, Shard)
    ]

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        if all(build.meta(operands[number]).numel for number in sharded_operands):
            return lower_strategy(build, strategy.by(kernel_program), node, operands)
        return [
            None if meta is None else zeros(build, meta, placement)
            for meta, placement in zip(results, strategy.outputs, strict=True)
        ]

    return strategy.wrapped(program)


def partial_by_padding(
    call: Call, dims: Mapping[str, int], scatter_dim: int | None = None
) -> list[Strategy]:
    """Return the strategy of an op that only moves elements, along a sharded dim.

    Each rank pads its blocks with zeros to the global size and runs the op. The result is the sum
    over ranks (for bools, the maximum).

    Args:
        dims: the sharded dim of each sharded tensor argument.
        scatter_dim: dim of the result for a reduce-scatter inside the strategy; None: the result
            stays partial, which suits a result smaller than its operand.
    """
    metas, result = call.operands, call.result()
    if all(meta.shape[dim] < 2 for dim in dims.values() for meta in metas):
        return []
    if scatter_dim is not None and result.shape[scatter_dim] < 2:
        return []
    partial = PMAX if result.dtype == torch.bool else P
    placements = {name: S(dim) for name, dim in dims.items()}
    strategy = call.strategy(partial if scatter_dim is None else S(scatter_dim), **placements)
    comm = [] if scatter_dim is None else [Collective("reduce_scatter", result.nbytes, partial.op)]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        padded = [
            pad_to_global(build, value, placement.dim, meta.shape[placement.dim])
            if isinstance(placement, Shard)
            else value
            for value, placement, meta in zip(operands, strategy.inputs, metas, strict=True)
        ]
        results = build.rerun(node, padded)
        if scatter_dim is None or results[0] is None:
            return results
        return (build.reduce_scatter(results[0], scatter_dim, partial.op),)

    return [strategy.by(lower, comm)]


def pad_to_global(build: Builder, value: Ref, dim: int, size: int) -> Ref:
    """Pad this rank's block along ``dim`` with zeros to the global ``size`` of the dim."""
    start, stop = build.bounds(size)
    return pad(build, value, dim, start, size - stop)


def pad(build: Builder, value: Ref, dim: int, before: int, after: int, fill_value: Arg = 0) -> Ref:
    """Pad a value by numbers of rows before and after it along ``dim``."""
    pads = (*[0, 0] * (len(build.shape(value)) - 1 - dim), before, after)
    padded: Ref = build.op("aten.constant_pad_nd.default", value, pads, fill_value)
    return padded


def local_range(build: Builder, size: int, first: int, last: int) -> tuple[int, int]:
    """Intersect ``[first, last)`` with this rank's block of a dim of ``size``.

    Returns:
        Global start and stop. Both are equal, within ``[first, last]``, if the intersection is
        empty.
    """
    block_start, block_stop = build.bounds(size)
    start = min(max(first, block_start), max(first, last))
    return start, max(start, min(last, block_stop))


def zeros(build: Builder, meta: TensorMeta, placement: Placement) -> Ref:
    """Return this rank's local tensor of a value of zeros with global ``meta``."""
    shape = build.local(meta.shape, placement)
    value: Ref = build.op("aten.zeros.default", shape, dtype=meta.dtype, device=DEVICE)
    return value
