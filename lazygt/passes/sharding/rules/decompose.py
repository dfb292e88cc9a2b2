"""Decomposition of an op into simpler ops, traced on meta tensors.

A sample value stands for a run-time number (``Param``). Python arithmetic on such a number becomes
a 0-d tensor. A decomposition that depends on the number's value, as in a comparison, is rejected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from math import prod
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref, map_arg, params_in, ref
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, overload, undispatched
from lazygt.passes.cse import DeadCode
from lazygt.passes.sharding.lower.builder import Builder, schema

# -- decompositions that torch lacks, or that need fewer collectives than torch's ------------------

Tensor = torch.Tensor
Formula = Callable[..., Any]
_NONE, _MEAN = 0, 1


def _loss(op: str) -> Formula:
    """Return the decomposition of a loss: unreduced by the op itself, then its mean or sum."""

    def formula(*args: Any) -> Tensor:
        arguments = _arguments_by_name(op, args)
        unreduced: Tensor = overload(op)(**{**arguments, "reduction": _NONE})
        return unreduced.mean() if arguments["reduction"] == _MEAN else unreduced.sum()

    return formula


def _loss_backward(op: str) -> Formula:
    """Return the decomposition of a loss' backward into the unreduced backward.

    For a mean the gradient is first divided by the number of elements.
    """

    def formula(*args: Any) -> Tensor:
        arguments = _arguments_by_name(op, args)
        gradient, value, target = arguments["grad_output"], arguments["self"], arguments["target"]
        if arguments["reduction"] == _MEAN:
            gradient = gradient / prod(torch.broadcast_shapes(value.shape, target.shape))
        input_gradient: Tensor = overload(op)(
            **{**arguments, "grad_output": gradient, "reduction": _NONE}
        )
        return input_gradient

    return formula


def _arguments_by_name(op: str, args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a loss by name.

    Raises:
        ValueError: the loss is unreduced, and the pointwise rule applies.
    """
    parameters = schema(op)
    values = {name: default for name, _, default in parameters}
    values.update(zip(values, args, strict=False))
    if values["reduction"] == _NONE:
        raise ValueError("nothing is reduced")
    return values


def _variance_and_mean(
    value: Tensor, dim: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean in two passes: the mean, then the squared deviations from it.

    A program that also computes the mean contains the same op, and common subexpression elimination
    shares the all-reduce.
    """
    if value.is_complex():
        raise ValueError("no decomposition of the variance of complex numbers")
    dims = [d % value.dim() for d in dim] if dim else list(range(value.dim()))
    count = prod(value.shape[d] for d in dims)
    mean = value.mean(dims, keepdim=keepdim)
    deviation = value - (mean if keepdim else _unsqueeze_dims(mean, dims))
    squares = (deviation * deviation).sum(dims, keepdim=keepdim)
    degrees_of_freedom: Any = count - (1 if correction is None else correction)
    divisor = (
        degrees_of_freedom.clamp_min(0)
        if isinstance(degrees_of_freedom, Tensor)
        else max(degrees_of_freedom, 0)
    )
    return squares / divisor, mean


def _unsqueeze_dims(value: Tensor, dims: Sequence[int]) -> Tensor:
    """Insert dims of size 1 at ``dims``."""
    for dim in sorted(dims):
        value = value.unsqueeze(dim)
    return value


def _moments(with_mean: bool, root: bool) -> Formula:
    """Return the decomposition of var, std, var_mean or std_mean."""

    def formula(
        value: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        variance, mean = _variance_and_mean(value, dim, correction, keepdim)
        spread = variance.sqrt() if root else variance
        return (spread, mean) if with_mean else spread

    return formula


def _safe_softmax(value: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a softmax that is 0 where every element along ``dim`` is -inf.

    These positions follow from the maximum, which the softmax all-reduces anyway.
    """
    value = value if dtype is None else value.to(dtype)
    maximum = value.amax(dim, keepdim=True)
    exponentials = (value - maximum).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).masked_fill(
        maximum == float("-inf"), 0
    )


