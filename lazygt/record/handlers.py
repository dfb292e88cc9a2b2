"""Handlers of ops with special recording: transfers, view changes, device choices.

A handler gets (recorder, op, args, kwargs) and returns the user's result, or NotImplemented for the
op to be recorded in the ordinary way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map

from lazygt.errors import ProtocolError
from lazygt.graph.flags import fills_new_memory
from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, returned_write
from lazygt.graph.source import with_line
from lazygt.record import pieces
from lazygt.record.annotate import is_placed
from lazygt.record.copies import host_copy
from lazygt.record.custom.definitions import CustomOps
from lazygt.record.custom.registry import is_custom
from lazygt.record.host_values import blank, fill, remote_tensor, to_lazy
from lazygt.record.rng import SessionGenerator, host_generator
from lazygt.record.tensor import (
    NATIVE,
    LazyTensor,
    Storage,
    is_lazy,
    rebind,
    storage_of,
    view_of,
    wrapper,
)
from lazygt.record.trace import Trace, TraceOwner, written_tensors
from lazygt.record.untyped_storage import LazyStorage
from lazygt.record.views import resize, same_shape_view, same_view, write

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class OpRecorder(TraceOwner, Protocol):
    """Interface of the recorder, as far as handlers need it."""

    definitions: CustomOps
    generator: SessionGenerator
    worker_device: str

    def record(self, func: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Record an op; return the user's result."""

    def record_plain(self, func: Any, args: Args, kwargs: Kwargs | None) -> Any:
        """Record an op as it is, bypassing its handler."""

    def custom_op(self, f: OpFacts, args: Args, kwargs: Kwargs | None = None) -> Any:
        """Record an op that torch alone does not have."""


Handler = Callable[[OpRecorder, Any, Args, Kwargs], Any]
aten = torch.ops.aten


def handler_of(f: OpFacts) -> tuple[Handler | None, str | None]:
    """Return an op's handler and the keyword that it acts on.

    The handler is None for an ordinary op; the keyword is None if the handler always acts.
    """
    handler = _HANDLERS.get(f.func)
    if handler is None and _unsupported_kind(f.func):
        handler = refuse_layout
    if handler is not None:
        return handler, "device" if handler is to_copy else None
    if is_custom(f.func):
        return _custom, None
    if f.inplace_view:
        return _inplace_view, None
    if "device" in f.hoist_named:
        return to_other_device, "device"
    return (flagged if f.name in UNDECLARED_WRITES else None), None


def shows_full_storage(t: Any) -> bool:
    """Return whether a handle shows all of its storage, in the storage's own layout."""
    return is_lazy(t) and view_of(t) is None


