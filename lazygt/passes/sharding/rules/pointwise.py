"""Pointwise ops: an element of the result depends on the same element of the operands only.

Any dim of the result can be sharded, with every operand that has that dim. Ops that are linear in
some operands accept partial sums of them. Monotonically increasing ops accept partial maxima and
minima.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from lazygt.graph.fusion import pure_form
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.ops import facts, overload
from lazygt.graph.per_tensor import ALL, EACH, SPLIT, ForeachForm
from lazygt.graph.placement import Partial, Placement, Replicate, Shard
from lazygt.passes.base import NodeRow, rebuild, rows_of
from lazygt.passes.sharding.lower.builder import Builder, bound, numbers
from lazygt.passes.sharding.rules import reductions
from lazygt.passes.sharding.rules.strategy import (
    PMAX,
    PMIN,
    Call,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    broadcast_placement,
    lower_strategy,
    shardable_dims,
    table,
)

#: Ops that are linear in the operands marked P; one letter per tensor operand.
_LINEAR: dict[str, tuple[str, ...]] = {
    "add.Tensor": ("PP",),
    "sub.Tensor": ("PP",),
    "rsub.Tensor": ("PP",),
    "mul.Tensor": ("P", "PR", "RP"),
    "mul.Scalar": ("P",),
    "div.Tensor": ("P", "PR"),
    "div.Scalar": ("P",),
    "neg.default": ("P",),
    "clone.default": ("P",),
    "positive.default": ("P",),
    "_to_copy.default": ("P",),
    "copy_.default": ("PP",),
    "copy.default": ("PP",),
    "where.self": ("RPP",),
    "masked_fill.Tensor": ("PRP",),
    "addcmul.default": ("PPR", "PRP"),
    "addcdiv.default": ("PPR",),
    "lerp.Scalar": ("PP",),
    "lerp.Tensor": ("PPR",),
    "zero_.default": ("P",),
}
#: Ops that add a number (the named argument) to an operand; for partial sums one rank adds it.
_ADDED_NUMBERS = {
    "add.Tensor": "other",
    "add.Scalar": "other",
    "sub.Tensor": "other",
    "sub.Scalar": "other",
    "rsub.Scalar": "other",
    "masked_fill.Scalar": "value",
}
#: Backward ops that are linear in the first operand, the gradient.
_LINEAR_BACKWARDS = frozenset(
    f"{name}_backward"
    for name in ("threshold", "gelu", "tanh", "sigmoid", "silu", "elu", "hardtanh", "hardsigmoid",
                 "hardswish", "leaky_relu", "softplus", "mish", "hardshrink", "softshrink",
                 "rrelu_with_noise", "mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                 "binary_cross_entropy")
)  # fmt: skip
#: Monotonically increasing ops that are defined from -inf to inf.
_INCREASING = frozenset(
    f"{name}.default"
    for name in ("exp", "relu", "sigmoid", "tanh", "atan", "ceil", "floor", "round", "trunc", "erf",
                 "clone", "_to_copy", "clamp_min", "clamp_max", "hardtanh")
)  # fmt: skip
_EXTREMA = {"maximum.default": PMAX, "minimum.default": PMIN}


def pointwise_strategies(call: Call) -> Sequence[Strategy]:
    """Return one strategy per dim of the result, and the strategies with partial operands."""
    if facts(overload(call.node.op)).random or not call.node.results:
        return ()
    operands, result = call.operands, call.node.results[0]
    if result is None or not operands or len(operands) != len(call.node.refs()):
        return ()
    count = len(call.node.results)
    pointwise_strategies = [
        Strategy(
            tuple(broadcast_placement(meta.shape, result.shape, dim) for meta in operands),
            (S(dim),) * count,
        )
        for dim in shardable_dims(result.shape)
    ]
    return [*pointwise_strategies, *_partial_strategies(call.node, operands, result)]


def _partial_strategies(
    node: Node, operands: list[TensorMeta], result: TensorMeta
) -> list[Strategy]:
    """Return the strategies with partial operands: linear or increasing ops."""
    functional, out_keyword = _functional_form(node.op)
    inputs_without_out = operands[: len(operands) - 1] if out_keyword else operands
    pointwise_strategies: list[Strategy] = []
    for inputs, output in _partial_patterns(node, functional, inputs_without_out, result):
        placements = (*inputs, output) if out_keyword else inputs
        if not node.writes or placements[0] == output or out_keyword:
            pointwise_strategies.append(Strategy(placements, (output,) * len(node.results)))
    if node.op == "aten.copy_.default":  # overwrites the old contents
        pointwise_strategies += [Strategy((partial, R), (R,)) for partial in (P, PMAX)]
    return [*pointwise_strategies, *_with_number(node, functional, operands, result)]


def _with_number(
    node: Node, functional: str, operands: list[TensorMeta], result: TensorMeta
) -> list[Strategy]:
    """Return the strategy that adds a number to partial sums on one rank."""
    name = _ADDED_NUMBERS.get(functional.removeprefix("aten."))
    if name is None or len(node.results) != 1 or len(operands) > 2:
        return []
    number = bound(node)[name]
    marks: list[Replicate | Partial] = [P, *[R] * (len(operands) - 1)]
    if type(number) is Ref or type(node.args[0]) is not Ref:
        return []
    if functional.endswith(".Tensor") and len(operands) != 1:
        return []
    if not _can_be_summed(marks, operands, result):
        return []
    return [Strategy(tuple(marks), (P,)).by(partial(add_number_once, name))]


def add_number_once(name: str, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run the op with a number that is replaced by 0 on all ranks but rank 0.

    Args:
        name: name of the argument with the number.
    """
    number = bound(node)[name]
    if (type(number) is not Param and number == 0) or build.index == 0:
        return build.rerun(node, operands)
    return build.rerun(node, operands, **{name: build.zero_like(number)})


