"""Tensors that travel from rank to rank together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazygt.graph.node import Ref

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder


class Bundle(NamedTuple):
    """Tensors that travel together, those of one dtype as one.

    They are of [batch, heads, length, features], or without features.

    Attributes:
        widths: their features; None: without.
    """

    widths: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(metas: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Bundle:
        """Return the bundle of tensors of these shapes and dtypes."""
        widths = tuple([shape[3] if len(shape) > 3 else None for shape, _ in metas])
        return Bundle(widths, tuple([dtype for _, dtype in metas]))

    def row_bytes(self) -> list[int]:
        """Return the bytes of one place of a head, of each joined tensor."""
        return [
            dtype.itemsize * sum([self.widths[at] or 1 for at in places])
            for dtype, places in self._groups().items()
        ]

    def pack(self, build: Builder, tensors: Sequence[Ref]) -> list[Ref]:
        """Join the tensors to those that travel."""
        wide = [
            tensor if width is not None else build.op("aten.unsqueeze.default", tensor, -1)
            for tensor, width in zip(tensors, self.widths, strict=True)
        ]
        return [build.joined([wide[at] for at in places], 3) for places in self._groups().values()]

    def unpack(self, build: Builder, joined: Sequence[Ref]) -> list[Ref]:
        """Take the joined tensors apart again."""
        tensors: dict[int, Ref] = {}
        for whole, places in zip(joined, self._groups().values(), strict=True):
            start = 0
            for at in places:
                width = self.widths[at]
                tensor = build.slice(whole, 3, start, width or 1)
                if width is None:
                    tensor = build.contiguous(build.op("aten.squeeze.dim", tensor, -1))
                tensors[at] = tensor
                start += width or 1
        return [tensors[at] for at in range(len(self.widths))]

    def _groups(self) -> Mapping[torch.dtype, list[int]]:
        groups: dict[torch.dtype, list[int]] = {}
        for at, dtype in enumerate(self.dtypes):
            groups.setdefault(dtype, []).append(at)
        return groups
