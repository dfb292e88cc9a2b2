"""Parts of sharding rules: strategies, local programs, and arguments by name.

A strategy is one way to run one op on the ranks of one mesh axis: the placement of every operand,
the placement of every result, and the program on the blocks. A rule lists the strategies of an op;
the strategy with R everywhere always stands and no rule names it. A strategy is right for every
size of its dims, also where ranks have blocks of other sizes or none; a rule leaves out all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Partial, Placement, Replicate, Shard
from lazygt.passes.sharding.builder import bound, numbers

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder
    from lazygt.passes.sharding.halo import RowExchange


R = Replicate()
P = Partial("sum")
PMAX, PMIN, PPROD = Partial("max"), Partial("min"), Partial("prod")
S = Shard

Metas = Sequence[TensorMeta | None]
Values = Sequence[Ref | None]
#: Adds a node's local program; gives its results. ``operands`` are local, in order of refs().
Lowering = Callable[["Builder", Node, Sequence[Ref]], Values]


@dataclass(frozen=True, slots=True)
class LocalLowering:
    """Local program that is right for any blocks of the dims that its strategy cuts.

    It never asks which elements of a dim a rank has, only how many; placements it takes from the
    strategy.
    """

    program: Callable[[Builder, Strategy, Node, Sequence[Ref]], Values]


def local_lowering(lower: Lowering) -> LocalLowering:
    """Return a program that is the same for all placements."""
    return LocalLowering(lambda build, strategy, node, operands: lower(build, node, operands))


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective in a strategy, for its cost.

    Attributes:
        kind: its name without ``lazygt.``.
        nbytes: payload bytes a rank.
        reduce_op: the op of a reduction.
    """

    kind: str
    nbytes: int
    reduce_op: str = "sum"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an op on the ranks of one axis.

    Attributes:
        inputs: a placement for each of ``node.refs()``; a repeated value counts each time.
        outputs: a placement for each of ``node.results``.
        lower: adds the local program; None: the same op runs on the blocks.
        comm: the collectives that ``lower`` adds.
        given: operands for which this is no reason to cut them, or to put them together: it is
            offered where they come so.
        share: the part of the arithmetic that the busiest rank does, where placements don't tell.
            Of several with the same placements the one is offered that takes the least time.
        beside: in so many turns its collectives are under way while a rank does its work; those of
            a turn go together. 0: work waits for them.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    lower: Lowering | LocalLowering | None = None
    comm: tuple[Collective, ...] = ()
    given: tuple[int, ...] = ()
    share: float | None = None
    beside: int = 0

    def by(
        self, lower: Lowering | LocalLowering | None, comm: Sequence[Collective] = ()
    ) -> Strategy:
        """Return the same placements with another local program and the collectives inside it."""
        return replace(self, lower=lower, comm=tuple(comm))

    def __str__(self) -> str:
        inputs, outputs = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        inside = "".join(f" +{c.kind}" for c in self.comm)
        return f"({inputs}) -> ({outputs}){inside}"


#: The strategies of one node, besides all R, for an axis of ``parts`` ranks.
Rule = Callable[[Node, Metas, int], Sequence[Strategy]]
#: placement of each operand by its argument's name: one for all tensors of a list, or one each
Labels = Placement | Sequence[Placement]


class Call:
    """Node with its arguments by name, as its schema names them; defaults filled in."""

    def __init__(self, node: Node, metas: Metas, parts: int) -> None:
        self.node, self.metas, self.parts = node, metas, parts
        self.args = bound(node)

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

    def dim(self, name: str, rank: int) -> int:
        """Return a dim argument, counted from the front."""
        return int(self.args[name]) % rank if rank else 0

    def result(self, which: int = 0) -> TensorMeta:
        """Return the global meta of a result."""
        meta = self.node.results[which]
        assert meta is not None, f"{self.node.op}: result {which} is undefined"
        return meta

    def strategy(
        self,
        outputs: Labels,
        /,
        **placements: Labels,
    ) -> Strategy:
        """Return a strategy from placements by argument.

        Tensors that are not named are R, undefined results too.

        Args:
            outputs: one placement for all results, or one each.
        """
        inputs: list[Placement] = []
        for name, arg in self.args.items():
            refs = numbers(arg)
            given = placements.get(name, R)
            inputs += [given] * len(refs) if isinstance(given, Placement) else given
        results = self.node.results
        made = [outputs] * len(results) if isinstance(outputs, Placement) else outputs
        kept = tuple(
            R if meta is None else placement for meta, placement in zip(results, made, strict=True)
        )
        return Strategy(tuple(inputs), kept)


