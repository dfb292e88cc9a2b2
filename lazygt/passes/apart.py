"""Interleaved values moved between ranks: their dim is seen as three, of which one is in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazygt.graph.label import Interleaved, Label, Sharded, around, groups
from lazygt.graph.node import Ref

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


def in_groups(build: Builder, value: Ref, shape: tuple[int, ...], have: Label, want: Label) -> Ref:
    """``value`` of global ``shape`` with another label, where one of the two is interleaved."""
    label = have if isinstance(have, Interleaved) else want
    assert isinstance(label, Interleaved)
    dim, (outer, inner) = label.dim, around(label)
    size = shape[dim] // groups(label)
    grouped = (*shape[:dim], outer, size, inner, *shape[dim + 1 :])
    source, target = (Sharded(dim + 1) if one == label else one for one in (have, want))
    seen = build.reshape(value, build.local(grouped, source))
    moved = build.convert(seen, grouped, source, target)
    return build.reshape(moved, build.local(shape, want))