def _partial_patterns(
    node: Node, functional: str, operands: list[TensorMeta], result: TensorMeta
) -> list[tuple[tuple[Placement, ...], Placement]]:
    """Return (placements of operands, placement of result) of the partial strategies."""
    name = functional.removeprefix("aten.")
    patterns = _LINEAR.get(name, ())
    if name.split(".")[0] in _LINEAR_BACKWARDS:
        patterns = ("P" + "R" * (len(operands) - 1),)
    matches: list[tuple[tuple[Placement, ...], Placement]] = []
    for pattern in patterns:
        marks = [P if letter == "P" else R for letter in pattern]
        if len(marks) == len(operands) and _can_be_summed(marks, operands, result):
            matches.append((tuple(marks), P))
    if name in _INCREASING and len(operands) == 1 and _widens(operands[0].dtype, result.dtype):
        matches += [((PMAX,), PMAX), ((PMIN,), PMIN)]
    if name in _EXTREMA:
        matches.append(((_EXTREMA[name],) * 2, _EXTREMA[name]))
    return matches


def _can_be_summed(
    marks: list[Replicate | Partial], operands: list[TensorMeta], result: TensorMeta
) -> bool:
    """Return whether summing partial operands loses no precision against the result's dtype."""
    partial_dtypes = [meta.dtype for mark, meta in zip(marks, operands, strict=True) if mark == P]
    return all(_widens(dtype, result.dtype) and dtype != torch.bool for dtype in partial_dtypes)


