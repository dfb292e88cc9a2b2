"""Eligibility of nodes for operator fusion, shared by the pass and the compiler.

A member is a pointwise op, a reduction or a normalization on dense tensors of ordinary dtypes. A
run-time number is allowed where a tensor of one element gives the same result: the compiler passes
such a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, map_arg, params_in
from lazygt.graph.ops import Overload, facts, overload

Metas = Sequence[TensorMeta | None]

REDUCTIONS = frozenset(
    {
        "aten.sum.default",
        "aten.sum.dim_IntList",
        "aten.mean.default",
        "aten.mean.dim",
        "aten.amax.default",
        "aten.amin.default",
        "aten.linalg_vector_norm.default",
        "aten.var.correction",
        "aten.std.correction",
        "aten.logsumexp.default",
        "aten.mse_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.huber_loss.default",
        "aten.binary_cross_entropy_with_logits.default",
    }
)
#: Reduce, and walk over the elements again; some have several results. Not the losses that look
#: classes up: compiled code would end the worker for a class out of range.
NORMALIZATIONS = frozenset(
    {
        "aten._softmax.default",
        "aten._softmax_backward_data.default",
        "aten._log_softmax.default",
        "aten._log_softmax_backward_data.default",
        "aten.mse_loss_backward.default",
        "aten.native_layer_norm.default",
        "aten.native_layer_norm_backward.default",
        "aten.native_group_norm.default",
        "aten.native_group_norm_backward.default",
        "aten.native_batch_norm.default",
        "aten.native_batch_norm_backward.default",
    }
)
#: Pointwise ops without torch's tag.
_COPIES = frozenset({"aten.copy_.default", "aten._to_copy.default"})
#: Ops with torch's pointwise tag that do more than arithmetic: they choose layouts or allocate.
_NOT_ARITHMETIC = frozenset({"clone", "fill", "zeros_like", "ones_like", "full_like"})
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
                     torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})  # fmt: skip
_FULL_PRECISION = (torch.float32, torch.float64)

#: Arguments that may be run-time numbers: functional overload -> positions and keywords. No
#: exponents: torch multiplies for 2 and 3 and takes roots for 0.5, compiled code takes logarithms.
NUMBERS: dict[str, tuple[int | str, ...]] = {
    "aten.add.Tensor": (1, "alpha"),
    "aten.sub.Tensor": (1, "alpha"),
    "aten.mul.Tensor": (1,),
    "aten.div.Tensor": (1,),
    "aten.rsub.Scalar": (1,),
    "aten.add.Scalar": (1, "alpha"),
    "aten.sub.Scalar": (1, "alpha"),
    "aten.mul.Scalar": (1,),
    "aten.div.Scalar": (1,),
    "aten.addcmul.default": ("value",),
    "aten.addcdiv.default": ("value",),
    "aten.lerp.Scalar": (2,),
    "aten.masked_fill.Scalar": (2,),
    "aten.threshold_backward.default": (2,),
    "aten.eq.Scalar": (1,),
    "aten.ne.Scalar": (1,),
    "aten.gt.Scalar": (1,),
    "aten.ge.Scalar": (1,),
    "aten.lt.Scalar": (1,),
    "aten.le.Scalar": (1,),
    "aten.var.correction": ("correction",),
    "aten.std.correction": ("correction",),
    "aten.native_layer_norm.default": (4,),
    "aten.native_group_norm.default": (7,),
    "aten.native_batch_norm.default": (6, 7),
    "aten.native_batch_norm_backward.default": (8,),
}


def is_fusible(node: Node, metas: Metas) -> bool:
    """Return whether a node may be a member of a fused node.

    Args:
        metas: the meta of every value.
    """
    if node.op in REDUCTIONS or node.op in NORMALIZATIONS:
        return (
            bool(node.fresh)
            and _has_ordinary_tensors(node, metas)
            and _numbers_fit_tensors(node, metas)
        )
    if len(node.results) != 1 or not is_pointwise(node.op):
        return False
    if node.op in _COPIES and any(key != "dtype" and arg is not None for key, arg in node.kwargs):
        return False
    return _has_ordinary_tensors(node, metas) and _numbers_fit_tensors(node, metas)


@lru_cache(maxsize=4096)
def is_pointwise(op: str) -> bool:
    """Return whether each result element depends on its position's operand elements alone."""
    if op in _COPIES:
        return True
    if op.startswith("lazygt.") or "_foreach" in op or "@" in op:
        return False
    try:
        pure, _ = pure_form(op)
    except KeyError:
        return False
    f = facts(overload(pure))  # torch tags few of the overloads that write
    single = f.outputs == ("f",) and not (f.random or f.dynamic or f.aliases)
    return single and f.pointwise and pure.split(".")[1] not in _NOT_ARITHMETIC