def flagged(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return NotImplemented: handler of ops that write more arguments when a flag is set.

    It marks them: the recorder looks at the flag (``UNDECLARED_WRITES``).
    """
    return NotImplemented


def _custom(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a custom op; its definition may change between calls."""
    f = recorder.definitions.facts(func)
    if f.beginning_matters:
        args = tuple([pieces.fix_position(recorder, a) for a in args])
    return recorder.custom_op(f, args, kwargs)


def refuse_layout(recorder: OpRecorder | None, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Raise NotImplementedError with the remedy, on the user's line."""
    raise NotImplementedError(with_line(f"{func}: {_REMEDIES[_unsupported_kind(func)]}"))


def _unsupported_kind(func: Any) -> str:
    """Return the kind of tensors (sparse, quantized, nested) that an op needs; "" for none."""
    name = str(func)
    return next(
        (kind for kind, begins in _UNSUPPORTED_PREFIXES.items() if name.startswith(begins)), ""
    )


_UNSUPPORTED_PREFIXES = {
    "quantized": (
        "quantized.", "aten.quantize_per_", "aten.empty_quantized", "aten.int_repr", "aten.q_",
        "aten._make_per_", "aten._empty_affine_quantized", "aten._empty_per_channel_affine",
    ),
    "nested": (
        "aten._nested_tensor_from_tensor_list", "aten._nested_from_padded.",
        "aten._nested_tensor_from_mask.", "aten._nested_view_from_buffer",
        # the C++ recorder accepts tensors of torch's own class, which jagged tensors consist of
        *(("aten._nested_view_from_jagged",) if NATIVE is None else ()),
    ),
    "sparse": ("aten._to_sparse", "aten.to_mkldnn."),
}  # fmt: skip
_REMEDIES = {
    "": "device 'lazygt' has dense strided tensors only, no sparse, quantized or nested ones. Make "
    "such a tensor on the CPU (device='cpu') and .to_dense() it before .to('lazygt').",
    "sparse": "device 'lazygt' has dense strided tensors only, no sparse ones and none of mkldnn. "
    "Leave the tensor dense, or take it to the CPU with .cpu() before.",
    "quantized": "quantized tensors are not supported on device 'lazygt'. Quantize on the CPU: "
    "take the tensor there with .cpu() before, and .dequantize() what comes back before "
    ".to('lazygt'). Or stay here with torch.fake_quantize_per_tensor_affine, or with int8 tensors "
    "and a scale of your own: (x / scale).round().clamp(-128, 127).to(torch.int8).",
    "nested": "nested tensors are not supported on device 'lazygt'. Pad them: "
    "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) and a mask. Or make them on the "
    "CPU (device='cpu') of tensors taken there with .cpu().",
}


# -- uploads and fetches ------------------------------------------------------------------


def item(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the value of a one-element tensor (``t.item()``): a sync point."""
    value = recorder.fetch(args[0], "item", as_number=True)
    return func(value) if isinstance(value, torch.Tensor) else value


def to_copy(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record or run ``_to_copy``: upload, fetch, or conversion on the workers."""
    device = kwargs.get("device")
    if device is None or device.type == "lazygt":
        return NotImplemented if is_lazy(args[0]) else _from_host(recorder, args[0], kwargs)
    if device.type == "meta":
        return TensorMeta.of(args[0]).empty("meta").to(kwargs.get("dtype"))
    value = recorder.fetch(args[0], f"to {device.type}")
    options = {
        name: option for name, option in kwargs.items() if name not in ("device", "non_blocking")
    }
    if device.type == "cpu" and options.get("dtype") in (None, value.dtype):
        return value
    return torch.ops.aten._to_copy.default(value, device=device, **options)


def _from_host(recorder: OpRecorder, source: torch.Tensor, kwargs: Kwargs) -> Any:
    """Upload the source of ``cpu.to("lazygt")``, converted on the client."""
    host = source.cpu()
    dtype = kwargs.get("dtype") or host.dtype
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    dense = aten.is_non_overlapping_and_dense.default(host)
    if (dtype, memory_format) != (host.dtype, torch.preserve_format) or not dense:
        host = aten._to_copy.default(host, dtype=dtype, memory_format=memory_format)
    return to_lazy(recorder, host)


def to_other_device(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Create a result on another device than lazygt: ``zeros_like(x, device="cpu")``."""
    device = kwargs.get("device")
    if device is None or device.type == "lazygt":
        return NotImplemented
    name = func._schema.name.split("::")[1]
    if name.endswith("_like") or name.startswith("new_"):  # only the shape matters
        moved_args = [TensorMeta.of(a).empty("meta") if is_lazy(a) else a for a in args]
    else:
        moved_args = [recorder.fetch(a, "to cpu") if is_lazy(a) else a for a in args]
    if facts(func).random:
        recorder.generator.restore_host_state()
    return func(*moved_args, **kwargs)


def _arange(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Create a range on another device, or record it, with a run-time start if that varies."""
    other_device = to_other_device(recorder, func, args, kwargs)
    return (
        pieces.arange(recorder, func, args, kwargs)
        if other_device is NotImplemented
        else other_device
    )


def copy(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record ``target.copy_(source)`` between CPU and lazygt tensors."""
    target, source = args[0], args[1]
    if not is_lazy(target):
        target.copy_(recorder.fetch(source, "copy to CPU"))
        return target
    if is_lazy(source):
        return NotImplemented
    if source.device.type == "meta":
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    torch.broadcast_shapes(source.size(), target.shape)
    full = shows_full_storage(target) and tuple(target.shape) == storage_of(target).meta.shape
    if full and not is_placed(target):
        fill(target, source.cpu())
        return target
    lazy = to_lazy(recorder, source.cpu().to(target.dtype))
    return recorder.record(aten.copy_.default, (target, lazy), {})


def _pack_padded(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pack padded sequences (``pack_padded_sequence``) into one tensor of steps.

    Consecutive steps with equally many samples are one slice; the slices are concatenated. The
    lengths are on the client, as with CUDA; lazy ones are fetched.
    """
    source, lengths, batch_first = args
    if is_lazy(lengths):
        lengths = recorder.fetch(lengths, "pack_padded_sequence")
    metas = TensorMeta.of(source).empty("cpu"), lengths, batch_first
    # torch's own kernel checks the lengths, and counts the samples of each step
    batch_sizes = aten._pack_padded_sequence.default(*metas)[1]
    steps = aten.transpose.int(source, 0, 1) if batch_first else source
    runs, start = [], 0
    for samples, length in itertools.groupby(batch_sizes.tolist()):
        end = start + len(list(length))
        run = aten.slice.Tensor(aten.slice.Tensor(steps, 0, start, end), 1, 0, samples)
        runs.append(aten.reshape.default(run, (-1, *steps.shape[2:])))
        start = end
    return aten.cat.default(runs), batch_sizes


# -- uninitialised memory -----------------------------------------------------------------------


def empty(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Create uninitialised memory (``torch.empty``); no step is recorded until an op uses it."""
    layout, memory_format = kwargs.get("layout"), kwargs.get("memory_format")
    if layout not in (None, torch.strided):
        raise RuntimeError(f"device 'lazygt' has strided tensors only, not {layout}")
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(args[0], device="meta", memory_format=memory_format).stride()
    return _uninitialized(recorder, args[0], stride, kwargs.get("dtype"))


def empty_strided(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Create uninitialised memory with strides (``torch.empty_strided``)."""
    return _uninitialized(recorder, args[0], args[1], kwargs.get("dtype"))


def _uninitialized(recorder: OpRecorder, shape: Any, stride: Any, dtype: torch.dtype | None) -> Any:
    """Create uninitialised memory; recorded at once if torch fills it (deterministic mode)."""
    t = blank(recorder, shape, stride, dtype)
    if fills_new_memory():
        recorder.trace.enter(storage_of(t))
    return t


# -- handles -------------------------------------------------------------------------------


def same(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the first argument: handler of ops that change nothing."""
    return args[0]


def _inplace_view(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the handle a view of its former value (``t_``, ``squeeze_``)."""
    target = args[0]
    view = recorder.record(_out_of_place(func), args, kwargs)
    rebind(target, TensorMeta.of(view), storage_of(view), view_of(view))
    return target


def _out_of_place(func: Any) -> Any:
    """Return the view op that an in-place view op is named after, with the same arguments."""
    packet = getattr(aten, func._schema.name.split("::")[1].removesuffix("_"))
    argument_types = [str(argument.type) for argument in func._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        if [str(argument.type) for argument in overload._schema.arguments] == argument_types:
            return overload
    raise NotImplementedError(f"{func} has no out-of-place form")


def _resize(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the tensor if it has the size already; raise NotImplementedError otherwise."""
    t, size = args[0], tuple(args[1])
    if tuple(t.shape) == size:
        return t
    raise NotImplementedError(
        f"resize_ of a lazygt tensor from {list(t.shape)} to {list(size)}: it would expose memory "
        f"that no op has written, and the other views of it would dangle. Use reshape, a slice, "
        f"or torch.nn.functional.pad."
    )


def _set_source(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Make the target show the storage and view of another tensor (``set_``)."""
    target, source = args[0], args[1]
    if not is_lazy(source):
        source = to_lazy(recorder, source)
    rebind(target, TensorMeta.of(source), storage_of(source), view_of(source))
    return target


def _set_storage(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Set a tensor to a CPU storage, as ``torch.load(map_location="lazygt")`` does."""
    target, source = args[0], args[1]
    if isinstance(source, LazyStorage):
        raise NotImplementedError(
            "set_ of a tensor to a lazygt storage: take a view of the tensor itself, with "
            "as_strided"
        )
    flat = torch.empty(0, dtype=target.dtype).set_(source)
    offset, size = (args[2], args[3]) if len(args) > 3 else (0, flat.shape)
    stride = args[4] if len(args) > 4 else contiguous_stride(tuple(size))
    storage = _uploaded(recorder, source, flat, flat.as_strided(size, stride, offset))
    meta = storage.meta
    full = wrapper(meta, storage, None)
    contiguous = offset == 0 and tuple(size) == meta.shape and tuple(stride) == meta.stride
    tensor = full if contiguous else recorder.record(
        aten.as_strided.default, (full, list(size), list(stride), offset), {})  # fmt: skip
    rebind(target, TensorMeta.of(tensor), storage_of(tensor), view_of(tensor))
    return target


def _uploaded(
    recorder: OpRecorder, source: Any, flat: torch.Tensor, first_tensor: torch.Tensor
) -> Storage:
    """Return a CPU storage's upload, cached on the storage so that tensors share it.

    Args:
        flat: the full storage as a vector.
        first_tensor: the first tensor on it. If it covers the storage in order, the upload gets
            its shape, and the tensor is no view.
    """
    uploaded = getattr(source, "_lazygt_storages", None)
    if uploaded is None:
        uploaded = {}
        source._lazygt_storages = uploaded
    key = (id(recorder), flat.dtype)
    if key not in uploaded:
        covers = first_tensor.numel() == flat.numel() and first_tensor.is_contiguous()
        values = first_tensor if covers else flat
        uploaded[key] = storage_of(to_lazy(recorder, values))
    storage: Storage = uploaded[key]
    return storage


# -- device-dependent ops --------------------------------------------------------------------------


def _histc(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute a histogram of integers as float64 on CPUs: torch's CPU kernel needs floats."""
    dtype = args[0].dtype
    if recorder.worker_device != "cpu" or dtype not in _INTEGER_DTYPES:
        return NotImplemented
    as_float64 = recorder.record(aten._to_copy.default, (args[0],), {"dtype": torch.float64})
    counts = recorder.record(func, (as_float64, *args[1:]), kwargs)
    return recorder.record(aten._to_copy.default, (counts,), {"dtype": dtype})


_INTEGER_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def _group_norm(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record a group norm, and note its input's memory format for the backward."""
    results = recorder.record_plain(func, args, kwargs)
    memory_format = suggest_memory_format(args[0])
    if recorder.worker_device == "cpu" and memory_format != torch.contiguous_format:
        _CHANNELS_LAST[storage_of(results[1])] = memory_format
    return results


def _group_norm_backward(recorder: OpRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Compute the gradient in the memory format of the norm's input, as torch does on a CPU."""
    grad, source, mean, *rest = args
    memory_format = _CHANNELS_LAST.get(storage_of(mean))
    if memory_format is None:
        return NotImplemented
    converted = [
        recorder.record(aten.clone.default, (t,), {"memory_format": memory_format})
        for t in (grad, source)
    ]
    return recorder.record_plain(func, (*converted, mean, *rest), kwargs)


#: Storage of a group norm's means -> the memory format of its input.
_CHANNELS_LAST: WeakKeyDictionary[Storage, torch.memory_format] = WeakKeyDictionary()


# -- data-dependent results ------------------------------------------------------------------


def data_dependent(
    recorder: OpRecorder, trace: Trace, f: OpFacts, args: Args, kwargs: Kwargs
) -> Any:
    """Ship the trace and wait for an op's results, whose shapes only the values determine."""
    reply = recorder.sink.submit(trace, f"data-dependent: {f.name}", None, True)
    targets = list(written_tensors(f, args, kwargs))
    results = sum(kind[0] != "w" for kind in f.outputs)
    if (len(reply.returned), len(reply.written)) != (results, len(targets)):
        raise ProtocolError(f"worker 0 sent other results than {f.name} has")
    for target, (meta, remote) in zip(targets, reply.written, strict=True):
        if meta.shape != tuple(target.shape):
            resize(target, meta)
        if view_of(target) is None:
            storage_of(target).set_remote(remote)
        else:
            value = remote_tensor(recorder, meta, remote)
            recorder.index_of(target)  # a new trace has begun: the viewed storage enters
            write(recorder.trace, target, recorder.index_of(value))
    outputs: list[Any] = []
    returned = iter(reply.returned)
    for position, kind in enumerate(f.outputs):
        if kind[0] == "w":
            argument = returned_write(f, position)
            outputs.append(kwargs[argument] if isinstance(argument, str) else args[argument])
        else:
            outputs.append(_received(recorder, next(returned)))
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _received(recorder: OpRecorder, item: Any) -> Any:
    """Return a received result: a handle for (meta, value), a list of these, or a plain value."""
    if isinstance(item, list):
        return [_received(recorder, element) for element in item]
    if isinstance(item, tuple):
        return remote_tensor(recorder, *item)
    return item


_HANDLERS: dict[Any, Handler] = {
    aten._local_scalar_dense.default: item,
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy,
    aten.empty.memory_format: empty,
    aten.empty_strided.default: empty_strided,
    aten._pack_padded_sequence.default: _pack_padded,
    aten.lift_fresh.default: same,
    aten._pin_memory.default: same,
    aten.detach_.default: same,
    aten.detach.default: same_view,
    aten.alias.default: same_view,
    aten.view.default: same_shape_view,
    aten.histc.default: _histc,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.as_strided.default: pieces.as_strided,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.arange.start_out: pieces.arange,
    aten.slice_backward.default: pieces.slice_backward,
    aten.slice_scatter.default: pieces.slice_scatter,
    aten.view.dtype: pieces.at_fixed_position,
    aten.view_as_complex.default: pieces.at_fixed_position,
    aten._sparse_compressed_tensor_unsafe.default: refuse_layout,
    aten.sparse_compressed_tensor.comp_plain_value: refuse_layout,
    aten.sparse_compressed_tensor.comp_plain_value_size: refuse_layout,
    aten._sparse_coo_tensor_unsafe.default: refuse_layout,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: refuse_layout,
    aten.resize_.default: _resize,
    aten.set_.source_Tensor: _set_source,
    aten.set_.source_Storage: _set_storage,
    aten.set_.source_Storage_storage_offset: _set_storage,
}


# -- draws with a user's generator -----------------------------------------------------------------
# The generator is an object of this process that other code may draw from, set and read at any
# time, so its stream stays here. Operands that an op reads are fetched, which is a sync point; ops
# that only fill a tensor (``normal_``, ``randperm``) read none.

#: Ops that read only the shape of their first operand.
_SHAPED = ("aten.rand_like", "aten.randn_like", "aten.randint_like")


def draw_in_client(
    recorder: OpRecorder, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a random op on CPU copies of its operands, and record its results as uploads."""
    written = {id(t) for t in written_tensors(f, args, kwargs)}
    reads_shape_only = f.name.startswith(_SHAPED)
    #: id of a written CPU tensor -> (the CPU tensor, the lazy tensor)
    results_by_id: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def to_host(a: Any) -> Any:
        """Return a CPU tensor for a lazy argument: its values, or uninitialised."""
        if isinstance(a, torch.Generator):
            return host_generator(a)
        if not is_lazy(a):
            return a
        if id(a) not in written and not reads_shape_only:
            return host_copy(a)
        host_tensor = TensorMeta.of(a).empty("cpu")
        if id(a) in written:
            results_by_id[id(host_tensor)] = host_tensor, a
        return host_tensor

    def to_user(result: Any) -> Any:
        """Return the user's tensor for a CPU result."""
        if id(result) in results_by_id:
            return results_by_id[id(result)][1]
        return to_lazy(recorder, result) if isinstance(result, torch.Tensor) else result

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    results = f.func(*host_args, **host_kwargs)
    for host_tensor, target in results_by_id.values():
        if host_tensor.shape != target.shape:
            resize(target, TensorMeta.of(host_tensor))
        recorder.record(aten.copy_.default, (target, host_tensor), {})
    return tree_map(to_user, results)