def _logsumexp(value: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Compute logsumexp by the maximum and the sum that a log_softmax of the value also computes.

    Common subexpression elimination then shares their all-reduces.
    """
    if not value.is_floating_point() or not value.dim():
        raise ValueError("no decomposition of 0-d or integer tensors")
    dims = [d % value.dim() for d in dim]
    maximum = value.amax(dims, keepdim=True)
    total = (value - maximum).exp().sum(dims, keepdim=True).log() + maximum
    total = torch.where(maximum.abs() == float("inf"), maximum, total)
    return total if keepdim else total.squeeze(dims)


def _multi_margin(
    value: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Compute multi_margin_loss as the kernel does: a NaN distance adds nothing.

    In torch's decomposition a NaN distance makes the loss NaN.
    """
    value, target = torch.atleast_2d(value), torch.atleast_1d(target).unsqueeze(1)
    distance = margin - value.gather(1, target) + value
    other = torch.arange(value.shape[1], device=value.device) != target
    loss = distance if p == 1 else distance * distance
    loss = loss if weight is None else loss * weight[target]
    loss = torch.where(other & (distance > 0), loss, 0)
    if reduction == _NONE:
        return loss.mean(1)
    return loss.mean() if reduction == _MEAN else loss.sum() / value.shape[1]


def _nll_backward(
    gradient: Tensor,
    value: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Compute the nll_loss gradient pointwise over the classes, so that they can be sharded."""
    dim = 0 if value.dim() == 1 else 1
    class_shape = [-1 if d == dim else 1 for d in range(value.dim())]
    target_classes = target.unsqueeze(dim)
    classes = torch.arange(value.shape[dim], device=value.device).view(class_shape)
    target_gradient = gradient.unsqueeze(dim) if reduction == _NONE else gradient
    if reduction == _MEAN:
        target_gradient = target_gradient / total_weight
    target_gradient = (
        -target_gradient if weight is None else -target_gradient * weight.view(class_shape)
    )
    is_target = (classes == target_classes) & (target_classes != ignore_index)
    return torch.where(is_target, target_gradient, torch.zeros_like(value))


def _convert_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Decompose ``prims.convert_element_type`` into a cast."""
    return value.to(dtype)


_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")
FORMULAS: dict[str, Formula] = {
    **{op: _loss(op) for op in (
        *(f"aten.{name}.default" for name in _LOSSES),
        "aten.binary_cross_entropy_with_logits.default")},
    **{op: _loss_backward(op) for op in (f"aten.{name}_backward.default" for name in _LOSSES)},
    "aten.var.correction": _moments(with_mean=False, root=False),
    "aten.std.correction": _moments(with_mean=False, root=True),
    "aten.var_mean.correction": _moments(with_mean=True, root=False),
    "aten.std_mean.correction": _moments(with_mean=True, root=True),
    "aten._safe_softmax.default": _safe_softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten.multi_margin_loss.default": _multi_margin,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
    "prims.convert_element_type.default": _convert_dtype,
}  # fmt: skip


# -- traced decompositions -------------------------------------------------------------------------

#: Two samples of the first run-time number; no decomposition contains them as constants.
_SAMPLES = (0.618033988749, 0.414213562373)
_STEP = 0.00731
#: Ops with a torch decomposition that differs from the kernel (torch 2.13).
_INEXACT = frozenset(
    {
        "aten.linspace.default",  # other rounding than the kernel
        "aten.linspace.out",
        "aten.logspace.default",
        "aten.logspace.out",
        # counts class 0 as a target if the targets of a sample end with -1
        "aten.multilabel_margin_loss_forward.default",
    }
)
#: Identity ops, which matter to autograd only.
_ALIASES = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})
#: Arguments that concern a tensor's memory, not its contents.
_MEMORY_ARGUMENTS = frozenset({"layout", "pin_memory", "non_blocking"})


class _Refused(Exception):
    """Decomposition that depends on run-time values, or has effects that a graph cannot express."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Graph of the inner ops that replace an op."""

    operands: int  # number of operands of the op; a tensor that is passed twice counts twice
    nodes: tuple[Node, ...]  # inner nodes on numbered values; the first values are the operands
    metas: tuple[TensorMeta | None, ...]  # meta of every value
    #: value number of each result of the op; None: the result is undefined
    outputs: tuple[int | None, ...]

    def read(self) -> set[int]:
        """Return the numbers of the values that are used by a node or are results."""
        values = {value for node in self.nodes for value in node.refs()}
        return values | {value for value in self.outputs if value is not None}

    def numbered(self) -> Iterator[tuple[Node, range]]:
        """Yield each node with the value numbers of its results."""
        start = self.operands
        for node in self.nodes:
            stop = start + len(node.results)
            yield node, range(start, stop)
            start = stop


def alone(node: Node) -> Node:
    """Return the node as a graph of its own, with values and run-time numbers renumbered from 0.

    A value that is passed several times gets a separate number for each occurrence.
    """
    values: list[int] = []
    params: list[int] = []

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            values.append(arg.index)
            return ref(len(values) - 1)
        if type(arg) is Param:
            params.append(arg.index)
            return Param(len(params) - 1)
        return arg

    args = map_arg(node.args, leaf)
    kwargs = tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])
    writes = tuple([values.index(value) for value in node.writes])
    return Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)


