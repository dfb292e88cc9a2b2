"""Inference of an op's results by a run on meta tensors.

A meta tensor has shape, strides and dtype but no memory. torch's own meta kernels raise torch's own
errors for arguments that do not fit. A few of them depend on the device; those run on fake tensors,
which are meta tensors that claim to be on the workers' device.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses import fake_tensor

from lazygt.graph.flags import nondeterministic
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Arg, Param, Ref
from lazygt.graph.ops import BY_DEVICE, OpFacts, undispatched
from lazygt.graph.shapes.meta_kernels import META_KERNELS, with_kernel_strides
from lazygt.graph.shapes.rules import Results

# -- fake tensors without a CUDA context -----------------------------------------------------------

_create_context = fake_tensor.init_gpu_context
_here = threading.local()


def _init_gpu_context(device: torch.device) -> None:
    """Call torch's function, which allocates on the GPU, only outside of ``fake_tensors``."""
    if not getattr(_here, "is_inside", False):
        _create_context(device)


fake_tensor.init_gpu_context = _init_gpu_context  # type: ignore[assignment]


@contextmanager
def fake_tensors(fallback: bool) -> Iterator[None]:
    """Context of fake tensors that opens no CUDA context.

    A CUDA context takes 0.5 GB, and children that are forked later could not use CUDA.

    Args:
        fallback: True to run an op without a fake kernel on zeros.
    """
    before = getattr(_here, "is_inside", False)
    _here.is_inside = True
    try:
        with fake_tensor.FakeTensorMode(allow_fallback_kernels=fallback):
            yield
    finally:
        _here.is_inside = before


# -- runs on meta tensors --------------------------------------------------------------------------


def run_on_metas(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
    device_type: str,
) -> Results | None:
    """Return the metas of an op's results; None when they depend on values.

    Args:
        args, kwargs: with Ref for tensors and Param for run-time numbers.
        metas: the meta of every Ref.
        params: the value of every Param.
        device_type: of the workers.

    Raises:
        Exception: torch's own, when the op does not take such arguments.
    """
    by_device = _by_device(f, metas, device_type) or f.custom
    device = torch.device(device_type if by_device else "meta")
    tensors: list[torch.Tensor] = []

    def empty(meta: TensorMeta) -> torch.Tensor:
        tensors.append(meta.empty(device))
        return tensors[-1]

    # fallback kernels run on zeros: never for a custom op without a fake kernel, never on a GPU
    fallback = not f.custom and device_type == "cpu"
    mode = fake_tensors(fallback) if by_device else nullcontext()
    with undispatched(), torch.no_grad(), nondeterministic(), mode:
        meta_args, meta_kwargs = with_tensors(args, kwargs, empty, metas, params, device)
        try:
            returned = META_KERNELS.get(f.name, f.func)(*meta_args, **meta_kwargs)
        except NotImplementedError:
            # a custom op without a fake kernel does not resize its written arguments
            only_writes = f.custom and all(kind[0] == "w" for kind in f.outputs)
            if f.outputs and not only_writes:
                return None
            returned = (None,) * len(f.outputs)  # its only results are written
    if f.name in _ONE_DTYPE:
        _check_one_dtype(f, tensors)
    elif f.name in _KEEPING_DTYPE:
        _check_cast(f, meta_args)
    results = _described(f, returned, meta_args, meta_kwargs)
    fresh = _corrected(f, list(results.fresh), tensors, device_type)
    float32_metas = _halves_in_float32(metas) if f.pointwise and f.outputs == ("f",) else None
    if float32_metas is not None:
        float32_results = run_on_metas(f, args, kwargs, float32_metas, params, device_type)
        fresh = [_with_strides(fresh[0], float32_results)]
    return results._replace(fresh=tuple(fresh))


def with_tensors(
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    make: Callable[[TensorMeta], torch.Tensor],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
    device: torch.device,
) -> tuple[list[Any], dict[str, Any]]:
    """Return an op's arguments with a tensor for each Ref, and the value of each Param."""

    def leaf(arg: Arg) -> Any:
        if type(arg) is Ref:
            return make(metas[arg.index])
        if type(arg) is Param:
            return params[arg.index]
        if type(arg) is tuple:
            return [leaf(item) for item in arg]
        return device if arg is DEVICE else arg

    return [leaf(arg) for arg in args], {name: leaf(arg) for name, arg in kwargs}