def shardable_dims(shape: tuple[int, ...]) -> list[int]:
    """Return the dims that are worth a block a rank: those with more than one element."""
    return [dim for dim, size in enumerate(shape) if size > 1]


def table(names: str, rule: Rule) -> Mapping[str, Rule]:
    """Return one rule for several ops: names without ``aten.``, separated by spaces."""
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


def row_comm(move: RowExchange, meta: TensorMeta, back: bool = False) -> list[Collective]:
    """Return the collectives of an exchange of a value's rows.

    Nothing where no rows leave their rank.

    Args:
        back: they are given back besides.
    """
    row = meta.nbytes // max(meta.shape[move.dim], 1)
    counts = (move.most, move.most_back) if back else (move.most,)
    return [Collective("send_recv", count * row) for count in counts] if move.sent else []


def zeros_when_empty(call: Call, strategy: Strategy) -> Strategy:
    """Return the strategy for a kernel that takes no empty block: ranks with one give zeros.

    For strategies with results that are S where the block is also empty, or P(sum).
    """
    results, inner = call.node.results, strategy.lower
    split = [
        place for place, placement in enumerate(strategy.inputs) if isinstance(placement, Shard)
    ]

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        if all(build.meta(operands[place]).numel for place in split):
            return lower_strategy(build, strategy.by(inner), node, operands)
        return [
            None if meta is None else zeros(build, meta, placement)
            for meta, placement in zip(results, strategy.outputs, strict=True)
        ]

    if inner is None or isinstance(inner, LocalLowering):
        return replace(strategy, lower=LocalLowering(program))
    return replace(
        strategy, lower=lambda build, node, operands: program(build, strategy, node, operands)
    )


def partial_by_padding(
    call: Call, dims: Mapping[str, int], kept: int | None = None
) -> list[Strategy]:
    """Return the strategy of an op that only moves elements, along a split dim.

    Each rank does the op with its blocks among zeros; the result is the sum of those (of bools, the
    maximum).

    Args:
        dims: the dim that is split, of each tensor argument that is.
        kept: the dim that the result is reduced into blocks of, inside the strategy; None: it is
            left partial, for a result that is smaller than its operand.
    """
    metas = [meta for n in call.node.refs() if (meta := call.metas[n]) is not None]
    result = call.result()
    if all(meta.shape[dim] < 2 for dim in dims.values() for meta in metas):
        return []
    if kept is not None and result.shape[kept] < 2:
        return []
    partial = PMAX if result.dtype == torch.bool else P
    placements = {name: S(dim) for name, dim in dims.items()}
    strategy = call.strategy(partial if kept is None else S(kept), **placements)
    comm = [] if kept is None else [Collective("reduce_scatter", result.nbytes, partial.op)]

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        wide = [
            pad_to_global(build, value, given.dim, meta.shape[given.dim])
            if isinstance(given, Shard)
            else value
            for value, given, meta in zip(operands, strategy.inputs, metas, strict=True)
        ]
        results = build.rerun(node, wide)
        if kept is None or results[0] is None:
            return results
        return (build.reduce_scatter(results[0], kept, partial.op),)

    return [strategy.by(lower, comm)]


def pad_to_global(build: Builder, value: Ref, dim: int, size: int) -> Ref:
    """Return this rank's block along ``dim``, with zeros for the blocks of the others."""
    start, stop = build.bounds(size)
    after = [0, 0] * (len(build.shape(value)) - 1 - dim)
    padded: Ref = build.op("aten.constant_pad_nd.default", value, (*after, start, size - stop), 0)
    return padded


def local_range(build: Builder, size: int, first: int, last: int) -> tuple[int, int]:
    """Return the part of ``first`` to ``last`` in this rank's block of a dim of ``size``.

    It starts and stops at the same place, in ``first`` to ``last``, where there is none.
    """
    start, stop = build.bounds(size)
    a = min(max(first, start), max(first, last))
    return a, max(a, min(last, stop))


def zeros(build: Builder, meta: TensorMeta, placement: Placement) -> Ref:
    """Return this rank's part of a value of zeros."""
    shape = build.local(meta.shape, placement)
    value: Ref = build.op("aten.zeros.default", shape, dtype=meta.dtype, device=DEVICE)
    return value
