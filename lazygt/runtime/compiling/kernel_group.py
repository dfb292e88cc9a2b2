"""A fused node in the compiler's form, and the name of its artifact.

An artifact serves every fused node of the same structure: a group of pointwise ops on tensors of
one shape is compiled for vectors of any length, others for their sizes, or with those dims left
open that were seen to vary. Of horizontal ops a few lanes are compiled together, for vectors of any
lengths.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lazygt.graph.exact import exact
from lazygt.graph.flags import Flags
from lazygt.graph.fusion import is_pointwise, numbers_of, pure_form
from lazygt.graph.lanes import LANES, Lanes, abreast, lanes_of
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref
from lazygt.graph.ops import overload
from lazygt.runtime.compiling.by_tensor import BY_TENSOR, WRITE_UNSAID
from lazygt.runtime.gpus import host_gpus

aten = torch.ops.aten

#: Names of a processor's features in /proc/cpuinfo: on x86 and on ARM.
_INSTRUCTIONS = ("flags", "Features")


class Members(torch.nn.Module):
    """A fused node's body. ``forward`` takes its operands, then its numbers, see ``packed``.

    Args:
        body: the members.
        writes: pairs (operand, output of the body): the operand is overwritten with it.
        fresh: number of the body's outputs, from the first, that are returned.
    """

    def __init__(self, body: Graph, writes: tuple[tuple[int, int], ...], fresh: int) -> None:
        super().__init__()
        self.body, self.writes, self.fresh = body, writes, fresh

    def forward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Return the fresh outputs."""
        count = len(self.body.inputs)
        numbers = operands[count:]
        if numbers and numbers[0].dim():
            numbers = numbers[0].unbind()
        values: dict[int, Any] = dict(enumerate(operands[:count]))
        for node, results in self.body.numbered():
            values.update(zip(results, _member(node, values, numbers), strict=True))
        for operand, output in self.writes:
            operands[operand].copy_(values[self.body.outputs[output]])
        return tuple(values[value] for value in self.body.outputs[: self.fresh])


def _member(
    node: Node, values: Mapping[int, Tensor | None], numbers: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Return a member's results: fresh ones, then new versions of written operands."""
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
    by_tensor = BY_TENSOR.get(op) if numbers_of(node) or op in WRITE_UNSAID else None
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
    """A fused node in the compiler's form.

    Attributes:
        body: the members.
        writes: pairs (operand, output of the body) that are written back.
        fresh: number of new outputs.
        flat: every tensor is taken as a vector; its length is open.
        open_dims: for each input of the body, its dims of open size; empty if ``flat``.
        lanes: number of alike parts of a flat body, each with vectors of its own length.
    """

    body: Graph
    writes: tuple[tuple[int, int], ...]
    fresh: int
    flat: bool
    open_dims: Dims = ()
    lanes: int = 1

    @staticmethod
    def of(node: Node, open_dims: Dims = ()) -> KernelGroup:
        """Build the group of a fused node."""
        body = node.body
        assert body is not None
        fresh, writes = len(node.fresh), _writes(node)
        lanes = lanes_of(body)
        if lanes is not None:
            return _abreast(lanes, writes)
        flat = _is_flat(body)
        return KernelGroup(body, writes, fresh, flat, () if flat else open_dims)

    @property
    def numel(self) -> int:
        """Elements of its largest operand."""
        return max(meta.numel for meta in self.body.inputs)

    def structure(self) -> str:
        """Return, as text, everything that its code depends on; open sizes are left out."""
        body = self.body
        lines = [f"{self.writes} {self.fresh} {self.flat} {body.outputs} {len(body.params)}"]
        lines.append(str(self.lanes))
        dims = self.open_dims or ((),) * len(body.inputs)
        for meta, some in zip(body.inputs, dims, strict=True):
            lines.append(self._shown(meta, some))
        results = tuple(meta for node in body.nodes for meta in node.results)
        for node in body.nodes:
            lines.append(_read(node))
        # results follow from the inputs, but for their dtypes nothing else has to be trusted
        lines.append(" ".join(str(meta.dtype) for meta in results if meta is not None))
        return "\n".join(lines)

    def _shown(self, meta: TensorMeta, some: tuple[int, ...]) -> str:
        if self.flat:
            return str(meta.dtype)
        if not some:
            return str(meta)
        shape = ["?" if dim in some else str(size) for dim, size in enumerate(meta.shape)]
        return f"{meta.dtype}[{', '.join(shape)}]"

    def key(self, device: str, flags: Flags = ()) -> str:
        """Return the artifact's name: 32 hexadecimal digits.

        Args:
            flags: torch's flags that its code depends on.
        """
        under = f"\n{flags}" if flags else ""
        text = f"{VERSION}\n{toolchain(device)}\n{self.structure()}{under}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def skeleton(self) -> str:
        """Return the structure without sizes: groups that differ only in these share it."""
        shapeless = [f"{meta.dtype} {len(meta.shape)}" for meta in self.body.inputs]
        nodes = map(_read, self.body.nodes)
        return "\n".join([*shapeless, *nodes, str(self.writes), str(self.body.outputs)])


def _writes(node: Node) -> tuple[tuple[int, int], ...]:
    """Return the pairs (operand, output of the body) of a fused node that are written back."""
    operands = list(dict.fromkeys(node.refs()))
    return tuple(
        (operands.index(target), len(node.fresh) + offset)
        for offset, target in enumerate(node.writes)
    )


def _abreast(lanes: Lanes, writes: tuple[tuple[int, int], ...]) -> KernelGroup:
    """Build the group of a few lanes; a lane's outputs are its fresh ones, then written ones."""
    targets: dict[int, int] = {}  # output of a lane -> its input that is overwritten with it
    for operand, output in writes:
        which, place = lanes.outputs[output]
        targets[place] = lanes.operands[which].index(operand)
    width, count = len(lanes.lane.inputs), len(lanes.lane.outputs)
    fresh = count - len(targets)
    body = abreast(lanes.lane, LANES, lanes.length)
    rows = [body.outputs[which * count : (which + 1) * count] for which in range(LANES)]
    outputs = [value for row in rows for value in row[:fresh]]
    pairs = []
    for which, row in enumerate(rows):
        for place in range(fresh, count):
            pairs.append((which * width + targets[place], len(outputs)))
            outputs.append(row[place])
    body = replace(body, outputs=tuple(outputs))
    return KernelGroup(body, tuple(pairs), LANES * fresh, True, (), LANES)


def _read(node: Node) -> str:
    return f"{node.op} {exact(node.args)} {exact(node.kwargs)} {node.writes}"


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
            told = next((text for name, _, text in named if name.strip() in _INSTRUCTIONS), "")
    except OSError:
        return ""
    return hashlib.sha256(" ".join(sorted(told.split())).encode()).hexdigest()[:8]