def _described(
    f: OpFacts, returned: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Results:
    """Return the metas of an op's returned and written tensors."""
    written = [args[i] for i in f.writes if i < len(args)]
    written += [kwargs[name] for name in f.writes_named if name in kwargs]
    items = (returned,) if len(f.outputs) == 1 else tuple(returned or ())
    fresh: list[TensorMeta | None] = []
    for kind, item in zip(f.outputs, items, strict=True):
        if kind[0] in "fv":
            fresh.extend(None if t is None else TensorMeta.of(t) for t in _flat([item]))
    return Results(
        tuple(_without_offset(f, fresh)),
        tuple(TensorMeta.of(t) for t in _flat(written) if t is not None),
        tuple(int(item) for kind, item in zip(f.outputs, items, strict=True) if kind == "i"),
    )


def _corrected(
    f: OpFacts, fresh: list[TensorMeta | None], operands: list[torch.Tensor], device_type: str
) -> list[TensorMeta | None]:
    """Return the metas with known errors of torch's meta kernels corrected."""
    if f.name in _NORMS and device_type == "cpu":
        _mixed_statistics(operands, fresh)
    if f.name == _GROUP_NORM_BACKWARD and fresh[0] is not None:
        fresh[0] = TensorMeta(fresh[0].shape, fresh[0].stride, operands[1].dtype)
    if f.name == _CPU_ATTENTION and operands[0].dtype == torch.float64 and fresh[1] is not None:
        fresh[1] = TensorMeta(fresh[1].shape, fresh[1].stride, torch.float64)
    if f.name in _OTHER_ON_GPUS and device_type != "cpu":
        fresh[1] = _OTHER_ON_GPUS[f.name](operands, fresh[1])
    return with_kernel_strides(f.name, device_type, operands, fresh)


def _with_strides(meta: TensorMeta | None, of: Results | None) -> TensorMeta | None:
    """Return ``meta`` with the strides of the one result of another run of its op."""
    like = None if of is None else of.fresh[0]
    if meta is None or like is None:
        return meta
    return TensorMeta(meta.shape, like.stride, meta.dtype)


def _by_device(f: OpFacts, metas: Mapping[int, TensorMeta], device_type: str) -> bool:
    """Return whether the results depend on the kind of device.

    Norms count as device-dependent on CPUs only. On fake tensors of a GPU their decompositions
    would write in place, which torch refuses where it was built without CUDA.
    """
    if f.name in _CONVOLUTIONS:
        return device_type == "cpu" and not all(meta.plain for meta in metas.values())
    return f.name in BY_DEVICE and (device_type == "cpu" or f.name not in _NORMS)


def _halves_in_float32(metas: Mapping[int, TensorMeta]) -> Mapping[int, TensorMeta] | None:
    """Return the operands' metas in float32 if one in half precision is expanded; else None.

    torch's meta kernels convert such operands first, and the converted ones are row-major; its
    kernels do not convert, and choose the result's strides as for any other dtype.
    """
    halves = [meta for meta in metas.values() if meta.dtype in (torch.float16, torch.bfloat16)]
    if all(all(meta.stride) for meta in halves):
        return None
    return {
        index: TensorMeta(meta.shape, meta.stride, torch.float32, meta.offset)
        if meta.dtype in (torch.float16, torch.bfloat16)
        else meta
        for index, meta in metas.items()
    }


_CONVOLUTIONS = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})

#: Ops with meta kernels that accept tensors of several dtypes, which their other kernels refuse.
_ONE_DTYPE = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution")
)


def _check_one_dtype(f: OpFacts, tensors: list[torch.Tensor]) -> None:
    """Raise for operands of several dtypes, as torch's kernels do."""
    dtypes = list(dict.fromkeys(t.dtype for t in tensors))
    if len(dtypes) > 1:
        names = " != ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise RuntimeError(f"{f.name}: expected tensors of the same dtype, but got {names}")


#: Ops with meta kernels that accept a result that does not fit the written tensor's dtype.
_KEEPING_DTYPE = frozenset({"aten.add_.Tensor", "aten.sub_.Tensor", "aten.mul_.Tensor"})


def _check_cast(f: OpFacts, args: Sequence[Any]) -> None:
    """Raise if the result's dtype can't be cast to the written tensor's."""
    result, target = torch.result_type(args[0], args[1]), args[0].dtype
    if not torch.can_cast(result, target):
        raise RuntimeError(
            f"{f.name}: result type {result} can't be cast to the desired output type {target}"
        )


#: The meta kernel of torch 2.11 gives the logsumexp of float64 queries as float32.
_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def _no_buffer(operands: list[torch.Tensor], buffer: TensorMeta | None) -> TensorMeta:
    """Return an empty buffer: on GPUs the backward computes the values of CPUs' buffer again."""
    return TensorMeta((0,), (1,), operands[0].dtype)


def _float32_norms(operands: list[torch.Tensor], norms: TensorMeta | None) -> TensorMeta | None:
    """Return the norms' meta: GPUs keep norms of half precision in single precision."""
    if norms is None or norms.dtype != torch.float16:
        return norms
    return TensorMeta(norms.shape, norms.stride, torch.float32)


