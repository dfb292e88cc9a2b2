"""Meta kernels of lazygt's own, where torch's refuse valid calls or return wrong shapes.

They have the op's parameters, tensors as meta tensors, and raise the errors of torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from lazygt.graph.meta import TensorMeta, contiguous_stride

# -- strides of kernels ----------------------------------------------------------------------------
# torch's meta kernels give some results other strides than its CPU and GPU kernels. Strides decide
# which views are allowed, so a handle must show those of eager torch. Each op is listed under the
# layout of its kernel. The workers report an op that the list lacks (see
# ``infer.Inference.correct``).

Strides = tuple[int, ...]
#: (operands, shape of the result) -> its strides.
Layout = Callable[[Sequence[torch.Tensor], tuple[int, ...]], Strides]


def with_kernel_strides(
    name: str,
    device_type: str,
    operands: Sequence[torch.Tensor],
    fresh: Sequence[TensorMeta | None],
) -> list[TensorMeta | None]:
    """Return the metas of an op's new results with the strides of its real kernel.

    Args:
        device_type: of the workers.
        operands: the tensors that the op gets, in order, as meta tensors.
        fresh: the metas of torch's meta kernel.
    """
    by_device = _ON_CPU if device_type == "cpu" else _ON_GPU
    layouts = _EVERYWHERE.get(name) or by_device.get(name)
    if layouts is None:
        return list(fresh)
    metas = list(fresh)
    if name.startswith("aten._foreach_"):
        layouts *= len(metas)
    for number, layout in enumerate(layouts[: len(metas)]):
        meta = metas[number]
        if meta is not None and layout is not None and meta.shape:
            strides = layout(operands, meta.shape)
            metas[number] = TensorMeta(meta.shape, strides, meta.dtype)
    return metas


def _row_major(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return row-major strides, for any operands."""
    return contiguous_stride(shape)