def _widens(dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Return whether ``dtype`` promotes to ``wider``."""
    return torch.promote_types(dtype, wider) == wider


@lru_cache(maxsize=4096)
def _functional_form(op: str) -> tuple[str, str]:
    """Return the functional overload of an op, and the keyword that an ``out=`` overload writes."""
    try:
        return pure_form(op)
    except KeyError:
        return op, ""


@lru_cache(maxsize=4096)
def is_pointwise(op: str) -> bool:
    """Return whether torch tags an op, or its functional form, as pointwise.

    False for ops on lists (``horizontal``) and for random ops.
    """
    if op.startswith("lazygt.") or "_foreach" in op or "@" in op:
        return False
    f, pure = facts(overload(op)), facts(overload(_functional_form(op)[0]))
    return (f.pointwise or pure.pointwise) and not (f.random or f.dynamic)


#: Pointwise ops without torch's pointwise tag.
_UNTAGGED = (
    "copy_.default copy.default _to_copy.default clone.default zero_.default fill.Scalar "
    "fill.Tensor fill_.Scalar fill_.Tensor masked_fill.Scalar masked_fill_.Scalar "
    "masked_fill.Tensor masked_fill_.Tensor where.self addcmul_.default addcdiv_.default "
    "_prelu_kernel.default _prelu_kernel_backward.default complex.default polar.default "
    "elu_backward.default hardshrink_backward.default hardsigmoid_backward.default "
    "hardtanh_backward.default hardswish.default hardswish_.default hardswish_backward.default "
    "leaky_relu_backward.default softplus_backward.default softshrink_backward.default "
    "rrelu_with_noise_backward.default rsub.Tensor floor_divide.default floor_divide_.Tensor "
    "isin.Tensor_Scalar"
)
#: Losses, which are pointwise if unreduced.
_LOSSES = (
    "mse_loss.default mse_loss_backward.default smooth_l1_loss.default "
    "smooth_l1_loss_backward.default huber_loss.default huber_loss_backward.default "
    "soft_margin_loss.default soft_margin_loss_backward.default binary_cross_entropy.default "
    "binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default"
)


def _unreduced(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a loss: pointwise if unreduced, else none."""
    return () if call["reduction"] else pointwise_strategies(call)


# -- horizontal (``_foreach``) ops and fused optimizer steps: strategies, and the split pass -------
# A strategy gives all tensors of a list the same placement if possible; the other tensors are R.
# ``SplitForeach`` splits a node into one node per tensor, with independent placements.

#: Fused optimizer steps on lists of parameters.
FUSED_STEPS = frozenset(
    f"aten._fused_{name}.{which}"
    for name in ("adam_", "adamw_", "sgd_", "adagrad_")
    for which in ("default", "tensor_lr")
)
#: Horizontal ops to split: those that are merged again later, and those that gain nothing.
FORMS = SPLIT | {
    form.wide: form
    for form in (
        ForeachForm("aten._foreach_maximum_.List", "aten.clamp_min_.Tensor", (EACH, EACH)),
        ForeachForm("aten._foreach_minimum_.List", "aten.clamp_max_.Tensor", (EACH, EACH)),
        ForeachForm("aten._foreach_clamp_min_.Scalar", "aten.clamp_min_.default", (EACH, ALL)),
        ForeachForm("aten._foreach_clamp_max_.Scalar", "aten.clamp_max_.default", (EACH, ALL)),
    )
}


def singles(node: Node) -> list[Node]:
    """Return the single-tensor nodes that are equivalent to a horizontal op of ``FORMS``."""
    form, nodes = FORMS[node.op], []
    for number in range(len(node.args[0])):
        args, kwargs = form.narrow(node.args, number)
        item = slice(number, number + 1)
        single = form.single, args, (*kwargs, *node.kwargs)
        nodes.append(Node(*single, node.fresh[item], node.writes[item], node.written[item]))
    return nodes


def are_independent(node: Node) -> bool:
    """Return whether the single-tensor nodes of a horizontal op are independent.

    No node may read or write a value that another node writes.
    """
    for single in singles(node):
        others = list(node.writes)
        for value in single.writes:
            others.remove(value)
        if not set(others).isdisjoint((*single.refs(), *single.writes)):
            return False
    return True


def _horizontal(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a horizontal op: one per placement that some tensor can have."""
    if not are_independent(call.node):
        return []
    rule = reductions.RULES.get(FORMS[call.node.op].single, pointwise_strategies)
    options: list[dict[Placement, Strategy]] = []
    for single in singles(call.node):
        replicated = Strategy((R,) * len(single.refs()), (R,) * len(single.results))
        strategies = [replicated, *rule(Call(single, call.metas, call.axis_size))]
        options.append({strategy.inputs[0]: strategy for strategy in reversed(strategies)})
    placements = dict.fromkeys(
        placement for strategies in options for placement in strategies if placement != R
    )
    combined = (
        _combined(call.node, [strategies.get(placement, strategies[R]) for strategies in options])
        for placement in placements
    )
    return [strategy for strategy in combined if strategy is not None]


def _combined(node: Node, strategies: list[Strategy]) -> Strategy | None:
    """Combine one strategy per tensor; None: an operand of all tensors would not be R."""
    inputs: list[Placement] = []
    operand = 0
    for kind, arg in zip(FORMS[node.op].arg_kinds, node.args, strict=False):
        if not numbers(arg):
            continue
        placements = [strategy.inputs[operand] for strategy in strategies]
        if kind != EACH and set(placements) != {R}:
            return None
        inputs += placements if kind == EACH else placements[:1]
        operand += 1
    comm = [collective for strategy in strategies for collective in strategy.comm]
    outputs = tuple(placement for strategy in strategies for placement in strategy.outputs)
    return Strategy(tuple(inputs), outputs, partial(_lower_singles, strategies), tuple(comm))


def _lower_singles(
    strategies: Sequence[Strategy], build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run each single-tensor node by its strategy."""
    local = dict(zip(_positions(node), operands, strict=True))
    results: list[Ref | None] = []
    for number, (single, strategy) in enumerate(zip(singles(node), strategies, strict=True)):
        values = [local[arg, number] if (arg, number) in local else local[arg, -1]
                  for arg in _tensor_arguments(node)]  # fmt: skip
        results += lower_strategy(build, strategy, single, values)
    return results


def _tensor_arguments(node: Node) -> list[int]:
    """Return the numbers of the arguments with tensors."""
    return [number for number, arg in enumerate(node.args) if numbers(arg)]


def _positions(node: Node) -> list[tuple[int, int]]:
    """Return (argument number, index in its list) of each of ``node.refs()``; -1: no list."""
    positions = []
    for argument in _tensor_arguments(node):
        arg = node.args[argument]
        positions += [(argument, number) for number in range(len(arg))] if type(arg) is tuple else [
            (argument, -1)
        ]  # fmt: skip
    return positions


def _fused(call: Call) -> Sequence[Strategy]:
    """Return the strategies that shard parameters, gradients and optimizer states alike.

    Step counts and learning rates are replicated.
    """
    lists = {
        name: [meta for n in refs if (meta := call.metas[n]) is not None]
        for name, arg in call.args.items()
        if type(arg) is tuple and (refs := numbers(arg))
    }
    shapes = [meta.shape for meta in lists["self"]]
    rank = max(map(len, shapes), default=0)
    strategies = []
    for dim in range(rank):
        placements = {name: _aligned(metas, shapes, dim) for name, metas in lists.items()}
        if S(dim) in placements["self"]:
            written = [_placement_of(call, placements, value) for value in call.node.writes]
            strategies.append(call.strategy(written, **placements))
    return strategies


def _aligned(metas: list[TensorMeta], shapes: list[tuple[int, ...]], dim: int) -> list[Placement]:
    """Return S(dim) for each tensor with the shape of its parameter and a shardable dim, else R."""
    return [
        Shard(dim) if meta.shape == shape and dim < len(shape) and shape[dim] > 1 else R
        for meta, shape in zip(metas, shapes, strict=True)
    ]


def _placement_of(call: Call, placements: dict[str, list[Placement]], value: int) -> Placement:
    """Return the placement of an operand value of the call."""
    for name, arg_placements in placements.items():
        refs = numbers(call.args[name])
        if value in refs:
            return arg_placements[refs.index(value)]
    return R


class SplitForeach:
    """Pass that splits the ops of ``FORMS`` and fused optimizer steps into one op per tensor."""

    name = "split_foreach"

    def run(self, graph: Graph) -> Graph:
        split_nodes = [single for placed_node in rows_of(graph) for single in _split(placed_node)]
        return graph if len(split_nodes) == len(graph.nodes) else rebuild(graph, split_nodes)


def _split(placed_node: NodeRow) -> Sequence[NodeRow]:
    """Split one node into single-tensor nodes; others are returned as they are."""
    node = placed_node.node
    if node.op in FORMS:
        if not are_independent(node):
            return [placed_node]
        pairs = zip(singles(node), placed_node.results, strict=True)
        return [NodeRow(single, (result,), placed_node.source) for single, result in pairs]
    if node.op in FUSED_STEPS and len(node.args[0]) > 1 and not node.dynamic:
        return [_single_step(placed_node, number) for number in range(len(node.args[0]))]
    return [placed_node]


def _single_step(placed_node: NodeRow, parameter: int) -> NodeRow:
    """Return the fused step on one parameter alone."""
    node = placed_node.node
    args = tuple([_item_of(arg, parameter) for arg in node.args])
    selected = {item for arg in args if type(arg) is tuple for item in arg}
    written_numbers = [
        written_number for written_number, value in enumerate(node.writes) if Ref(value) in selected
    ]
    writes = tuple([node.writes[number] for number in written_numbers])
    written = tuple([node.written[number] for number in written_numbers])
    single = Node(node.op, args, node.kwargs, writes=writes, written=written)
    results = [placed_node.results[number] for number in written_numbers]
    return NodeRow(single, results, placed_node.source)


def _item_of(arg: Arg, number: int) -> Arg:
    """Slice a list argument to the item of parameter ``number``; empty lists stay empty."""
    return arg[number : number + 1] if type(arg) is tuple else arg


RULES: dict[str, Rule] = {
    **dict.fromkeys(FORMS, _horizontal),
    **dict.fromkeys(FUSED_STEPS, _fused),
    **table(_UNTAGGED, pointwise_strategies),
    **table(_LOSSES, _unreduced),
}
