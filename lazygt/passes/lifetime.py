"""lifetime: buffer reuse. A pointwise op writes its result over an operand that dies.

Results do not change by a bit: the same kernel writes to other memory. Pointwise ops are changed,
which read each element before they write it, and reduce-scatters of one value. Only memory that
belongs to the run is overwritten. The run message donates inputs (see ``graph.alias``); the plan's
schedule lists the deaths of values (``runtime.plan``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from lazygt.graph.alias import Aliases, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.graph.ops import overload
from lazygt.graph.placement import LAUNCH, LAUNCH_, WAIT
from lazygt.passes.base import NodeRow, rebuild, rows_of
from lazygt.passes.guards import guard

# -- memory of a launch's results: the launch's buffer, the operand's memory, or new memory --------
# Results of a bucketed collective are views of its buffer, which is freed when the last of them
# dies. A result that outlives the run would keep the full buffer alive, so it is copied out. The
# buffer of a reduce-scatter of several values has the size of all ranks' blocks, so a result is
# copied out if it lives until the next launch.
#
# A reduce-scatter of a single gradient writes its block over the gradient, if only the collective
# reads the gradient, and the block dies before the next launch.


class Unpack:
    """Choice of the memory of each wait's results; runs after all other passes that add writes."""

    name = "unpack"

    def run(self, graph: Graph) -> Graph:
        pairs = list(_pairs(graph))
        if not pairs:
            return graph
        aliases = Aliases(graph)
        aliases.run()
        outlive = {aliases.memory[value] for value in graph.outputs}
        rows = rows_of(graph)
        for pair in pairs:
            launch, wait = rows[pair.launch], rows[pair.wait]
            short_lived = [aliases.lives_until(value) < pair.following for value in wait.results]
            copied = [position for position, value in enumerate(wait.results) if value in outlive]
            if _packs(launch.node):
                copied = [position for position, is_short in enumerate(short_lived) if not is_short]
            elif (
                _scatters(launch.node)
                and all(short_lived)
                and _may_scatter_into_operand(launch, pair, aliases)
            ):
                rows[pair.launch] = launch._replace(node=_over_operand(launch.node, graph))
                wait = wait._replace(node=_waiting(wait.node, ()))
            if len(wait.results) > 1:
                wait = wait._replace(node=_waiting(wait.node, wait.node.args[1], tuple(copied)))
            rows[pair.wait] = wait
        return rebuild(graph, rows)


class _Pair(NamedTuple):
    """Numbers of a launch, its wait, and the first launch after the wait (else the wait)."""

    launch: int
    wait: int
    following: int


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """Yield the launches with results that may be views of their buffers, with their waits."""
    launches: dict[int, int] = {}
    waits: list[tuple[int, int]] = []
    for number, (node, results) in enumerate(graph.numbered()):
        if node.op == LAUNCH:
            launches[results[0]] = number
        elif node.op == WAIT and node.args[0].index in launches:
            waits.append((launches[node.args[0].index], number))
    starts = sorted(launches.values())
    for launch, wait in waits:
        following = next((start for start in starts if start > wait), wait)
        node = graph.nodes[launch]
        if len(node.args[1]) > 1 or _scatters(node):
            yield _Pair(launch, wait, following)


def _scatters(launch: Node) -> bool:
    """Return whether a launch is a reduce-scatter."""
    return bool(launch.args[0] == "reduce_scatter")


def _packs(launch: Node) -> bool:
    """Return whether a launch reduce-scatters several values in one buffer."""
    return _scatters(launch) and len(launch.args[1]) > 1


def _may_scatter_into_operand(launch: NodeRow, pair: _Pair, aliases: Aliases) -> bool:
    """Return whether a reduce-scatter of one value may write its block over that value.

    The value's memory must belong to the run (made in it, or donated to it), its layout must be
    the one that is sent (row-major, scattered along dim 0), and from the launch on only the launch
    and its wait may read the value or an alias.
    """
    _, (operand,), ((dim,),) = launch.node.args[:3]  # kind, operands, dims
    value, graph = operand.index, aliases.graph
    meta = graph.values[value]
    memory = aliases.memory[value]
    is_owned = memory >= len(graph.inputs) or memory in aliases.overwritten
    others = [alias for alias in aliases.members[memory] if alias != value]
    between = graph.nodes[pair.launch + 1 : pair.wait]
    is_sent_as_it_lies = dim == 0 and meta is not None and meta.plain
    has_no_other_reader = (
        aliases.uses[value] == pair.wait
        and all(aliases.uses[alias] <= pair.launch for alias in others)
        and not any(value in node.refs() for node in between)
    )
    return is_owned and is_sent_as_it_lies and has_no_other_reader


def _over_operand(launch: Node, graph: Graph) -> Node:
    """Return the launch that reduces into its only operand."""
    (operand,) = launch.args[1]
    meta = graph.values[operand.index]
    assert meta is not None
    return replace(launch, op=LAUNCH_, fresh=(), writes=(operand.index,), written=(meta,))


