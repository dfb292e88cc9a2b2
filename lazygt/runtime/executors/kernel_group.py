"""Fused nodes as input of the compiler, and the keys of their artifacts.

An artifact serves every fused node of the same structure. A group of pointwise ops on tensors of
one shape is compiled for vectors of any length; other groups are compiled for their sizes, with
dynamic dims where sizes were seen to vary. Of a horizontally fused group, a few per-tensor slices
(lanes) are compiled together, for vectors of any lengths.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lazygt.graph.flags import Flags
from lazygt.graph.fusion import is_pointwise, numbers_of, pure_form
from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref
from lazygt.graph.ops import overload
from lazygt.graph.per_tensor import LANES, Lanes, join_slices, lanes_of
from lazygt.host.gpus import host_gpus

# -- decompositions of ops with numbers ------------------------------------------------------------
# Each function takes one-element tensors instead of numbers, so that compiled code serves all
# numbers: they are operands.

_Optional = Tensor | None


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


def _threshold_backward(grad: Tensor, of: Tensor, threshold: Any) -> Tensor:
    return torch.where(of <= threshold, torch.zeros_like(grad), grad)


def _var(x: Tensor, dims: Sequence[int] | None = None, *, correction: Any, keepdim: bool = False
         ) -> Tensor:  # fmt: skip
    # the correction is a tensor, which ``torch.var`` does not take
    dims = list(dims or range(x.dim()))
    biased = torch.var(x, dims, correction=0, keepdim=keepdim)
    count = x.numel() / max(biased.numel(), 1)
    return torch.mul(biased, count / (count - correction).clamp(min=0))


def _std(x: Tensor, dims: Sequence[int] | None = None, *, correction: Any, keepdim: bool = False
         ) -> Tensor:  # fmt: skip
    return _var(x, dims, correction=correction, keepdim=keepdim).sqrt()


# -- normalizations ------------------------------------------------------------------------------


def _normalized(x: Tensor, dims: list[int], eps: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x normalized, its mean, its variance and the inverse of its deviation; keep dims."""
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    return (x - mean) * rstd, mean, var, rstd


def _affine(x: Tensor, weight: _Optional, bias: _Optional) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: _Optional, bias: _Optional, eps: Any
) -> tuple[Tensor, ...]:
    normal, mean, _, rstd = _normalized(x, list(range(x.dim() - len(shape), x.dim())), eps)
    return _affine(normal, weight, bias), mean, rstd


def _group_norm(
    x: Tensor, weight: _Optional, bias: _Optional, n: int, c: int, rest: int, groups: int, eps: Any
) -> tuple[Tensor, ...]:
    normal, mean, _, rstd = _normalized(x.reshape(n, groups, -1), [2], eps)
    normal = normal.reshape(x.shape)
    columns = [None if each is None else _by_channel(each, x) for each in (weight, bias)]
    return _affine(normal, *columns), mean.reshape(n, groups), rstd.reshape(n, groups)