def params_of(node: Node) -> list[Param]:
    """Return the run-time numbers among a node's arguments, in order."""
    return list(map(Param, params_in((node.args, tuple([arg for _, arg in node.kwargs])))))


@cache
def is_composite(op: str) -> bool:
    """Return whether an op has a decomposition; False for random ops, dynamic ops and views."""
    if op.startswith("lazygt.") or "@" in op:
        return False
    f = facts(overload(op))
    return not (f.random or f.dynamic or f.views) and _decomposition_function(op) is not None


@lru_cache(maxsize=4096)
def decomposition(node: Node, operands: tuple[TensorMeta, ...]) -> Decomposition | None:
    """Return the decomposition of a node; None if it has none for these arguments.

    Args:
        node: renumbered by ``alone``.
        operands: the meta of each of its values.
    """
    if not is_composite(node.op) or any(meta.conj or meta.neg for meta in operands):
        return None
    try:
        traced = _trace(node, operands, _SAMPLES[0])
        if params_of(node):
            retraced = _trace(node, operands, _SAMPLES[1])
            return traced if retraced == traced else None
    except Exception:  # noqa: BLE001  torch's own: there is no decomposition for such arguments
        return None
    return traced


def _decomposition_function(op: str) -> Callable[..., Any] | None:
    """Return the decomposition function of an op: from ``FORMULAS``, else torch's own."""
    formula: Callable[..., Any] | None = FORMULAS.get(op)
    if formula is None and op not in _INEXACT:
        formula = decomposition_table.get(overload(op))
    return formula


def _trace(node: Node, operands: Sequence[TensorMeta], sample: float) -> Decomposition:
    """Trace the decomposition of a node on meta tensors.

    Args:
        sample: value of the first run-time number.
    """
    samples = [sample + _STEP * n for n in range(len(params_of(node)))]
    build = Builder(operands, ["float"] * len(samples), axis="", parts=1, index=0)
    tensors = [meta.empty("meta") for meta in operands]
    recorder = _Note(build, tensors, samples)

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return tensors[arg.index]
        if type(arg) is Param:
            return _Number(samples[arg.index])
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return torch.device("meta") if arg is DEVICE else arg

    function = _decomposition_function(node.op)
    assert function is not None
    args, kwargs = [leaf(arg) for arg in node.args], {name: leaf(arg) for name, arg in node.kwargs}
    with undispatched(), torch.no_grad(), recorder:
        returned = _flattened(function(*args, **kwargs))[: len(node.fresh)]
        new_outputs = [_as_expected(t, meta) for t, meta in zip(returned, node.fresh, strict=True)]
    if any(recorder.at[id(t)] != ref(n) for n, t in enumerate(tensors) if n not in node.writes):
        raise _Refused(f"{node.op}: its decomposition writes an operand that the op does not write")
    results = [*new_outputs, *(tensors[value_number] for value_number in node.writes)]
    outputs = [None if t is None else recorder.at[id(t)].index for t in results]
    _check(node, [None if number is None else build.metas[number] for number in outputs])
    return _without_dead_code(build, outputs)


def _without_dead_code(build: Builder, outputs: Sequence[int | None]) -> Decomposition:
    """Return the decomposition without the nodes that no result needs."""
    defined = [number for number in outputs if number is not None]
    graph = DeadCode().run(build.graph(list(map(ref, defined))))
    renumbering = dict(zip(defined, graph.outputs, strict=True))
    renumbered = [None if number is None else renumbering[number] for number in outputs]
    return Decomposition(len(graph.inputs), graph.nodes, graph.values, tuple(renumbered))


def _check(node: Node, results: Sequence[TensorMeta | None]) -> None:
    """Raise ``_Refused`` unless the results have the shapes and dtypes of the op's results."""
    for meta, expected in zip(results, node.results, strict=True):
        if (meta and (meta.shape, meta.dtype)) != (expected and (expected.shape, expected.dtype)):
            raise _Refused(f"{node.op}: its decomposition gives {meta} instead of {expected}")


def _as_expected(t: torch.Tensor | None, meta: TensorMeta | None) -> torch.Tensor | None:
    """Cast a result to the op's dtype; an empty result also gets the op's shape."""
    if t is None or meta is None:
        return None
    if meta.numel == 0 and t.shape != meta.shape:
        return torch.zeros(meta.shape, dtype=meta.dtype, device="meta")
    return t if t.dtype == meta.dtype else t.to(meta.dtype)


def _flattened(returned: Any) -> list[torch.Tensor | None]:
    """Flatten nested lists and tuples of tensors."""
    if isinstance(returned, (list, tuple)):
        return [t for item in returned for t in _flattened(item)]
    return [returned]


