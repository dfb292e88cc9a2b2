"""``torch.autocast``: policies that cast each op's arguments, by the workers' device.

The tables are those of ``ATen/autocast_mode.cpp`` for CPU and CUDA. An op that the installed torch
does not cast on a device is not cast here either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lazygt.record.context import NAME, session_stack, workers_device
from lazygt.record.patches import Patch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: Function that calls an overload with arguments cast by autocast (in ATen: ``CastPolicy``, whose
#: names are in parentheses below).
Policy = Callable[[torch._ops.OpOverload, Args, Kwargs], Any]

_KEY: Any = torch._C.DispatchKey
_KEYS = torch._C.DispatchKeySet(_KEY.AutocastPrivateUse1)


# -- policies --------------------------------------------------------------------------------


def _to_lower_precision(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Compute in autocast's dtype (``lower_precision_fp``)."""
    return _call_in(torch.get_autocast_dtype(NAME), overload, args, kwargs)


def _to_float32(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Compute in float32 (``fp32``)."""
    return _call_in(torch.float32, overload, args, kwargs)


def _promote(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Compute in float32 if an operand has it (``promote``)."""
    tensors = [t for a in (*args, *kwargs.values()) for t in (a if _is_list(a) else (a,))]
    if any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in tensors):
        return _call_in(torch.float32, overload, args, kwargs)
    return overload(*args, **kwargs)


def _float32_result(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Set a float32 result dtype if the call has none (``fp32_set_opt_dtype``)."""
    position = [argument.name for argument in overload._schema.arguments].index("dtype")
    dtype = args[position] if position < len(args) else kwargs.get("dtype")
    if dtype is None and _is_cast(args[0]):
        args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
    return overload(*args, **kwargs)


def _float32_norm(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Call the norm's overload with a float32 result dtype (``fp32_append_dtype``)."""
    if not _is_cast(args[0]):
        return overload(*args, **kwargs)
    norm = torch.ops.aten.norm
    if overload is norm.Scalar:
        return norm.ScalarOpt_dtype(*args, **kwargs, dtype=torch.float32)
    full_args = (*args, False)[:4]  # with keepdim, which may be left out
    return norm.ScalarOpt_dim_dtype(*full_args, **kwargs, dtype=torch.float32)


def _refuse(overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Raise RuntimeError: the op is unsafe to autocast."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
        "use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which are safe"
    )


def _call_in(
    dtype: torch.dtype, overload: torch._ops.OpOverload, args: Args, kwargs: Kwargs
) -> Any:
    """Call an op with its floating-point arguments cast to a dtype."""
    cast = [_cast(a, dtype) for a in args]
    return overload(*cast, **{name: _cast(a, dtype) for name, a in kwargs.items()})


def as_cudnn(layers: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap recurrent layers: under cuDNN, autocast computes in float16 for any autocast dtype."""

    @wraps(layers)
    def op(x: torch.Tensor, *args: Any) -> Any:
        cudnn = workers_device() != "cpu" and torch.backends.cudnn.enabled and x.numel() > 0
        if not (cudnn and torch.is_autocast_enabled(NAME)):
            return layers(x, *args)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return layers(*(_cast(a, torch.float16) for a in (x, *args)))

    return op


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    """Return an argument with autocast's tensors in it cast to a dtype."""
    if isinstance(arg, torch.Tensor):
        return arg.to(dtype) if _is_cast(arg) and arg.dtype != dtype else arg
    return [_cast(item, dtype) for item in arg] if _is_list(arg) else arg


def _is_cast(t: Any) -> bool:
    """Return whether autocast casts a tensor: a float one of the workers, not float64."""
    if not isinstance(t, torch.Tensor) or not t.is_floating_point() or t.dtype == torch.float64:
        return False
    return t.device.type == NAME or workers_device() == "cpu"


def _is_list(a: Any) -> bool:
    return isinstance(a, list | tuple)


# -- tables ----------------------------------------------------------------------------------


def _table(*rows: tuple[Policy, str]) -> dict[str, Policy]:
    """Return op -> policy from pairs of a policy and op names."""
    return {name: policy for policy, names in rows for name in names.split()}


#: Device of the workers -> op -> its policy.
TABLES = {
    "cpu": _table(
        (
            _to_lower_precision,
            """_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm
            baddbmm bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
            conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear
            matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention""",
        ),
        (
            _to_float32,
            """_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
            avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
            cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss
            ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2
            fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
            fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d
            geqrf grid_sampler grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss
            inverse kl_div l1_loss linalg_cholesky linalg_cholesky_ex linalg_cond
            linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
            linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
            linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
            linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals
            linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d
            max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
            multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d
            orgqr ormqr pinverse poisson_nll_loss polar prod prod.dim_int qr quantile
            quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
            replication_pad3d smooth_l1_loss soft_margin_loss stft stft.center svd trace
            triangular_solve triplet_margin_loss view_as_complex""",
        ),
        (_promote, "cat index_copy stack"),
    ),
    "cuda": _table(
        (
            _to_lower_precision,
            """_convolution _convolution.deprecated _scaled_dot_product_flash_attention
            _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm
            chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
            conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose
            einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
            rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention""",
        ),
        (
            _to_float32,
            """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
            _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
            binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
            dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss
            kl_div l1_loss layer_norm log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
            multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d
            nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar
            pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
            soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
            upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
            upsample_nearest3d upsample_trilinear3d""",
        ),
        (
            _float32_result,
            """cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm
            log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList""",
        ),
        (_float32_norm, "norm.Scalar norm.ScalarOpt_dim"),
        (
            _promote,
            """addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add
            tensordot vdot""",
        ),
        (_refuse, "binary_cross_entropy"),
    ),
}


# -- registration ----------------------------------------------------------------------------


def register_autocast() -> torch.library.Library:
    """Register the casting kernels for device ``lazygt``."""
    library = torch.library.Library("aten", "IMPL")
    for name in sorted({name for table in TABLES.values() for name in table}):
        policies = {
            device: table[name]
            for device, table in TABLES.items()
            if name in table and torch_casts(name, device)
        }
        if policies:
            kernel = _casting(_overload(name), policies)
            library.impl(name, kernel, "AutocastPrivateUse1", with_keyset=True)
    return library


def fall_through(library: torch.library.Library) -> None:
    """Let every other op bypass autocast; ``library`` is one of the namespace ``_``."""
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def torch_casts(name: str, device: str) -> bool:
    """Return whether the installed torch casts an op on a device."""
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}", f"Autocast{device.upper()}"
        )
    except RuntimeError:  # it has no such op
        return False