def _has_ordinary_tensors(node: Node, metas: Metas) -> bool:
    """Return whether all tensors have elements, an ordinary dtype and no lazy bits."""
    results = node.results
    if node.op in NORMALIZATIONS:  # absent gradients, and empty statistics
        results = tuple(meta for meta in results if meta is not None and 0 not in meta.shape)
    tensors = [metas[value] for value in node.refs()] + list(results)
    return bool(tensors) and all(
        m is not None and 0 not in m.shape and m.dtype in _DTYPES and not (m.conj or m.neg)
        for m in tensors
    )


@lru_cache(maxsize=4096)
def pure_form(op: str) -> tuple[str, str]:
    """Return the functional overload of a pointwise op or reduction, and the keyword it lacks.

    The keyword is that of an ``out=`` overload; empty for others.

    Raises:
        KeyError: no functional overload exists.
    """
    arguments = overload(op)._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None]
    namespace, name, _ = op.split(".")
    if not written or op == "aten.copy_.default":
        return op, ""
    in_place = written == ["self"] and name.endswith("_")
    wanted_arguments = [
        (a.name, str(a.type)) for a in arguments if in_place or a.name not in written
    ]
    for candidate in _overloads(namespace, name.removesuffix("_") if in_place else name):
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted_arguments:
            return str(candidate), "" if in_place else written[0]
    raise KeyError(op)


def _overloads(namespace: str, name: str) -> list[Overload]:
    """Return the overloads of an op."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return (
        []
        if packet is None
        else [getattr(packet, overload_name) for overload_name in packet.overloads()]
    )


def numbers_of(node: Node) -> list[tuple[int | str, Param]]:
    """Return the run-time numbers among the arguments: (position or keyword, Param)."""
    numbers: list[tuple[int | str, Param]] = []
    arguments: list[tuple[int | str, Arg]] = [*enumerate(node.args), *node.kwargs]
    for position, arg in arguments:
        numbers.extend((position, Param(index)) for index in params_in(arg))
    return numbers


def _numbers_fit_tensors(node: Node, metas: Metas) -> bool:
    """Return whether each run-time number could be a tensor, with the same arithmetic."""
    numbers = numbers_of(node)
    if not numbers:
        return True
    pure = pure_form(node.op)[0]
    allowed = NUMBERS.get(pure, ())
    dtypes = {m.dtype for value in node.refs() if (m := metas[value]) is not None}
    if pure == "aten.masked_fill.Scalar":
        dtypes.discard(torch.bool)
    return all(position in allowed for position, _ in numbers) and dtypes <= set(_FULL_PRECISION) \
        and len(dtypes) == 1  # fmt: skip


# -- inlining of fused nodes -----------------------------------------------------------------------


def expand_fused(graph: Graph, retained: Collection[int] = ()) -> Graph:
    """Return ``graph`` with every fused node replaced by its members, in their order.

    Args:
        retained: numbers of fused nodes that are not replaced.
    """
    if all(node.body is None or n in retained for n, node in enumerate(graph.nodes)):
        return graph
    return _Inlined(graph, retained).graph()


class _Inlined:
    """Graph under construction, with the members of fused nodes inlined."""

    def __init__(self, source: Graph, retained: Collection[int]) -> None:
        self.source, self.retained = source, retained
        self.nodes: list[Node] = []
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.count = len(source.inputs)

    def graph(self) -> Graph:
        """Return the graph with inlined members."""
        source = self.source
        numbers = list(range(self.count))
        for number, node in enumerate(source.nodes):
            if node.body is None or number in self.retained:
                self._add(node, numbers, None, source.line(number), source.origin(number))
            else:
                numbers.extend(self._members(node, node.body, numbers))
        outputs = tuple(numbers[value] for value in source.outputs)
        lines = tuple(self.lines) if source.lines else ()
        return Graph(
            source.inputs, source.params, tuple(self.nodes), outputs, lines, tuple(self.origins)
        )

    def _members(self, node: Node, body: Graph, numbers: list[int]) -> list[int]:
        """Append a fused node's members; return the numbers of the node's results."""
        member_numbers = [numbers[ref] for ref in node.refs()]
        params = [arg.index for arg in node.args if type(arg) is Param]
        for number, member in enumerate(body.nodes):
            self._add(member, member_numbers, params, body.line(number), body.origin(number))
        return [member_numbers[value] for value in body.outputs]

    def _add(
        self, node: Node, numbers: list[int], params: list[int] | None, line: str, origin: int
    ) -> None:
        """Append a node with renumbered values; ``params``: numbers of the fused node's params."""

        def leaf(arg: Arg) -> Arg:
            if type(arg) is Ref:
                return Ref(numbers[arg.index])
            if type(arg) is Param and params is not None:
                return Param(params[arg.index])
            return arg

        self.nodes.append(
            Node(
                node.op,
                map_arg(node.args, leaf),
                tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs),
                node.fresh,
                tuple(numbers[value] for value in node.writes),
                node.written,
                node.dynamic,
                node.body,
            )
        )
        count = len(node.results)
        numbers.extend(range(self.count, self.count + count))
        self.count += count
        self.lines.append(line)
        self.origins.append(origin)