def _waiting(node: Node, kept_alive: tuple[Ref, ...], copied: tuple[int, ...] = ()) -> Node:
    """Return a node that waits for a collective (``WAIT``), with other arguments.

    Args:
        kept_alive: operands that the launch reads until the wait.
        copied: positions of the results that are copied out of the buffer.
    """
    in_flight, _, _, axis = node.args
    return replace(node, args=(in_flight, kept_alive, copied, axis))


# -- lifetime: buffer reuse. A pointwise op writes its result over an operand that dies ------------

#: Ops with CPU kernels that round complex64 differently when they write over an operand.
_ROUNDED_IN_PLACE = frozenset({"aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"})


class Lifetime:
    """Rewriting of ``b = op(a)`` to ``op_(a)`` or ``op(a, out=a)`` where ``a`` dies."""

    name = "lifetime"

    def run(self, graph: Graph) -> Graph:
        aliases = Aliases(graph)
        metas = graph.values
        rows = rows_of(graph)
        changed = False
        for number, row in enumerate(rows):
            aliases.visit(number, row.node, row.results)  # type: ignore[arg-type]
            target = _target(row.node, number, aliases, metas)
            in_place = None if target is None else _in_place_node(row.node, target)
            if target is None or in_place is None:
                continue
            rows[number] = row._replace(node=in_place)
            aliases.share(row.results[0], target)
            changed = True
        return rebuild(graph, rows) if changed else graph


def _target(
    node: Node, number: int, aliases: Aliases, metas: Sequence[TensorMeta | None]
) -> int | None:
    """Return a dying operand with the result's meta that the node may overwrite; else None."""
    if len(node.fresh) != 1 or node.writes or node.dynamic or node.body is not None:
        return None
    result = node.fresh[0]
    if (
        result is None
        or _in_place_overloads(node.op) is None
        or result.offset
        or result.conj
        or result.neg
    ):
        return None
    if _rounds_in_place(node.op, result):
        return None
    for arg in node.args:
        if type(arg) is not Ref or metas[arg.index] != result:
            continue
        value = arg.index
        if aliases.uses[value] == number and _fills_its_memory(value, aliases, metas):
            is_only_alias = all(
                other == value or aliases.memory[other] != aliases.memory[value]
                for other in node.refs()
            )
            if is_only_alias and aliases.dies(value):
                return value
    return None


def _rounds_in_place(op: str, result: TensorMeta) -> bool:
    """Return whether the result's bits depend on being written over an operand."""
    return result.dtype == torch.complex64 and op in _ROUNDED_IN_PLACE


def _fills_its_memory(value: int, aliases: Aliases, metas: Sequence[TensorMeta | None]) -> bool:
    """Return whether a value fills its memory, so that reuse keeps no larger memory alive."""
    meta, base = metas[value], metas[aliases.memory[value]]
    if meta is None or base is None or meta.dtype != base.dtype:
        return False
    return guard(_fills, meta, base)


def _fills(meta: TensorMeta, base: TensorMeta) -> bool:
    """Return whether a tensor is dense, with as many elements as the base of its memory."""
    return meta.extent == meta.numel == base.numel


def _in_place_node(node: Node, target: int) -> Node | None:
    """Return the node that writes its result over ``target``; None if there is no such overload."""
    forms = _in_place_overloads(node.op)
    result = node.fresh[0]
    assert forms is not None
    assert result is not None
    in_place, out, keyword = forms
    if in_place and node.args[0] == Ref(target):
        return replace(node, op=in_place, fresh=(), writes=(target,), written=(result,))
    if not out:
        return None
    kwargs = (*node.kwargs, (keyword, ref(target)))
    return replace(node, op=out, kwargs=kwargs, fresh=(), writes=(target,), written=(result,))


@lru_cache(maxsize=4096)
def _in_place_overloads(op: str) -> tuple[str, str, str] | None:
    """Return the in-place and out overloads of a pointwise op.

    Returns:
        (in-place overload or "", out overload or "", its keyword); None: there is neither.
    """
    f = op_facts(Node(op, ()))
    if f is None or not f.pointwise or f.random or f.outputs != ("f",) or f.aliases or f.dynamic:
        return None
    namespace, name, overload_name = op.split(".")
    arguments = [(a.name, str(a.type)) for a in f.func._schema.arguments]
    in_place = f"{namespace}.{name}_.{overload_name}"
    in_place = in_place if _has_arguments(in_place, arguments) else ""
    for out_overload in _overloads(namespace, name):
        last = overload(out_overload)._schema.arguments[-1]
        if (
            last.kwarg_only
            and last.alias_info is not None
            and _has_arguments(out_overload, arguments, last.name)
        ):
            return in_place, out_overload, last.name
    return (in_place, "", "") if in_place else None


def _overloads(namespace: str, name: str) -> Iterable[str]:
    packet = getattr(getattr(torch.ops, namespace), name)
    return [f"{namespace}.{name}.{which}" for which in packet.overloads()]


def _has_arguments(op: str, arguments: list[tuple[str, str]], out: str = "") -> bool:
    """Return whether there is an overload of this name with these arguments (and ``out``)."""
    try:
        function = overload(op)
    except KeyError:
        return False
    actual = [(a.name, str(a.type)) for a in function._schema.arguments if a.name != out]
    return actual == arguments
