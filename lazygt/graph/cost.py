"""Cost of a graph: arithmetic, bytes moved and launches.

The numbers are those of the graph as it is written, counted and not timed. Every op reads each
operand and writes each result once (operands that it only overwrites, and rows that it does not
pick, are not read).

family                       flops
matmul                       the formula of torch.utils.flop_counter
pointwise, random, other     one an element of the results
reduction                    one an element of the largest operand
memory, collective           none (and waiting for a collective is free)
view                         none, no bytes and no launch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from lazygt.graph.alias import COPY, DONE, WRITE_BACK, analyse, draws, op_facts
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, map_arg
from lazygt.graph.placement import COLLECTIVES, POINT_TO_POINT, WAIT

#: Collectives, and the waits for them.
_COLLECTIVES = COLLECTIVES | POINT_TO_POINT | {WAIT}
#: Every family, in order of precedence for the family of a fused node.
FAMILIES = ("matmul", "reduction", "pointwise", "random", "other", "memory", "collective",
            "view")  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Ops that reshape their operand's memory; the schema declares only true views.
_VIEWS = _names("""_unsafe_view _reshape_alias unsafe_split unsafe_split_with_sizes unsafe_chunk
    lift lift_fresh""")
#: Ops that allocate memory without writing it.
_UNTOUCHED = _names("empty empty_like empty_permuted empty_strided new_empty")
_FREE = _UNTOUCHED | _names("wait wait_tensor manual_seed get_rng_state set_rng_state")
#: Ops that write their first argument without reading it.
_OVERWRITES = _names("copy fill zero uniform normal bernoulli exponential random")
#: Ops that create a tensor of the shape of another, without reading that.
_LIKE_FACTORIES = _names("""empty_like zeros_like ones_like full_like rand_like randn_like
    randint_like new_empty new_zeros new_ones new_full""")
#: Ops that read from their first argument only the elements that they return.
_GATHERS = _names("embedding gather index index_select shard take _unsafe_index")
_COPIES = _names("""arange as_strided block_diag cat clone contiguous copy diag_embed diagonal
    embedding_dense eye fill first flip full index_copy index_fill index_put _index_put_impl
    linspace masked_select ones repeat roll scalar_tensor select slice split stack tril triu unfold
    _unsafe_index_put write_back zero zeros""")
_MEMORY = _COPIES | _GATHERS | _LIKE_FACTORIES | _UNTOUCHED
_REDUCTIONS = _names("""all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod
    cumsum histc kthvalue linalg__powsum logsumexp max mean median min nansum prod std std_mean sum
    trace var var_mean""")
#: Pointwise ops without torch's tag.
_POINTWISE = _names("""complex dropout hardswish polar native_dropout _fused_adagrad _fused_adam
    _fused_adamw _fused_sgd""")
#: Substrings of op names that determine the family.
_MEMORY_PARTS = ("_copy", "_pad", "scatter", "shuffle")
_REDUCTION_PARTS = ("binary_cross_entropy", "loss", "norm", "pool", "softmax")
#: Products with one multiplication and one addition for each element of the operand at a position.
_VECTOR_PRODUCTS = {"addmv": 1, "dot": 0, "mv": 0, "vdot": 0}

Metas = Sequence[TensorMeta | None]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one node, or of several together."""

    flops: int = 0  # arithmetic operations; a fused multiply-add is two
    #: bytes_read, bytes_written: bytes of the operands and of the results, each counted once a
    #: node; elements that an expanded tensor repeats are counted once
    bytes_read: int = 0
    bytes_written: int = 0
    launches: int = 0  # ops that reach a kernel (some ops launch more than one)

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.launches + other.launches,
        )


def base_name(op: str) -> str:
    """Return an op's bare name: ``add`` for ``aten.add_.Tensor``."""
    name = op.split(".")[1]
    return name if name.endswith("__") else name.removesuffix("_")


def _grouped_flops(matrix: torch.Tensor, other: torch.Tensor, *_: object, **__: object) -> int:
    """Return the flops of a grouped product: each row, or column, is in one group."""
    groups = matrix.shape[0] if (matrix.dim(), other.dim()) == (3, 2) else 1
    return 2 * matrix.numel() * other.shape[-1] // groups


@cache
def _formula(base: str) -> Callable[..., int] | None:
    """Return torch's flop formula of an op, or None."""
    if base == "_grouped_mm":
        return _grouped_flops
    # torch has attention's formulas under the names of the kernels for GPUs only
    packet = getattr(torch.ops.aten, base.replace("_for_cpu", ""), None)
    return flop_registry.get(packet)


def family(node: Node) -> str:
    """Return a node's family; a fused node has the first of FAMILIES that a member has."""
    if node.body is not None:
        return min((family(member) for member in node.body.nodes), key=FAMILIES.index)
    if node.op in _COLLECTIVES or node.op.startswith("_c10d_functional."):
        return "collective"
    base, facts = base_name(node.op), op_facts(node)
    if base in _VIEWS or (facts is not None and (facts.views or facts.inplace_view)):
        return "view"
    computes = _formula(base) is not None
    return "random" if draws(node) and not computes else _family_of_name(base)


@cache
def _family_of_name(base: str) -> str:
    """Return the family of an op that is neither a view nor a collective, by its bare name."""
    if _formula(base) is not None or base in _VECTOR_PRODUCTS:
        return "matmul"
    forward = base.removesuffix("_data").removesuffix("_backward")
    if forward in _MEMORY or any(substring in forward for substring in _MEMORY_PARTS):
        return "memory"
    if forward in _REDUCTIONS or any(substring in forward for substring in _REDUCTION_PARTS):
        return "reduction"
    return "pointwise" if forward in _POINTWISE or _is_tagged_pointwise(forward) else "other"


