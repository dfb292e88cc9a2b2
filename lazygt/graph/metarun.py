"""An op's results found by running it on meta tensors.

A meta tensor has shape, strides and dtype but no memory. torch's own meta kernels raise torch's
own errors for arguments that do not fit. A few of them ask which device they stand for; those
run on fake tensors, which are meta tensors that claim to be on the workers' device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Param, Ref
from lazygt.graph.ops import BY_DEVICE, OpFacts, undispatched

#: Metas of the fresh results, and of the written tensors.
Results = tuple[tuple[TensorMeta | None, ...], tuple[TensorMeta, ...]]


def run_on_metas(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
    device_type: str,
) -> Results | None:
    """Metas of the fresh results and of the written tensors; None when only values can tell.

    Args:
        args, kwargs: with Ref for tensors and Param for run-time numbers.
        metas: the meta of every Ref.
        params: the value of every Param.
        device_type: what the workers compute on.

    Raises:
        Exception: torch's own, when the op does not take such arguments.
    """
    by_device = f.name in BY_DEVICE
    device = torch.device(device_type if by_device else "meta")
    made: list[torch.Tensor] = []

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            made.append(metas[arg.index].empty(device))
            return made[-1]
        if type(arg) is Param:
            return params[arg.index]
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return device if arg is DEVICE else arg

    with undispatched(), torch.no_grad(), FakeTensorMode() if by_device else nullcontext():
        margs = [leaf(arg) for arg in args]
        mkwargs = {name: leaf(arg) for name, arg in kwargs}
        try:
            returned = f.func(*margs, **mkwargs)
        except NotImplementedError:
            if f.outputs:
                return None
            returned = None  # it has no meta kernel, and no result but what it writes
    if f.name in _ONE_DTYPE:
        _check_one_dtype(f, made)
    written = [margs[i] for i in f.writes if i < len(margs)]
    written += [mkwargs[name] for name in f.writes_named if name in mkwargs]
    written_metas = tuple(TensorMeta.of(t) for t in _flat(written) if t is not None)
    items = (returned,) if len(f.outputs) == 1 else tuple(returned or ())
    fresh: list[TensorMeta | None] = []
    for kind, item in zip(f.outputs, items, strict=True):
        if kind[0] in "fv":
            fresh.extend(None if t is None else TensorMeta.of(t) for t in _flat([item]))
    if f.name in _NORMS and device_type == "cpu":
        _mixed_statistics(made, fresh)
    if f.name in _BATCH_NORMS and device_type == "cpu" and fresh[0] is not None:
        source = made[1 if "backward" in f.name else 0]
        fresh[0] = TensorMeta.of(
            torch.empty_like(source, memory_format=suggest_memory_format(source))
        )
    if f.name == _CPU_ATTENTION and made[0].dtype == torch.float64 and fresh[1] is not None:
        fresh[1] = TensorMeta(fresh[1].shape, fresh[1].stride, torch.float64)
    return tuple(_rooted(f, fresh)), written_metas


#: Ops whose meta kernels let pass what their other kernels refuse: tensors of several dtypes.
_ONE_DTYPE = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution")
)


def _check_one_dtype(f: OpFacts, tensors: list[torch.Tensor]) -> None:
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    if len(dtypes) > 1:
        names = " != ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise RuntimeError(f"{f.name}: expected tensors of the same dtype, but got {names}")


#: The meta kernel of torch 2.11 gives the logsumexp of float64 queries as float32.
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"

#: Ops whose meta kernels keep the strides of what is normalised (a gradient's operand 1, else 0).
#: On a CPU their result 0 is row-major, or channels-last.
_BATCH_NORMS = frozenset(
    f"aten.{name}"
    for name in (
        "native_batch_norm.default",
        "native_batch_norm_backward.default",
        "batch_norm_backward.default",
        "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training.default",
        "_batch_norm_with_update.default",
        "_batch_norm_no_update.default",
    )
)

#: Their results 1 and 2 are the mean and the inverse deviation.
_NORMS = frozenset(name for name in BY_DEVICE if "norm" in name)


def _mixed_statistics(tensors: list[torch.Tensor], fresh: list[TensorMeta | None]) -> None:
    """On a CPU, half-precision input under float32 weights has float32 statistics.

    torch's own fake kernels say they have the input's dtype, whatever the weights'.
    """
    if len({t.dtype for t in tensors}) == 1:
        return
    for i in (1, 2):
        m = fresh[i]
        if m is not None:
            fresh[i] = TensorMeta(m.shape, m.stride, torch.float32)


def _rooted(f: OpFacts, metas: list[TensorMeta | None]) -> list[TensorMeta | None]:
    """Fresh results own their memory, so their offset is 0 whatever the meta kernel did."""
    if f.views:
        return metas
    return [
        TensorMeta(m.shape, m.stride, m.dtype, 0, m.conj, m.neg) if m and m.offset else m
        for m in metas
    ]


def _flat(items: Any) -> Any:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