def iterated_strides(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return the strides that TensorIterator gives a result of up to three operands.

    A lone operand is combined with a number. torch makes the number a CPU tensor, which a meta
    kernel ignores, and so preserves strides of dims of one element, unlike TensorIterator.
    """
    if len(operands) < 3:
        other = operands[-1] if len(operands) > 1 else torch.empty((), device="meta")
        return torch.ne(_halves_as_floats(operands[0]), _halves_as_floats(other)).stride()
    return torch.lerp(*map(_floats, operands)).stride()


def _halves_as_floats(t: torch.Tensor) -> torch.Tensor:
    """Return a half tensor in float32: meta kernels of halves lose strides of 0."""
    return _floats(t) if t.dtype in (torch.float16, torch.bfloat16) else t


def _floats(t: torch.Tensor) -> torch.Tensor:
    """Return a float32 meta tensor of the same shape and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta")


def _iterated_over(*positions: int) -> Layout:
    """Return TensorIterator's layout over some of the operands, in the kernel's order."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        return iterated_strides([operands[position] for position in positions], shape)

    return layout


def _power(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return the strides of the first operand times a power of a number, which is row-major."""
    return iterated_strides((operands[0], torch.empty(operands[1].shape, device="meta")), shape)


def _negated(position: int) -> Layout:
    """Return TensorIterator's layout for a function of one operand."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        return _floats(operands[position]).neg().stride()

    return layout


def _format_of(position: int) -> Layout:
    """Return a layout: channels-last if the operand is, else row-major."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        form = suggest_memory_format(operands[position])
        return torch.empty(shape, device="meta", memory_format=form).stride()

    return layout


def _like(position: int) -> Layout:
    """Return the layout of the operand, if it is dense and has the result's shape."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        source = operands[position]
        if tuple(source.shape) != shape:
            return contiguous_stride(shape)
        return source.clone().stride()  # a clone also has usual strides in dims of one element

    return layout


def _convolved(*positions: int) -> Layout:
    """Return cuDNN's layout: channels-last if one of the operands is, except in float64.

    Only a torch that was built with CUDA can be asked for it.
    """

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        forms = [suggest_memory_format(operands[position]) for position in positions]
        channels_last = next((form for form in forms if form != torch.contiguous_format), None)
        if channels_last is None or operands[0].dtype == torch.float64:
            return contiguous_stride(shape)
        return torch.empty(shape, device="meta", memory_format=channels_last).stride()

    return layout


def _table(
    *families: tuple[tuple[Layout | None, ...], str],
) -> dict[str, tuple[Layout | None, ...]]:
    """Return op -> layouts from pairs of layouts and op names."""
    return {f"aten.{name}": layouts for layouts, names in families for name in names.split()}


#: Op -> layouts of its fresh results; None: the meta kernel is right.
_EVERYWHERE = _table(
    (
        (iterated_strides,),
        """_conj_physical.default add.Scalar add.Tensor bitwise_and.Scalar
        bitwise_and.Scalar_Tensor bitwise_left_shift.Scalar_Tensor
        bitwise_left_shift.Tensor_Scalar bitwise_or.Scalar bitwise_or.Scalar_Tensor
        bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor_Scalar
        bitwise_xor.Scalar bitwise_xor.Scalar_Tensor clamp.Tensor clamp_max.Tensor
        clamp_min.Tensor complex.default copysign.Scalar copysign.Tensor div.Scalar
        div.Tensor div.Tensor_mode elu_backward.default eq.Scalar floor_divide.default
        fmod.Scalar ge.Scalar gt.Scalar hardsigmoid_backward.default
        hardswish_backward.default hardtanh_backward.default heaviside.default
        isfinite.default lcm.default le.Scalar logaddexp.default logaddexp2.default
        logical_and.default logical_or.default logical_xor.default
        logit_backward.default lt.Scalar mul.Scalar mul.Tensor
        native_dropout_backward.default ne.Scalar polar.default remainder.Scalar
        remainder.Scalar_Tensor rsub.Scalar softplus_backward.default
        special_xlog1py.default special_xlog1py.other_scalar special_xlog1py.self_scalar
        special_zeta.other_scalar special_zeta.self_scalar sub.Scalar sub.Tensor
        true_divide.Tensor where.self xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor""",
    ),
    (
        (_row_major,),
        """_foreach_pow.ScalarAndTensor _weight_norm_interface.default isin.Tensor_Scalar
        isin.Tensor_Tensor pow.Scalar renorm.default tril.default triu.default""",
    ),
    ((_iterated_over(1, 0),), "leaky_relu_backward.default threshold_backward.default"),
    ((_iterated_over(2, 0),), "rrelu_with_noise_backward.default"),
    ((_iterated_over(1, 2, 0),) * 2, "_prelu_kernel_backward.default"),
    ((_negated(0),), "abs.default isinf.default neg.default pow.Tensor_Scalar"),
    ((_negated(2),), "soft_margin_loss_backward.default"),
    ((_like(0), _like(0)), "frexp.Tensor sort.default"),
    ((_power,), "ldexp.Tensor"),
    (
        (_like(0),),
        """_prelu_kernel.default binary_cross_entropy.default deg2rad.default fill.Scalar
        flip.default hardtanh.default nan_to_num.default rad2deg.default relu6.default
        resize_as.default zero.default""",
    ),
    ((_like(1),), "binary_cross_entropy_backward.default"),
)

_ON_CPU = _table(
    (
        (_row_major,),
        """_log_softmax_backward_data.default huber_loss_backward.default
        mse_loss_backward.default normal.Tensor_Tensor smooth_l1_loss_backward.default""",
    ),
    ((_like(0),), "log_sigmoid_backward.default"),
    ((_row_major, _row_major), "log_sigmoid_forward.default"),
    ((_row_major, _row_major, _row_major), "native_layer_norm_backward.default"),
    (
        (_format_of(0),),
        """_batch_norm_no_update.default _batch_norm_with_update.default
        _native_batch_norm_legit.default _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_no_training.default channel_shuffle.default
        max_unpool2d.default native_batch_norm.default native_group_norm.default
        pixel_shuffle.default reflection_pad2d.default reflection_pad3d.default
        replication_pad2d.default replication_pad3d.default roll.default""",
    ),
    (
        (_format_of(1),),
        """batch_norm_backward.default native_batch_norm_backward.default
        native_group_norm_backward.default reflection_pad2d_backward.default
        reflection_pad3d_backward.default replication_pad2d_backward.default
        replication_pad3d_backward.default""",
    ),
)

_ON_GPU = _table(
    ((_convolved(0, 1),), "convolution.default"),
    ((_convolved(1, 2), _convolved(1, 2)), "convolution_backward.default"),
    ((_like(0),), "log_sigmoid_forward.default log_sigmoid_backward.default"),
)


# -- meta kernels ----------------------------------------------------------------------------------

aten: Any = torch.ops.aten
#: Dtypes of a grouped product, with their names in torch's kernels.
_CPP_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half",
}
#: Names of the dtypes of recurrent layers in torch's errors.
_TYPE_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
}
#: Alignment of the rows of a grouped product, in bytes.
_ALIGNMENT = 16


def _check(holds: bool, message: str) -> None:
    """Raise RuntimeError with ``message`` unless the condition holds."""
    if not holds:
        raise RuntimeError(message)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Infer a grouped matrix product; torch's own meta kernel accepts only bfloat16."""
    flat = [t.dim() == 2 for t in (a, b)]
    _check_factors(a, b, flat)
    _check(
        (offs is not None) == any(flat),
        "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d",
    )
    if offs is not None:
        _check(offs.dim() == 1, "offs has to be 1D")
        _check(offs.dtype == torch.int32, "Offsets have to be int32")
    _check(bias is None, "Bias not supported yet")
    _check(out_dtype in (None, a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    shape = _grouped_shape(a, b, offs)
    names = [_CPP_NAMES[t.dtype] for t in (a, b)]
    _check(
        a.dtype == b.dtype,
        f"expected m1 and m2 to have the same dtype, but got: {names[0]} != {names[1]}",
    )
    return _rows_aligned(shape, a.dtype)


def _check_factors(a: torch.Tensor, b: torch.Tensor, flat: list[bool]) -> None:
    """Check dtypes, dims and strides of a grouped product's operands."""
    for name, t in (("mat_a", a), ("mat_b", b)):
        _check(
            t.dtype in _CPP_NAMES,
            f"Expected {name} to be Float32, BFloat16 or Float16 matrix, got {t.dtype}",
        )
    for name, t in (("mat_a", a), ("mat_b", b)):
        _check(t.dim() in (2, 3), f"{name} has to be 2 or 3d")
    _check(
        all(flat) or a.size(-1) == b.size(-2),
        "contraction dimension of mat_a and mat_b must match",
    )
    _check_strides(a)
    _check_strides(b)


def _check_strides(t: torch.Tensor) -> None:
    """Check that rows or columns have no gaps, and begin at multiples of 16 bytes."""
    (rows, columns), (row, column) = t.shape[-2:], t.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        step = column
    elif column == 1 and row >= max(1, columns):
        step = row
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(t.stride())} for strides and {list(t.shape)} for "
            f"sizes"
        )
    aligned = step * t.element_size() % _ALIGNMENT == 0
    _check(aligned, "strides should be multiple of 16 bytes")


def _grouped_shape(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> list[int]:
    """Return the shape of a grouped product."""
    wrong = "matrix batch sizes have to match"
    if a.dim() == 2:
        assert offs is not None
        if b.dim() == 2:
            return [offs.size(0), a.size(0), b.size(1)]
        _check(offs.size(0) == b.size(0), wrong)
        return [a.size(0), b.size(-1)]
    if b.dim() == 2:
        assert offs is not None
        _check(offs.size(0) == a.size(0), wrong)
        return [a.size(1), b.size(1)]
    _check(a.size(0) == b.size(0), "batched dimension has to match")
    return [a.size(0), a.size(1), b.size(-1)]


def _rows_aligned(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a result with rows padded to 16 bytes."""
    elements = _ALIGNMENT // dtype.itemsize
    row = (shape[-1] + elements - 1) // elements * elements
    stride = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _multi_margin_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """Infer the loss; for a target without dims torch's own meta kernel returns a vector."""
    loss: torch.Tensor = aten.multi_margin_loss.default(x, target, p, margin, weight, reduction)
    return loss if target.dim() else loss.new_empty(())


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Infer the loss; for a sample without a batch torch's own meta kernel returns a vector."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return (loss if target.dim() > 1 else loss.new_empty(())), is_target


def _view_copy(source: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Infer a reshaped copy; torch's own meta kernel refuses tensors that no view can reshape."""
    return source.reshape(size).contiguous()


def _cudnn_grid_sampler(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Infer the samples; torch has no meta kernel."""
    sampled: torch.Tensor = aten.grid_sampler_2d.default(x, grid, 0, 0, True)
    return torch.empty(sampled.shape, dtype=x.dtype, device="meta")


def _cudnn_grid_sampler_backward(
    x: torch.Tensor, grid: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Infer both gradients; torch has no meta kernel."""
    of_x, of_grid = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (x, grid))
    return of_x, of_grid


def _cudnn_rnn(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Infer a recurrent layer's results.

    torch's own meta kernel packs no weights, and returns row-major batch-first outputs. Only cuDNN
    knows the sizes of the last two results, reserve and packed weights.
    """
    _check_same_dtype(x, [hx, cx], "hidden")
    _check_same_dtype(x, weight, "parameter")
    directions, width = 2 if bidirectional else 1, proj_size or hidden_size
    samples = batch_sizes[0] if batch_sizes else x.size(0 if batch_first else 1)
    states = [num_layers * directions, samples]
    _check_size(hx, [*states, width], "hidden")
    if cx is not None:
        _check_size(cx, [*states, hidden_size], "cell")
    out = _steps_first(x, batch_first, batch_sizes, width * directions)
    hy = hx.new_empty(hx.shape)
    cy = hx.new_empty(0 if cx is None else cx.shape)
    packed = x.new_empty(sum(w.numel() for w in weight)) if weight_buf is None else weight_buf
    return out, hy, cy, x.new_empty(0, dtype=torch.uint8), packed


def _check_same_dtype(x: torch.Tensor, tensors: Sequence[torch.Tensor | None], name: str) -> None:
    """Raise torch's error if a tensor's dtype differs from the input's."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype != x.dtype:
            expected, actual = (_TYPE_NAMES.get(t.dtype, str(t.dtype)) for t in (x, tensor))
            raise RuntimeError(
                f"Input and {name} tensors are not the same dtype, found input tensor with "
                f"{expected} and {name} tensor with {actual}"
            )


def _check_size(state: torch.Tensor, expected: list[int], name: str) -> None:
    """Raise torch's error if a state has another shape than expected."""
    size = [*state.shape]
    _check(size == expected, f"Expected {name} size {expected}, got {size}")


def _steps_first(
    x: torch.Tensor, batch_first: bool, batch_sizes: list[int], width: int
) -> torch.Tensor:
    """Return a sequence like ``x`` with ``width`` features, step-major in memory."""
    if not batch_first or batch_sizes:
        return x.new_empty((*x.shape[:-1], width))
    return x.new_empty((x.size(1), x.size(0), width)).transpose(0, 1)


def _cudnn_rnn_backward(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    output: torch.Tensor,
    grad_output: torch.Tensor | None,
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: torch.Tensor | None,
    reserve: torch.Tensor,
    output_mask: list[bool],
) -> tuple[Any, ...]:
    """Infer the gradients; torch has no meta kernel."""
    _check(train, "cudnn RNN backward can only be called in training mode")
    of_x = _steps_first(x, batch_first, batch_sizes, x.size(-1))
    of_hx, of_cx = (None if t is None else t.new_empty(t.shape) for t in (hx, cx))
    return of_x, of_hx, of_cx, [w.new_empty(w.shape) for w in weight] if output_mask[3] else []


#: Op -> meta kernel.
META_KERNELS: dict[str, Callable[..., Any]] = {
    "aten._cudnn_rnn.default": _cudnn_rnn,
    "aten._cudnn_rnn_backward.default": _cudnn_rnn_backward,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.cudnn_grid_sampler.default": _cudnn_grid_sampler,
    "aten.cudnn_grid_sampler_backward.default": _cudnn_grid_sampler_backward,
    "aten.multi_margin_loss.default": _multi_margin_loss,
    "aten.multilabel_margin_loss_forward.default": _multilabel_margin_loss,
    "aten.view_copy.default": _view_copy,
}