def _is_tagged_pointwise(base: str) -> bool:
    """Return whether torch tags any overload of an op as pointwise."""
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return False
    tags = (getattr(packet, name).tags for name in packet.overloads())
    return base.startswith("_foreach_") or any(torch.Tag.pointwise in tag for tag in tags)


def graph_costs(graph: Graph) -> list[Cost]:
    """Return the cost of each node, in order."""
    return [sum(members, Cost()) for members in member_costs(graph)]


def member_costs(graph: Graph) -> list[list[Cost]]:
    """Return for each node the costs of its members; for a plain node, its own cost alone.

    A fused node is one launch that reads the node's inputs and writes its results. Those bytes and
    the launch count at its first member; every member has its own flops.
    """
    metas, costs = graph.values, []
    for node, modes in zip(graph.nodes, analyse(graph).modes, strict=True):
        if node.body is None:
            flops = [_flops(node, metas)]
        else:
            flops = [_flops(member, node.body.values) for member in node.body.nodes]
        first, *others = map(Cost, flops)
        costs.append([first + _memory_cost(node, metas, modes), *others])
    return costs


def by_line(graph: Graph) -> dict[str, Cost]:
    """Return the cost of each of the user's lines (``file:line``), in order of appearance.

    The members of a fused node count to their own lines, with the bytes and the launch at the
    first one's line (see ``member_costs``).
    """
    totals: dict[str, Cost] = {}
    for number, (node, costs) in enumerate(zip(graph.nodes, member_costs(graph), strict=True)):
        for member, cost in enumerate(costs):
            line = graph.line(number) if node.body is None else node.body.line(member)
            totals[line] = totals.get(line, Cost()) + cost
    return totals


def _memory_cost(node: Node, metas: Metas, modes: Sequence[str]) -> Cost:
    """Return a node's bytes read and written, and its launch."""
    if DONE in modes or _is_free(node):
        return Cost()
    read = sum(_distinct_bytes(metas[value]) for value in set(node.refs()) - _unread(node))
    written = sum(map(_distinct_bytes, node.results))
    targets = node.writes
    if node.op == WRITE_BACK:  # only the region that the view covers
        read = written = _distinct_bytes(metas[node.args[1].index])
        targets = (node.args[0].index,)
    elif base_name(node.op) in _GATHERS:
        read += written
    copied = sum(
        _distinct_bytes(metas[target])
        for target, mode in zip(targets, modes, strict=True)
        if mode == COPY
    )
    return Cost(0, read + copied, written + copied, 1)


def _is_free(node: Node) -> bool:
    """Return whether a node touches no element."""
    return node.body is None and (base_name(node.op) in _FREE or family(node) == "view")


def _unread(node: Node) -> set[int]:
    """Return the operands of a node that it does not read, or not entirely."""
    base = base_name(node.op)
    if base in _LIKE_FACTORIES or base in _GATHERS or base in _OVERWRITES:
        first = node.args[0] if node.args else None
        return {first.index} if isinstance(first, Ref) else set()
    return set(node.writes) if node.op.endswith("out") else set()


def _distinct_bytes(meta: TensorMeta | None) -> int:
    """Return the bytes of a tensor's distinct elements; 0 for an unknown meta."""
    if meta is None:
        return 0
    count = 1
    for size, step in zip(meta.shape, meta.stride, strict=True):
        count *= size if step or not size else 1
    return count * meta.dtype.itemsize


def _flops(node: Node, metas: Metas) -> int:
    """Return a node's arithmetic operations."""
    kind = family(node)
    if kind in ("view", "memory", "collective") or _is_free(node):
        return 0
    if kind == "matmul":
        return _matmul_flops(node, metas)
    if kind == "reduction":
        operands = (metas[value] for value in node.refs())
        return max((meta.numel for meta in operands if meta is not None), default=0)
    return sum(meta.numel for meta in (*node.written, *node.fresh) if meta is not None)


def _matmul_flops(node: Node, metas: Metas) -> int:
    """Return the flops of a product, from the metas of its arguments."""

    def leaf(item: Arg) -> Arg:
        return metas[item.index] if type(item) is Ref else 1 if type(item) is Param else item

    return _formula_flops(
        base_name(node.op), map_arg(node.args, leaf), map_arg(node.kwargs, leaf), node.results
    )


@lru_cache(maxsize=4096)
def _formula_flops(
    base: str,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    results: tuple[TensorMeta | None, ...],
) -> int:
    """Return the flops by an op's formula; cached, since a model repeats few such ops."""
    args = map_arg(args, _tensor)
    if base in _VECTOR_PRODUCTS:
        return 2 * int(args[_VECTOR_PRODUCTS[base]].numel())
    formula = _formula(base)
    assert formula is not None
    named = {name: map_arg(arg, _tensor) for name, arg in kwargs}
    out = tuple(map(_tensor, results))
    return int(formula(*args, **named, out_val=out[0] if len(out) == 1 else out))


def _tensor(item: Any) -> Any:
    """Return a meta tensor for a TensorMeta, as torch's formulas take it; else the item."""
    return item.empty("meta") if type(item) is TensorMeta else item


#: Positions of the two multiplied matrices among an op's tensors.
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}


def product_sizes(node: Node, metas: Metas) -> tuple[int, int, int, int] | None:
    """Return (m, n, k, count) of a node's products of [m, k] and [k, n]; None for another op."""
    if node.body is not None or (positions := _PRODUCTS.get(base_name(node.op))) is None:
        return None
    operands = [meta.shape for value in node.refs() if (meta := metas[value]) is not None]
    if len(operands) <= max(positions):
        return None
    left, right = (operands[position] for position in positions)
    return left[-2], right[-1], left[-1], math.prod(left[:-2])