#: Op -> its second result on GPUs, by the operands and the meta kernel's.
_OTHER_ON_GPUS: Mapping[
    str, Callable[[list[torch.Tensor], TensorMeta | None], TensorMeta | None]
] = {
    "aten.log_sigmoid_forward.default": _no_buffer,
    "aten._weight_norm_interface.default": _float32_norms,
}

#: The input's gradient has the input's dtype; torch's meta kernel promotes it with the weights'.
_GROUP_NORM_BACKWARD = "aten.native_group_norm_backward.default"

#: Norms: results 1 and 2 are the mean and the inverse deviation.
_NORMS = frozenset(name for name in BY_DEVICE if "norm" in name)


def _mixed_statistics(tensors: list[torch.Tensor], fresh: list[TensorMeta | None]) -> None:
    """Set float32 statistics for half-precision input under float32 weights, as on CPUs.

    torch's own fake kernels give them the input's dtype for any weights.
    """
    if len({t.dtype for t in tensors}) == 1:
        return
    for i in (1, 2):
        m = fresh[i]
        if m is not None:
            fresh[i] = TensorMeta(m.shape, m.stride, torch.float32)


def _without_offset(f: OpFacts, metas: list[TensorMeta | None]) -> list[TensorMeta | None]:
    """Return the metas with offset 0: new results have memory of their own."""
    if f.views:
        return metas
    return [
        TensorMeta(m.shape, m.stride, m.dtype, 0, m.conj, m.neg) if m and m.offset else m
        for m in metas
    ]


def _flat(items: Any) -> Any:
    """Yield the items of nested lists."""
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


# -- errors of torch's CPU kernels -----------------------------------------------------------------
# A meta kernel's error text may differ from the CPU kernel's. So the refused op runs once more on
# zeros of the same shapes, strides and dtypes. They are in mapped memory, of which no page exists
# until the first write; a kernel that refuses its arguments has written none of it.

#: Maximum elements of all operands, and maximum number among arguments: a kernel that accepts the
#: call computes with no more.
_MAX_ELEMENTS = 2**26
#: Ops that compute nothing before they have compared all shapes and dtypes.
_CHECK_FIRST = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "convolution")
)
#: Refusals of values, which are zeros here, and of memory.
_OTHER_ERRORS: tuple[type[Exception], ...] = (
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    MemoryError,
    OSError,
    OverflowError,  # operands that no address space holds
)
#: The same by their texts, and refusals for want of a kernel.
_OTHER_ERROR_TEXTS = ("Could not run ", "DefaultCPUAllocator", "[enforce fail")
_MAPPED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE


def cpu_error(
    f: OpFacts,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    metas: Mapping[int, TensorMeta],
    params: Sequence[Any],
) -> Exception | None:
    """Return the exception that torch's CPU kernel raises for a call, or None.

    Args:
        args, kwargs, metas, params: as those of ``run_on_metas``.

    Returns:
        None where the kernel takes the call, where the call is too large to be tried, and for ops
        that draw random numbers or are not torch's own.
    """
    if f.custom or f.random or not _is_small(f, (args, kwargs), metas, params):
        return None
    try:
        with undispatched(), torch.no_grad(), nondeterministic():
            operands = with_tensors(args, kwargs, _zeros, metas, params, torch.device("cpu"))
            f.func(*operands[0], **operands[1])
    except _OTHER_ERRORS:
        return None
    except Exception as error:  # noqa: BLE001 - any error of the kernel is the answer
        return None if str(error).startswith(_OTHER_ERROR_TEXTS) else error
    return None


def _is_small(
    f: OpFacts, args: Any, metas: Mapping[int, TensorMeta], params: Sequence[Any]
) -> bool:
    """Return whether a call computes little enough to be tried on the CPU."""
    if f.name in _CHECK_FIRST:
        return True
    elements = sum(max(meta.extent, meta.numel) for meta in metas.values())
    numbers = (abs(n) for n in _numbers((args, tuple(params))))
    return elements <= _MAX_ELEMENTS and all(n <= _MAX_ELEMENTS for n in numbers)


def _numbers(arg: Any) -> Iterable[int]:
    """Yield the ints in an argument."""
    if type(arg) is tuple:
        for item in arg:
            yield from _numbers(item)
    elif type(arg) is int:
        yield arg


def _zeros(meta: TensorMeta) -> torch.Tensor:
    """Return a CPU tensor of zeros that takes no memory while nothing is written to it."""
    nbytes = max(meta.extent, 1) * meta.dtype.itemsize
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=_MAPPED), dtype=torch.uint8)
    t = flat.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
    t = torch._conj(t) if meta.conj else t
    return torch._neg_view(t) if meta.neg else t
