"""Local graphs of all ranks, run in one process, in lockstep.

A collective's values are exchanged when all ranks have reached it, so ranks that meet in different
collectives, or in another order, are found too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.node import DEVICE, Graph, Node, Param, Ref, map_arg
from lazygt.graph.ops import OPAQUE_RESULTS, overload
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    EXCHANGES_OF_ROWS,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND_RECV,
    SHARD,
    TAKE_ROWS,
    Shard,
    shard_bounds,
)
from lazygt.runtime.executors.kernels import KERNELS
from tests.passes.sharding.rules.blocks import Tensor, blocks, reduced
from tests.passes.sharding.rules.standins import STAND_INS

AXIS = "x"


def run_node(node: Node, values: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    """A node's results on real tensors; what it writes is copied first."""
    written = node.refs()[:1] if node.op == WRITE_BACK else node.writes
    copies = {n: values[n].clone() for n in written}

    def leaf(arg: Any) -> Any:
        if type(arg) is Ref:
            return copies.get(arg.index, values[arg.index])
        if type(arg) is Param:
            return params[arg.index]
        return torch.device("cpu") if arg is DEVICE else arg

    args = [_as_list(map_arg(arg, leaf)) for arg in node.args]
    kwargs = {name: _as_list(map_arg(arg, leaf)) for name, arg in node.kwargs}
    run = KERNELS.get(node.op) or STAND_INS.get(node.op) or overload(node.op)
    returned = run(*args, **kwargs)
    fresh = _flat(returned)[: len(node.fresh)]
    results = [*fresh, *(copies[n] for n in node.writes)]
    for made, meta in zip(results, node.results, strict=True):
        if meta is not None and node.op not in OPAQUE_RESULTS:
            assert tuple(made.shape) == meta.shape, f"{node}: {made.shape}"
            assert made.dtype == meta.dtype, f"{node}: {made.dtype}"
    return [made if meta is not None else None
            for made, meta in zip(results, node.results, strict=True)]  # fmt: skip


def _as_list(arg: Any) -> Any:
    return [_as_list(item) for item in arg] if isinstance(arg, tuple) else arg


def _flat(returned: Any) -> list[Any]:
    if isinstance(returned, (list, tuple)):
        return [leaf for item in returned for leaf in _flat(item)]
    return [returned]


#: op, arguments that are equal on all ranks, the value (of rows: all operands)
CollectiveInfo = tuple[str, tuple[Any, ...], Any]


def rank_run(
    graph: Graph, inputs: Sequence[Tensor], params: Sequence[Any], rank: int, parts: int
) -> Generator[CollectiveInfo, Tensor, list[Tensor]]:
    """One rank: stops at each collective with (op, arguments, value), and is sent the result."""
    values: list[Any] = list(inputs)
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            given = [values[value] for value in node.refs()]
            rest = node.args[len(given) :]
            made = yield node.op, rest, given if node.op in EXCHANGES_OF_ROWS else given[0]
            _fits(made, node)
            values.append(made)
        elif node.op in (SHARD, REPLICATE_TO_PARTIAL):
            value = values[node.args[0].index]
            values.append(alone(node.op, node.args[1:], value, rank, parts))
            _fits(values[-1], node)
        else:
            values.extend(run_node(node, values, params))
    return [values[number] for number in graph.outputs]


def alone(op: str, args: tuple[Any, ...], value: Tensor, rank: int, parts: int) -> Tensor:
    """What a rank makes of a whole value without any other."""
    if op == SHARD:
        start, stop = shard_bounds(value.shape[args[0]], parts, rank)
        return value.narrow(args[0], start, stop - start).clone(
            memory_format=torch.contiguous_format
        )
    assert op == REPLICATE_TO_PARTIAL, op
    made = value if rank == 0 else torch.zeros_like(value)
    return made.clone(memory_format=torch.contiguous_format)


def _fits(made: Tensor, node: Node) -> None:
    (meta,) = node.results
    assert meta is not None
    assert tuple(made.shape) == meta.shape, f"{node}: made {list(made.shape)}"
    assert made.is_contiguous(), f"{node}: made {made.stride()}"


def lockstep(
    graphs: Sequence[Graph], inputs: Sequence[Sequence[Tensor]], params: Sequence[Any]
) -> list[list[Tensor]]:
    """Run all ranks; they must come to the same collectives in the same order."""
    parts = len(graphs)
    ranks = [
        rank_run(g, x, params, i, parts)
        for i, (g, x) in enumerate(zip(graphs, inputs, strict=True))
    ]
    sent: list[Tensor | None] = [None] * parts
    while True:
        collectives: list[CollectiveInfo] = []
        done: list[list[Tensor]] = []
        for rank, value in zip(ranks, sent, strict=True):
            try:
                collectives.append(rank.send(value))  # type: ignore[arg-type]
            except StopIteration as end:
                done.append(end.value)
        if done:
            assert not collectives, f"{len(done)} ranks ended, others wait in {collectives[0][:2]}"
            return done
        kinds = [met[:2] for met in collectives]
        assert len(set(kinds)) == 1, f"ranks meet in {kinds}"
        sent = list(exchange(collectives[0][0], collectives[0][1], [m[2] for m in collectives]))


def exchange(op: str, args: tuple[Any, ...], values: list[Any]) -> list[Tensor]:
    """What each rank gets from a collective."""
    parts = len(values)
    assert args[-1] == AXIS
    if op in EXCHANGES_OF_ROWS:
        return _rows(op, values, *args[:-1])
    if op == ALL_REDUCE:
        assert len({value.shape for value in values}) == 1
        made = reduced(values, args[0])
        return [made.clone(memory_format=torch.contiguous_format) for _ in values]
    if op == ALL_GATHER:
        return [_gathered(values, args[0], args[1])] * parts
    if op == REDUCE_SCATTER:
        return blocks(reduced(values, args[1]), Shard(args[0]), parts)
    if op == SEND_RECV:
        return _sent(values, *args[:-1])
    assert op == ALL_TO_ALL, op
    split, concat, size, _ = args
    return blocks(_gathered(values, concat, size), Shard(split), parts)


def _sent(values: list[Tensor], dim: int, rows: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """What each rank gets of the rows that others send."""
    got: list[list[Tensor]] = [[value.narrow(dim, 0, 0)] for value in values]
    for source, value in enumerate(values):
        sent = [(target, count) for of, target, count in rows if of == source]
        for (target, _), piece in zip(sent, value.split([c for _, c in sent], dim), strict=True):
            assert target != source
            got[target].append(piece)
    return [torch.cat(pieces, dim).contiguous() for pieces in got]


def _rows(
    op: str, operands: list[list[Tensor]], rows: int, size: int, added: bool = False
) -> list[Tensor]:
    """Taken from, or put into, the whole of all blocks."""
    own = [block for block, *_ in operands]
    whole = torch.cat(own)
    assert whole.shape[0] == size
    assert all(len(block) == rows for block in own[: size // rows])
    for _, index, *given in operands:
        if given:
            whole.index_put_((index,), *given, accumulate=added)
    if op == TAKE_ROWS:
        return [whole.index_select(0, index) for _, index in operands]
    return [block.contiguous() for block in whole.split([len(block) for block in own])]


def _gathered(values: list[Tensor], dim: int, size: int) -> Tensor:
    for rank, value in enumerate(values):
        start, stop = shard_bounds(size, len(values), rank)
        assert value.shape[dim] == stop - start, f"rank {rank} has {value.shape[dim]} of {size}"
    return torch.cat(values, dim).contiguous()
