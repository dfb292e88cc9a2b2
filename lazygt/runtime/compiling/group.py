"""A fused node as the compiler sees it, and the name of what it compiles to.

An artifact serves every fused node of the same structure: a group of pointwise ops on tensors of
one shape is compiled for vectors of any length, others for the sizes they have, or with the
dims left open that were seen to vary.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache

import torch

from lazygt.graph.exact import exact
from lazygt.graph.fusion import REDUCTIONS
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node

#: Part of every key: an artifact of another version is not found.
VERSION = 1

Dims = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """A fused node as the compiler sees it.

    Attributes:
        body: the members.
        writes: pairs (operand, output of the body) that are written back.
        fresh: how many outputs are new.
        flat: every tensor is taken as a vector; its length is open.
        open_dims: for each input of the body its dims whose sizes are open; empty if ``flat``.
    """

    body: Graph
    writes: tuple[tuple[int, int], ...]
    fresh: int
    flat: bool
    open_dims: Dims = ()

    @staticmethod
    def of(node: Node, open_dims: Dims = ()) -> Group:
        """The group of a fused node."""
        body = node.body
        assert body is not None
        operands = list(dict.fromkeys(node.refs()))
        fresh = len(node.fresh)
        writes = tuple(
            (operands.index(target), fresh + offset) for offset, target in enumerate(node.writes)
        )
        flat = _is_flat(body)
        return Group(body, writes, fresh, flat, () if flat else open_dims)

    @property
    def numel(self) -> int:
        """Elements of its largest operand."""
        return max(meta.numel for meta in self.body.inputs)

    def structure(self) -> str:
        """Everything that its code depends on, without the sizes that are open."""
        body = self.body
        lines = [f"{self.writes} {self.fresh} {self.flat} {body.outputs} {len(body.params)}"]
        dims = self.open_dims or ((),) * len(body.inputs)
        for meta, some in zip(body.inputs, dims, strict=True):
            lines.append(self._shown(meta, some))
        made = tuple(meta for node in body.nodes for meta in node.results)
        for node in body.nodes:
            lines.append(_read(node))
        # results follow from the inputs, but for their dtypes nothing else has to be trusted
        lines.append(" ".join(str(meta.dtype) for meta in made if meta is not None))
        return "\n".join(lines)

    def _shown(self, meta: TensorMeta, some: tuple[int, ...]) -> str:
        if self.flat:
            return str(meta.dtype)
        if not some:
            return str(meta)
        shape = ["?" if dim in some else str(size) for dim, size in enumerate(meta.shape)]
        return f"{meta.dtype}[{', '.join(shape)}]"

    def key(self, device: str) -> str:
        """The artifact's name: 32 hexadecimal digits."""
        text = f"{VERSION}\n{_toolchain(device)}\n{self.structure()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def skeleton(self) -> str:
        """The structure without any size: groups that differ in nothing else share it."""
        shapeless = [f"{meta.dtype} {len(meta.shape)}" for meta in self.body.inputs]
        nodes = map(_read, self.body.nodes)
        return "\n".join([*shapeless, *nodes, str(self.writes), str(self.body.outputs)])


def _read(node: Node) -> str:
    return f"{node.op} {exact(node.args)} {exact(node.kwargs)} {node.writes}"


def _is_flat(body: Graph) -> bool:
    """Whether all tensors are alike in shape and contiguous, so that they may be vectors."""
    metas = list(body.values)
    shape = body.inputs[0].shape
    return body.inputs[0].numel > 1 and all(
        meta is not None and meta.shape == shape and meta.is_contiguous() for meta in metas
    ) and not any(node.op in REDUCTIONS for node in body.nodes)  # fmt: skip


@cache
def _toolchain(device: str) -> str:
    target = torch.backends.cpu.get_cpu_capability() if device == "cpu" else (
        f"{torch.version.cuda} {torch.cuda.get_device_name()}"
    )  # fmt: skip
    return f"{torch.__version__} {platform.machine()} {device} {target}"