class _Number(float):
    """Sample of a run-time number.

    Python arithmetic returns a 0-d tensor, comparison and conversion raise ``_Refused``. torch's
    ops accept the sample as a float.
    """

    __slots__ = ()

    def _tensor(self) -> torch.Tensor:
        """Return the number as a 0-d tensor."""
        return torch.full((), float(self), dtype=torch.float64, device="meta")

    def _refuse(self, *others: object) -> Any:
        """Raise ``_Refused``: the result would depend on the number's value."""
        raise _Refused("a decomposition depends on a run-time number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = _refuse
    __hash__ = float.__hash__


def _arithmetic_method(calculate: Callable[[Any, Any], Any], reflected: bool) -> Callable[..., Any]:
    """Return a ``_Number`` method that calculates on a 0-d tensor of the number."""

    def method(self: _Number, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented  # torch's ops accept the number
        return calculate(other, self._tensor()) if reflected else calculate(self._tensor(), other)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _mark in ("", "r"):
        _method = _arithmetic_method(getattr(operator, _name), reflected=bool(_mark))
        setattr(_Number, f"__{_mark}{_name}__", _method)


class _Note(TorchDispatchMode):
    """Dispatch mode that records ops on meta tensors as nodes of a graph.

    Attributes:
        at: id of a tensor -> reference of its value in the graph.
    """

    def __init__(
        self, build: Builder, tensors: Sequence[torch.Tensor], samples: Sequence[float]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._build = build
        self._samples = {sample: Param(number) for number, sample in enumerate(samples)}
        self.at = {id(t): ref(number) for number, t in enumerate(tensors)}
        self._tensors = list(tensors)  # keeps the ids unique
        #: ids of tensors that share memory with others
        self._aliased: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, so dynamo needs no notification per op."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, op = kwargs or {}, str(func)
        if op.startswith("prims."):
            with self:
                return FORMULAS.get(op, func.impl_aten)(*args, **kwargs)
        if op in _ALIASES:
            return self._tensor(self.at[id(args[0])])
        return self._record(facts(func), args, kwargs)

    def _record(self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op as a node; return its results as meta tensors."""
        written = [args[position] for position in f.writes] + [
            kwargs[name] for name in f.writes_named
        ]
        if (
            f.random
            or f.dynamic
            or f.name in UNDECLARED_WRITES
            or not self._share_no_memory(written)
        ):
            raise _Refused(f"a decomposition runs {f.name}")
        named = [
            (name, self._arg(arg)) for name, arg in kwargs.items() if name not in _MEMORY_ARGUMENTS
        ]
        refs = iter(self._build.node(f.name, tuple(map(self._arg, args)), tuple(named)))
        tensors = [t for arg in (*args, *kwargs.values()) for t in _flattened(arg)]
        count = len(self._build.nodes[-1].fresh)
        new_outputs = [None if at is None else self._tensor(at) for at in islice(refs, count)]
        for t, at in zip(written, refs, strict=True):
            assert at is not None
            self.at[id(t)] = at
        if f.aliases:
            self._aliased.update(map(id, (*tensors, *new_outputs)))
        return _returned(f, new_outputs, written)

    def _share_no_memory(self, written: Sequence[Any]) -> bool:
        """Return whether the written tensors share no memory with other tensors."""
        return all(isinstance(t, torch.Tensor) and id(t) not in self._aliased for t in written)

    def _tensor(self, at: Ref) -> torch.Tensor:
        """Create the meta tensor of a value, and register the tensor's id."""
        tensor = self._build.meta(at).empty("meta")
        self._tensors.append(tensor)
        self.at[id(tensor)] = at
        return tensor

    def _arg(self, arg: Any) -> Arg:
        """Convert an argument of an op to an argument of a node."""
        if isinstance(arg, torch.Tensor):
            return self.at[id(arg)]
        if isinstance(arg, (list, tuple)):
            return tuple(map(self._arg, arg))
        if isinstance(arg, float):
            return self._samples.get(float(arg), arg)
        return DEVICE if isinstance(arg, torch.device) else arg


def _returned(
    f: OpFacts, new_outputs: Sequence[torch.Tensor | None], written: Sequence[Any]
) -> Any:
    """Return results in the structure of the op's schema: a list, a tuple or one tensor."""
    if f.outputs in (("fl",), ("vl",)):
        return list(new_outputs)
    next_new, next_written = iter(new_outputs), iter(written)
    results = tuple(next(next_new if letter in "fv" else next_written) for letter in f.outputs)
    return results[0] if len(results) == 1 else results
