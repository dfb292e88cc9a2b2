"""The members of a fused node as a module that torch.export can trace.

A graph's meaning is pure: a member that writes in place computes a new version of its operand. So
each is lowered to its functional op, and the operands that a fused node writes are overwritten
once, at the end. A run-time number is an operand too: a 0-dim float64 tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lazygt.graph.fusion import numbers_of, pure_form
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref
from lazygt.graph.ops import overload

aten = torch.ops.aten


class Members(torch.nn.Module):
    """A fused node's body. ``forward`` takes its operands, then its numbers.

    Args:
        body: the members.
        writes: pairs (operand, output of the body): the operand is overwritten with it.
        fresh: how many of the body's outputs, from the first, are returned.
    """

    def __init__(self, body: Graph, writes: tuple[tuple[int, int], ...], fresh: int) -> None:
        super().__init__()
        self.body, self.writes, self.fresh = body, writes, fresh

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """The fresh outputs."""
        count = len(self.body.inputs)
        values = dict(enumerate(operands[:count]))
        for node, results in self.body.numbered():
            values[results[0]] = _member(node, values, operands[count:])
        for operand, output in self.writes:
            operands[operand].copy_(values[self.body.outputs[output]])
        return tuple(values[value] for value in self.body.outputs[: self.fresh])


def _member(node: Node, values: dict[int, Tensor], numbers: tuple[Tensor, ...]) -> Tensor:
    op, dropped = pure_form(node.op)
    dtype = next(values[value].dtype for value in node.refs())

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return values[arg.index]
        if type(arg) is Param:
            return numbers[arg.index].to(dtype)  # as torch does with a Python number
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return values[node.refs()[0]].device if arg is DEVICE else arg

    args = [leaf(arg) for arg in node.args]
    kwargs = {name: leaf(arg) for name, arg in node.kwargs if name != dropped}
    if node.op == "aten.copy_.default":
        return torch.empty_like(args[0]).copy_(args[1])
    by_tensor = _BY_TENSOR.get(op) if numbers_of(node) else None
    result: Tensor = (by_tensor or overload(op))(*args, **kwargs)
    made = node.results[0]
    assert made is not None
    return result if result.dtype == made.dtype else result.to(made.dtype)


def _add(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.add(a, b * alpha)


def _sub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(a, b * alpha)


def _rsub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return torch.sub(b, a * alpha)


def _addcmul(a: Any, b: Any, c: Any, value: Any = 1) -> Any:
    return a + value * b * c


def _addcdiv(a: Any, b: Any, c: Any, value: Any = 1) -> Any:
    return a + value * b / c


#: Ops that take a number, as they are with a tensor of one element in its stead.
_BY_TENSOR: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": _add,
    "aten.sub.Tensor": _sub,
    "aten.mul.Tensor": torch.mul,
    "aten.div.Tensor": torch.div,
    "aten.rsub.Scalar": _rsub,
    "aten.addcmul.default": _addcmul,
    "aten.addcdiv.default": _addcdiv,
    "aten.lerp.Scalar": torch.lerp,
    "aten.gt.Scalar": torch.gt,
    "aten.ge.Scalar": torch.ge,
    "aten.lt.Scalar": torch.lt,
    "aten.le.Scalar": torch.le,
}