def _batch_norm(
    x: Tensor,
    weight: _Optional,
    bias: _Optional,
    running_mean: _Optional,
    running_var: _Optional,
    training: bool,
    momentum: Any,
    eps: Any,
) -> tuple[Tensor, ...]:
    columns = [None if each is None else _by_channel(each, x) for each in (weight, bias)]
    if not training:
        assert running_mean is not None
        assert running_var is not None
        rstd = torch.rsqrt(running_var + eps)
        normal = (x - _by_channel(running_mean, x)) * _by_channel(rstd, x)
        return _affine(normal, *columns), x.new_empty(0), x.new_empty(0)
    dims = [0, *range(2, x.dim())]
    normal, mean, var, rstd = _normalized(x, dims, eps)
    mean, var, rstd = mean.reshape(-1), var.reshape(-1), rstd.reshape(-1)
    results = [_affine(normal, *columns), mean, rstd]
    if running_mean is not None and running_var is not None:
        count = x.numel() / x.shape[1]
        results.append(momentum * mean + (1 - momentum) * running_mean)
        results.append(momentum * var * (count / (count - 1)) + (1 - momentum) * running_var)
    return tuple(results)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: _Optional,
    running_mean: _Optional,
    running_var: _Optional,
    mean: _Optional,
    rstd: _Optional,
    training: bool,
    eps: Any,
    mask: Sequence[bool],
) -> tuple[_Optional, ...]:
    if not training:
        assert running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    assert mean is not None
    assert rstd is not None
    dims, count = [0, *range(2, x.dim())], x.numel() / x.shape[1]
    normal = (x - _by_channel(mean, x)) * _by_channel(rstd, x)
    bias_grad, weight_grad = grad.sum(dims), (grad * normal).sum(dims)
    inner = grad
    if training:
        inner = grad - _by_channel(bias_grad / count, x) - normal * _by_channel(
            weight_grad / count, x
        )  # fmt: skip
    scale = rstd if weight is None else rstd * weight
    grads = (inner * _by_channel(scale, x), weight_grad, bias_grad)
    return tuple(one if wanted else None for one, wanted in zip(grads, mask, strict=True))


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return one value per channel, in a shape that broadcasts to ``x``."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


#: Ops with writes that their schemas hide; the functions in ``BY_TENSOR`` return new versions.
HIDDEN_WRITES = frozenset({"aten.native_batch_norm.default"})

#: Op -> its decomposition, with one-element tensors for its numbers.
BY_TENSOR: dict[str, Callable[..., Any]] = {
    "aten.add.Tensor": _add,
    "aten.sub.Tensor": _sub,
    "aten.mul.Tensor": torch.mul,
    "aten.div.Tensor": torch.div,
    "aten.rsub.Scalar": _rsub,
    "aten.add.Scalar": _add,
    "aten.sub.Scalar": _sub,
    "aten.mul.Scalar": torch.mul,
    "aten.div.Scalar": torch.div,
    "aten.addcmul.default": _addcmul,
    "aten.addcdiv.default": _addcdiv,
    "aten.lerp.Scalar": torch.lerp,
    "aten.masked_fill.Scalar": torch.masked_fill,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.eq.Scalar": torch.eq,
    "aten.ne.Scalar": torch.ne,
    "aten.gt.Scalar": torch.gt,
    "aten.ge.Scalar": torch.ge,
    "aten.lt.Scalar": torch.lt,
    "aten.le.Scalar": torch.le,
    "aten.var.correction": _var,
    "aten.std.correction": _std,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
}


# -- group -----------------------------------------------------------------------------------------

aten = torch.ops.aten

#: Name of the line of a processor's features in /proc/cpuinfo: on x86, on ARM.
_INSTRUCTIONS = ("flags", "Features")


class Members(torch.nn.Module):
    """A fused node's body. ``forward`` takes its operands, then its numbers, see ``packed``.

    Args:
        body: the members: the nodes that were fused.
        writes: pairs (operand, output of the body): the operand is overwritten with it.
        fresh: number of new outputs: the first outputs of the body, which are returned.
    """

    def __init__(self, body: Graph, writes: tuple[tuple[int, int], ...], fresh: int) -> None:
        super().__init__()
        self.body, self.writes, self.fresh = body, writes, fresh

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Run the members on the operands and numbers; return the new outputs."""
        count = len(self.body.inputs)
        numbers = operands[count:]
        if numbers and numbers[0].dim():
            numbers = numbers[0].unbind()
        values: dict[int, Any] = dict(enumerate(operands[:count]))
        for node, results in self.body.numbered():
            values.update(zip(results, _run_member(node, values, numbers), strict=True))
        for operand, output in self.writes:
            operands[operand].copy_(values[self.body.outputs[output]])
        return tuple(values[value] for value in self.body.outputs[: self.fresh])


def _run_member(
    node: Node, values: Mapping[int, Tensor | None], numbers: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Run one member; return its new results, then new versions of written operands."""
    op, dropped = pure_form(node.op)
    first = next(tensor for value in node.refs() if (tensor := values[value]) is not None)

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return values[arg.index]
        if type(arg) is Param:
            return numbers[arg.index].to(first.dtype)  # as torch does with a Python number
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return first.device if arg is DEVICE else arg

    args = [leaf(arg) for arg in node.args]
    kwargs = {name: leaf(arg) for name, arg in node.kwargs if name != dropped}
    if node.op == "aten.copy_.default":
        return [torch.empty_like(args[0]).copy_(args[1])]
    by_tensor = BY_TENSOR.get(op) if numbers_of(node) or op in HIDDEN_WRITES else None
    returned = (by_tensor or overload(op))(*args, **kwargs)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    return [_cast(result, meta) for result, meta in zip(results, node.results, strict=True)]


