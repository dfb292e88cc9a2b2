"""Strides of results where torch's meta kernels give others than its kernels do.

Strides say which views are allowed, so what a handle shows must be what eager torch would give.
Each op stands under the way in which its kernel lays its result out. Where the list is
short of an op, the workers find out (see ``infer.Inference.correct``).
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
    """The metas of an op's fresh results, with the strides that its kernel gives.

    Args:
        device_type: what the workers compute on.
        operands: the tensors that the op takes, in order, as meta tensors.
        fresh: what torch's meta kernel says.
    """
    here = _ON_CPU if device_type == "cpu" else _ON_GPU
    layouts = _EVERYWHERE.get(name) or here.get(name)
    if layouts is None:
        return list(fresh)
    metas = list(fresh)
    for number, layout in enumerate(layouts[: len(metas)]):
        meta = metas[number]
        if meta is not None and layout is not None and meta.shape:
            strides = layout(operands, meta.shape)
            metas[number] = TensorMeta(meta.shape, strides, meta.dtype)
    return metas


def _rows(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """Row-major, whatever the operands are."""
    return contiguous_stride(shape)


def _iterated(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """As torch's own loop over elements lays out what it makes of two operands.

    One of them may be a number, which torch makes a tensor of: it is on the CPU, where a meta
    kernel leaves it out, and so keeps strides of dims of one element that the loop does not.
    """
    other = operands[-1] if len(operands) > 1 else torch.empty((), device="meta")
    return torch.ne(operands[0], other).stride()


def _selected(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """The same of up to three operands of any dtypes."""
    if len(operands) < 3:
        return _iterated(operands, shape)
    floats = [
        torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device="meta")
        for t in operands
    ]
    return torch.lerp(*floats).stride()


def _power(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
    """The first operand times a power of a number, which is row-major."""
    return _iterated((operands[0], torch.empty(operands[1].shape, device="meta")), shape)


def _format_of(position: int) -> Layout:
    """Channels-last where that operand is, else row-major."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        form = suggest_memory_format(operands[position])
        return torch.empty(shape, device="meta", memory_format=form).stride()

    return layout


def _like(position: int) -> Layout:
    """As that operand, if it is dense and has the result's shape."""

    def layout(operands: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Strides:
        source = operands[position]
        if tuple(source.shape) != shape:
            return contiguous_stride(shape)
        return torch.empty_like(source, device="meta").stride()

    return layout


def _convolved(*positions: int) -> Layout:
    """Channels-last where one of those operands is, as cuDNN does it, but not in double precision.

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
        """copysign.Tensor div.Tensor_mode floor_divide.default heaviside.default
        logaddexp.default logaddexp2.default logical_and.default logical_or.default
        logical_xor.default native_dropout_backward.default special_xlog1py.default
        xlogy.Tensor""",
    ),
    (
        (_iterated,),
        """_conj_physical.default add.Scalar add.Tensor bitwise_and.Scalar
        bitwise_and.Scalar_Tensor bitwise_left_shift.Scalar_Tensor
        bitwise_left_shift.Tensor_Scalar bitwise_or.Scalar bitwise_or.Scalar_Tensor
        bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar
        bitwise_xor.Scalar_Tensor clamp_max.Tensor clamp_min.Tensor copysign.Scalar
        deg2rad.default div.Scalar div.Tensor eq.Scalar fmod.Scalar ge.Scalar gt.Scalar
        hardtanh.default isfinite.default isinf.default lcm.default le.Scalar lt.Scalar
        mul.Scalar mul.Tensor nan_to_num.default ne.Scalar rad2deg.default relu6.default
        remainder.Scalar remainder.Scalar_Tensor rsub.Scalar special_xlog1py.other_scalar
        special_xlog1py.self_scalar special_zeta.other_scalar special_zeta.self_scalar
        sub.Scalar sub.Tensor true_divide.Tensor xlogy.Scalar_Other xlogy.Scalar_Self""",
    ),
    ((_selected,), "clamp.Tensor where.self"),
    ((_rows,), "pow.Scalar"),
    ((_power,), "ldexp.Tensor"),
    ((_like(0),), "binary_cross_entropy.default resize_as.default"),
    ((_like(1),), "binary_cross_entropy_backward.default"),
)

_ON_CPU = _table(
    (
        (_rows,),
        """_log_softmax_backward_data.default huber_loss_backward.default
        mse_loss_backward.default normal.Tensor_Tensor smooth_l1_loss_backward.default""",
    ),
    ((_rows, _rows), "log_sigmoid_forward.default"),
    ((_rows, _rows, _rows), "native_layer_norm_backward.default"),
    (
        (_format_of(0),),
        """_batch_norm_no_update.default _batch_norm_with_update.default
        _native_batch_norm_legit.default _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_no_training.default channel_shuffle.default
        max_unpool2d.default native_batch_norm.default native_group_norm.default
        pixel_shuffle.default reflection_pad2d.default
        reflection_pad3d.default replication_pad2d.default replication_pad3d.default""",
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
)
