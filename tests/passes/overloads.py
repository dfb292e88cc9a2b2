"""Every overload of aten, and graphs of one node that try one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from lazygt.graph import Graph, Ref
from lazygt.graph.fusion import pure_form
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import Arg, Node
from lazygt.graph.ops import overload
from tests.passes.tools import odd_inputs

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
#: Shapes of the first tensor, and of the others.
SHAPES = (
    ((2, 3), (2, 3)),
    ((17,), (17,)),  # a vector and a rest
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((), ()),
)
#: What stands for an argument that is no tensor, by its type.
NUMBERS: dict[str, Any] = {
    "number": 2,
    "Optional[number]": 1,
    "int": 1,
    "float": 0.5,
    "bool": False,
    "str": "none",
    "Optional[str]": "floor",
}


@cache
def all_overloads() -> list[str]:
    """The names of all overloads of aten."""
    packets = {name: getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)}
    return [
        f"aten.{name}.{which}"
        for name, packet in packets.items()
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for which in packet.overloads()
    ]


def that(accepts: Callable[[str], object]) -> list[str]:
    """The overloads that ``accepts`` is true for."""
    return [op for op in all_overloads() if accepts(op)]


def graphs(op: str, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Graph]:
    """The op on tensors of all these dtypes and all shapes that it takes."""
    return [graph for dtype in dtypes for graph in _graphs_of(op, dtype)]


@lru_cache(maxsize=len(DTYPES))  # what is asked of an op is asked at one go
def _graphs_of(op: str, dtype: torch.dtype) -> tuple[Graph, ...]:
    drawn = [graph_of_one(op, dtype, first, other) for first, other in SHAPES]
    return tuple(graph for graph in drawn if graph is not None)


def graph_of_one(
    op: str, dtype: torch.dtype, first: tuple[int, ...], other: tuple[int, ...]
) -> Graph | None:
    """One node on inputs of these shapes, its result returned; None when torch refuses."""
    metas: list[TensorMeta] = []
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    for argument in _given(op):
        kind = str(argument.type)
        value: Arg = NUMBERS.get(kind)
        if "Tensor" in kind:
            shape = other if metas else first
            of = torch.bool if argument.name in ("mask", "condition") else dtype
            value = Ref(len(metas))
            metas.append(intern(shape, contiguous_stride(shape), of))
        if argument.kwarg_only:
            kwargs.append((argument.name, value))
        else:
            args.append(value)
    return _graph(op, args, kwargs, metas)


def _given(op: str) -> list[Any]:
    """The arguments that are given: those without a default, optional tensors and numbers."""
    optional = ("Optional[Tensor]", "Optional[number]")
    return [
        argument
        for argument in overload(op)._schema.arguments
        if not (argument.kwarg_only and argument.alias_info)
        and (not argument.has_default_value() or str(argument.type) in optional)
    ]


def _graph(
    op: str, args: list[Arg], kwargs: list[tuple[str, Arg]], metas: list[TensorMeta]
) -> Graph | None:
    """The graph; what an ``out`` overload writes to is one more input."""
    writes: tuple[int, ...] = ()
    named = [a for a in overload(op)._schema.arguments if a.alias_info is not None]
    try:
        if named and named[0].kwarg_only:
            pure, _ = pure_form(op)
            metas = [*metas, TensorMeta.of(call(pure, args, kwargs, metas))]
            kwargs = [*kwargs, (named[0].name, Ref(len(metas) - 1))]
        if named:
            writes = (len(metas) - 1,) if named[0].kwarg_only else (0,)
        made = TensorMeta.of(call(op, args, kwargs, metas))
    except (RuntimeError, TypeError):  # torch refuses a dtype by either
        return None
    count = len(metas)
    written = (metas[writes[0]],) if writes else ()
    node = Node(op, tuple(args), tuple(kwargs), () if writes else (made,), writes, written)
    return Graph(tuple(metas), (), (node,), (count,))


def call(op: str, args: list[Arg], kwargs: list[tuple[str, Arg]], metas: list[TensorMeta]) -> Any:
    """What the op returns for odd inputs."""
    tensors = [t.clone() for t in odd_inputs(Graph(tuple(metas), (), (), ()))]

    def value(arg: Arg) -> Any:
        return tensors[arg.index] if type(arg) is Ref else arg

    return overload(op)(*map(value, args), **{name: value(arg) for name, arg in kwargs})


def inputs_for(graph: Graph) -> list[torch.Tensor]:
    """Odd numbers; without NaN for polynomials, for which torch returns uninitialised memory."""
    inputs = odd_inputs(graph)
    odd = any("polynomial" in node.op for node in graph.nodes)
    return [t.nan_to_num(posinf=2.0) for t in inputs] if odd else inputs