def _cast(result: Tensor | None, meta: TensorMeta | None) -> Tensor | None:
    if result is None or meta is None or result.dtype == meta.dtype:
        return result
    return result.to(meta.dtype)


def packed(numbers: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Return run-time numbers as operands.

    On a CPU they are one vector, since each operand costs a call as much as a small kernel; for
    CUDA they are single ones, which compiled code reads on the host.
    """
    if not numbers:
        return []
    vector = torch.tensor(numbers, dtype=torch.float64)
    return [vector] if device.type == "cpu" else list(vector.unbind())


#: Part of every key: an artifact of another version is not found.
VERSION = 2

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KernelGroup:
    """Fused node as input of the compiler."""

    body: Graph  # the members
    writes: tuple[tuple[int, int], ...]  # pairs (operand, output of the body) that are written back
    fresh: int  # number of new outputs
    flat: bool  # every tensor is viewed as a vector of dynamic length
    #: for each input of the body, the dims that the compiled code accepts in any size; (): none
    dynamic_dims: Dims = ()
    lanes: int = 1  # number of equal slices of a flat body, each with vectors of its own length

    @staticmethod
    def of(node: Node, dynamic_dims: Dims = ()) -> KernelGroup:
        """Build the group of a fused node."""
        body = node.body
        assert body is not None
        fresh, writes = len(node.fresh), _writes(node)
        lanes = lanes_of(body)
        if lanes is not None:
            return _group_of_lanes(lanes, writes)
        flat = _is_flat(body)
        return KernelGroup(body, writes, fresh, flat, () if flat else dynamic_dims)

    @property
    def numel(self) -> int:
        """Elements of its largest operand."""
        return max(meta.numel for meta in self.body.inputs)

    def structure(self) -> str:
        """Return, as text, everything that its code depends on; sizes of dynamic dims are ``?``."""
        body = self.body
        lines = [f"{self.writes} {self.fresh} {self.flat} {body.outputs} {len(body.params)}"]
        lines.append(str(self.lanes))
        dims = self.dynamic_dims or ((),) * len(body.inputs)
        for meta, dynamic in zip(body.inputs, dims, strict=True):
            lines.append(self._shape_text(meta, dynamic))
        results = tuple(meta for node in body.nodes for meta in node.results)
        for node in body.nodes:
            lines.append(_node_text(node))
        # shapes of results follow from inputs and arguments; members cast to the dtypes recorded
        lines.append(" ".join(str(meta.dtype) for meta in results if meta is not None))
        return "\n".join(lines)

    def _shape_text(self, meta: TensorMeta, dynamic: tuple[int, ...]) -> str:
        """Return what the compiled code depends on of an input's meta.

        Args:
            dynamic: its dims of any size.
        """
        if self.flat:
            return str(meta.dtype)
        if not dynamic:
            return str(meta)
        shape = ["?" if dim in dynamic else str(size) for dim, size in enumerate(meta.shape)]
        return f"{meta.dtype}[{', '.join(shape)}]"

    def key(self, device: str, flags: Flags = ()) -> str:
        """Return the artifact's name: 32 hexadecimal digits.

        Args:
            flags: torch's flags that its code depends on.
        """
        under = f"\n{flags}" if flags else ""
        text = f"{VERSION}\n{toolchain(device)}\n{self.structure()}{under}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def structure_without_sizes(self) -> str:
        """Return the structure without sizes: groups that differ only in these share it."""
        shapeless = [f"{meta.dtype} {len(meta.shape)}" for meta in self.body.inputs]
        nodes = map(_node_text, self.body.nodes)
        return "\n".join([*shapeless, *nodes, str(self.writes), str(self.body.outputs)])


def _writes(node: Node) -> tuple[tuple[int, int], ...]:
    """Return the pairs (operand, output of the body) of a fused node that are written back."""
    operands = list(dict.fromkeys(node.refs()))
    return tuple(
        (operands.index(target), len(node.fresh) + offset)
        for offset, target in enumerate(node.writes)
    )


def _group_of_lanes(lanes: Lanes, writes: tuple[tuple[int, int], ...]) -> KernelGroup:
    """Build the group of ``LANES`` lanes of a horizontally fused node.

    A lane's outputs are its new ones, then the written ones; those of the group likewise, so the
    outputs are reordered.

    Args:
        writes: the writes of the node, as ``KernelGroup`` has them.
    """
    targets: dict[int, int] = {}  # output of a lane -> its input that is overwritten with it
    for operand, output in writes:
        lane_index, output_of_lane = lanes.outputs[output]
        targets[output_of_lane] = lanes.operands[lane_index].index(operand)
    operands_per_lane, count = len(lanes.lane.inputs), len(lanes.lane.outputs)
    new_outputs = count - len(targets)
    body = join_slices(lanes.lane, LANES, lanes.length)
    outputs_by_lane = [
        body.outputs[lane_index * count : (lane_index + 1) * count] for lane_index in range(LANES)
    ]
    outputs = [value for lane_outputs in outputs_by_lane for value in lane_outputs[:new_outputs]]
    pairs = []
    for lane_index, lane_outputs in enumerate(outputs_by_lane):
        for output_of_lane in range(new_outputs, count):
            pairs.append((lane_index * operands_per_lane + targets[output_of_lane], len(outputs)))
            outputs.append(lane_outputs[output_of_lane])
    body = replace(body, outputs=tuple(outputs))
    return KernelGroup(body, tuple(pairs), LANES * new_outputs, True, (), LANES)


def _node_text(node: Node) -> str:
    return f"{node.op} {typed_key(node.args)} {typed_key(node.kwargs)} {node.writes}"


def _is_flat(body: Graph) -> bool:
    """Return whether all tensors have one shape and are contiguous, so they may be vectors."""
    metas = list(body.values)
    shape = body.inputs[0].shape
    return body.inputs[0].numel > 1 and all(
        meta is not None and meta.shape == shape and meta.is_contiguous() for meta in metas
    ) and all(is_pointwise(node.op) for node in body.nodes)  # fmt: skip


@cache
def toolchain(device: str) -> str:
    """Return the toolchain and target of code that is compiled on this machine, as text.

    Code of any other may round in another way, or end the process that runs it.
    """
    if device == "cpu":
        target = f"{torch.backends.cpu.get_cpu_capability()} {_instructions()}"
    else:
        kinds = {gpu.name for gpu in host_gpus()} or {torch.cuda.get_device_name()}
        target = f"{torch.version.cuda} {', '.join(sorted(kinds))}"
    return f"{torch.__version__} {platform.machine()} {device} {target}"


def _instructions() -> str:
    """Return a hash of the processor's features in Linux's list: the C++ compiler uses them."""
    try:
        with open("/proc/cpuinfo") as lines:
            named = (line.partition(":") for line in lines)
            features = next((text for name, _, text in named if name.strip() in _INSTRUCTIONS), "")
    except OSError:
        return ""
    return hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