def _overload(name: str) -> torch._ops.OpOverload:
    """Return the overload ``name`` or ``name.overload`` of aten."""
    packet, _, overload_name = name.partition(".")
    overload: torch._ops.OpOverload = getattr(
        getattr(torch.ops.aten, packet), overload_name or "default"
    )
    return overload


def _casting(overload: torch._ops.OpOverload, policies: dict[str, Policy]) -> Callable[..., Any]:
    """Return the Autocast kernel of an op: it applies the policy of the workers' device."""

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        policy = policies.get(workers_device())
        if policy is None:  # as a fallthrough: ops that it calls are cast
            return overload.redispatch(keys.remove(_KEY.AutocastPrivateUse1), *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            return policy(overload, args, kwargs)

    return kernel


# -- autocast of the workers' device -----------------------------------------------------------
# ``torch.autocast("cpu")`` in a session on CPUs, and ``torch.autocast("cuda")`` in one on GPUs,
# also apply to lazy tensors: their ops run on that device.

_autocast: Any = torch.autocast
_init, _enter, _exit = _autocast.__init__, _autocast.__enter__, _autocast.__exit__


@wraps(_init)
def _begin(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Create an autocast context; a CUDA one is for lazy tensors if the client has no GPU."""
    if device_type == "cuda" == _device_in_session() and not torch.cuda.is_available():
        device_type = NAME
    _init(self, device_type, *args, **kwargs)


@wraps(_enter)
def _enter_both(self: Any) -> Any:
    """Enter the context, and with it one for lazy tensors if it is for the workers' device."""
    inner = None
    if self.device == _device_in_session():
        inner = _autocast(NAME, self.fast_dtype, self._enabled, self._cache_enabled)
    entered = _enter(self)
    if inner is not None:
        _enter(inner)
    vars(self).setdefault("_lazygt", []).append(inner)
    return entered


@wraps(_exit)
def _exit_both(self: Any, *error: Any) -> Any:
    """Exit the context, and the one for lazy tensors."""
    entered = vars(self).get("_lazygt")  # none, if lazygt was imported in the block
    inner = entered.pop() if entered else None
    if inner is not None:
        _exit(inner, *error)
    return _exit(self, *error)


def _device_in_session() -> str:
    """Return the workers' device type inside a session; "" outside."""
    return workers_device() if session_stack else ""


_WHY = "autocast of the device that workers compute on is for lazy tensors, too"
PATCHES = (
    Patch(_autocast, "__init__", _begin, _WHY),
    Patch(_autocast, "__enter__", _enter_both, _WHY),
    Patch(_autocast, "__exit__", _exit_both, _WHY),
)
