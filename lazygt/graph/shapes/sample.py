"""A pointwise op's dtype and layout found by running it on a few elements, on the CPU.

torch's meta kernels of pointwise ops are written in Python, and load sympy and dynamo: a second or
more, in every process that needs one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.node import DEVICE, Arg, Param, Ref
from lazygt.graph.ops import OpFacts, undispatched

#: A sample has at most two elements along each dim.
_MOST_DIMS = 8


def sampled_dtype(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
) -> torch.dtype | None:
    """Return the dtype of a pointwise result on row-major tensors, if it is row-major too.

    None where the op refuses such arguments, or where it is not sure.
    """

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return _sample(metas[arg.index])
        return params[arg.index] if type(arg) is Param else arg

    # of several dtypes torch's kernels and their meta kernels do not always make the same
    condition = {torch.bool} if f.name == "aten.where.self" else set()
    several = len({meta.dtype for meta in metas.values()} - condition) > 1
    far = DEVICE in (*args, *[arg for _, arg in kwargs])
    if several or far or any(len(meta.shape) > _MOST_DIMS for meta in metas.values()):
        return None
    try:
        with undispatched(), torch.no_grad():
            result = f.func(*map(leaf, args), **{name: leaf(arg) for name, arg in kwargs})
    except Exception:  # noqa: BLE001 - the meta kernel raises it on the user's line
        return None
    if result.device.type != "cpu" or result.stride() != contiguous_stride(tuple(result.shape)):
        return None
    dtype: torch.dtype = result.dtype
    return dtype


def _sample(meta: TensorMeta) -> torch.Tensor:
    """Return ones with sizes of at most 2: larger sizes do not change the order of strides."""
    return torch.ones([min(size, 2) for size in meta.shape], dtype=meta.dtype, device="cpu")
