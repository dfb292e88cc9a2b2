"""Strides of results where torch's meta kernels differ from its CPU and GPU kernels.

Strides decide which views are allowed, so a handle must show those of eager torch. Each op is
listed under the layout of its kernel. The workers notice an op that the list lacks (see
``infer.Inference.correct``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._prims_common import suggest_memory_format

from lazygt.graph.meta import TensorMeta, contiguous_stride

Strides = tuple[int, ...]
#: (operands, shape of the result) -> its strides.
Layout = Callable[[Sequence[torch.Tensor], tuple[int, ...]], Strides]


def relaid(
    name: str,
    device_type: str,
    operands: Sequence[torch.Tensor],
    fresh: Sequence[TensorMeta | None],
) -> list[TensorMeta | None]:
    """Return the metas of an op's fresh results, with the strides that its kernel gives.

    Args:
        device_type: of the workers.
        operands: the tensors that the op takes, in order, as meta tensors.
        fresh: the metas of torch's meta kernel.
    """
    here = _ON_CPU if device_type == "cpu" else _ON_GPU
    layouts = _EVERYWHERE.get(name) or here.get(name)
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


def _rows(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return row-major strides, for any operands."""
    return contiguous_stride(shape)


def _iterated(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return the strides that TensorIterator gives a result of up to three operands.

    A lone operand goes with a number. torch makes it a CPU tensor, which a meta kernel leaves out,
    and so keeps strides of dims of one element that TensorIterator does not.
    """
    if len(operands) < 3:
        other = operands[-1] if len(operands) > 1 else torch.empty((), device="meta")
        return torch.ne(_single(operands[0]), _single(other)).stride()
    return torch.lerp(*map(_floats, operands)).stride()


def _single(t: torch.Tensor) -> torch.Tensor:
    """Return halves in single precision: meta kernels convert halves, and lose strides of 0."""
    return _floats(t) if t.dtype in (torch.float16, torch.bfloat16) else t


def _floats(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta")


def _iterated_over(*positions: int) -> Layout:
    """Return the same layout over some of the operands, in the kernel's order."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        return _iterated([operands[position] for position in positions], shape)

    return layout


def _power(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Return the strides of the first operand times a power of a number, which is row-major."""
    return _iterated((operands[0], torch.empty(operands[1].shape, device="meta")), shape)


def _negated(position: int) -> Layout:
    """Return TensorIterator's layout for a function of that operand alone."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        return _floats(operands[position]).neg().stride()

    return layout


def _format_of(position: int) -> Layout:
    """Return a layout: channels-last where that operand is, else row-major."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        form = suggest_memory_format(operands[position])
        return torch.empty(shape, device="meta", memory_format=form).stride()

    return layout


def _like(position: int) -> Layout:
    """Return the layout of that operand, if it is dense and has the result's shape."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        source = operands[position]
        if tuple(source.shape) != shape:
            return contiguous_stride(shape)
        return source.clone().stride()  # meta ``empty_like`` mends strides that find no element

    return layout


def _convolved(*positions: int) -> Layout:
    """Return cuDNN's layout: channels-last if one of the operands is, except in float64.

    Only a torch that was built with CUDA can be asked for it.
    """

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        forms = [suggest_memory_format(operands[position]) for position in positions]
        last = next((form for form in forms if form != torch.contiguous_format), None)
        if last is None or operands[0].dtype == torch.float64:
            return contiguous_stride(shape)
        return torch.empty(shape, device="meta", memory_format=last).stride()

    return layout


def _table(
    *families: tuple[tuple[Layout | None, ...], str],
) -> dict[str, tuple[Layout | None, ...]]:
    return {f"aten.{name}": layouts for layouts, names in families for name in names.split()}


#: Op -> layouts of its fresh results; None: the meta kernel is right.
_EVERYWHERE = _table(
    (
        (_iterated,),
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
        (_rows,),
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
        (_rows,),
        """_log_softmax_backward_data.default huber_loss_backward.default
        mse_loss_backward.default normal.Tensor_Tensor smooth_l1_loss_backward.default""",
    ),
    ((_like(0),), "log_sigmoid_backward.default"),
    ((_rows, _rows), "log_sigmoid_forward.default"),
    ((_rows, _rows, _rows), "native_layer_norm_backward.default"),
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
