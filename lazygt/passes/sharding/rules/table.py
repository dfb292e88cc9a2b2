"""Sharding rules in the einsum-like notation of ``factors``, one line of text per group of ops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import ascii_lowercase

from lazygt.passes.sharding.rules.attention import with_length_strategies
from lazygt.passes.sharding.rules.factors import rule, strategies_by
from lazygt.passes.sharding.rules.strategy import Call, Rule, Strategy, table

#: Rule for kernels that reject empty blocks.
_rejects_empty = partial(rule, no_empty=True)


def _trilinear(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``_trilinear``: a product of three operands, summed over ``sumdim``.

    The ``expand`` arguments insert dims of size 1 into each operand.
    """
    letters = ascii_lowercase[: len(call.shape("i1")) + len(call["expand1"])]
    operands = ["* " + _letters(letters, without=call[f"expand{number}"]) for number in (1, 2, 3)]
    result = _letters(letters, without=call["sumdim"])
    return strategies_by(call, f"{', '.join(operands)} -> {result}", no_empty=True)


def _letters(letters: str, without: Sequence[int]) -> str:
    """Join letters by spaces, except those at the positions ``without``."""
    return " ".join(letter for dim, letter in enumerate(letters) if dim not in without)


def _solve(call: Call) -> Sequence[Strategy]:
    """Return the strategies of a linear solve, with batches of vectors or matrices ``B``."""
    matrices, right_side = call.shape("A"), call.shape("B")
    has_vectors = len(right_side) == 1 or right_side == matrices[:-1]
    right_dims = "... !n" if has_vectors else "... !n !k"
    return strategies_by(
        call, f"... !n !n, {right_dims} -> {right_dims}, ... !n !n, ... !n, ...", no_empty=True
    )


def _isin(call: Call) -> Sequence[Strategy]:
    """Return the strategies of isin: a maximum over blocks of ``test_elements``.

    With ``invert`` the result is a minimum.
    """
    others = " ".join(ascii_lowercase[: len(call.shape("test_elements"))])
    return strategies_by(call, f"..., {others} -> {'min' if call['invert'] else 'max'} ...")


def _renorm(call: Call) -> Sequence[Strategy]:
    """Return the strategies of renorm: norms need full slices, so no other dim is sharded."""
    rank = call.rank
    dims = [f"!{letter}" for letter in ascii_lowercase[:rank]]
    dims[call["dim"]] = "z"
    text = " ".join(dims)
    return strategies_by(call, f"{text} -> {text}")


def _unsharded_addmv(call: Call) -> str:
    """Return the unsharded letters of addmv with an addend of one element.

    torch accepts such an addend only with certain local shapes of the product.
    """
    return "ik" if call.meta("self").numel == 1 else ""


def _unsharded_loss(call: Call) -> str:
    """Return the unsharded letters of a loss: the samples ``n``, if the loss is their mean."""
    return "n" if call["reduction"] == 1 else ""


def _unsharded_search(call: Call) -> str:
    """Return the unsharded letters of searchsorted: ``s`` with a sorter of global indices."""
    return "s" if call.has("sorter") else ""


def _unsharded_attention(call: Call) -> str:
    """Return the unsharded letters of an attention.

    Dropout is drawn for the full tensor. A causal mask depends on the global index of a query.
    """
    if call["dropout_p"] != 0:
        return "bhi"
    return "i" if call["is_causal"] else ""


#: Contractions. A contracted dim leaves partial sums.
_PRODUCTS: dict[str, Rule] = {
    **rule("mm.default", "* i k, * k j -> i j"),
    **rule("bmm.default", "* b i k, * b k j -> b i j"),
    **rule("mv.default", "* i k, * k -> i"),
    **rule("dot.default vdot.default", "* k, * k ->"),
    **rule("addmm.default addmm_.default", "+ i j, * i k, * k j -> i j"),
    **rule("baddbmm.default baddbmm_.default", "+ b i j, * b i k, * b k j -> b i j"),
    **rule("addmv.default addmv_.default", "+ i, * i k, * k -> i", unsharded=_unsharded_addmv),
    **rule("addbmm.default addbmm_.default", "+ i j, * b i k, * b k j -> i j"),
    **rule("addr.default addr_.default", "+ i j, * i, * j -> i j"),
    **rule("_addmm_activation.default", "i j, i !k, !k j -> i j"),
    **rule("_int_mm.default", "i k, k j -> i j"),
    **rule("_embedding_bag_per_sample_weights_backward.default", "* !b e, * !v e -> !k"),
    **rule("linalg_cross.default", "* ...@dim, * ...@dim -> ...@dim"),
    **_rejects_empty(
        "_cdist_forward.default _euclidean_dist.default", "... i !m, ... j !m -> ... i j"
    ),
    **_rejects_empty(
        "_cdist_backward.default", "* ... i j, ... i !m, ... j !m, ... i j -> ... i !m"
    ),
    **table("_trilinear.default", _trilinear),
}
#: Batches of matrices: sharded along the batch only.
_BATCHES: dict[str, Rule] = {
    **_rejects_empty("_linalg_det.default", "... !n !n -> ..., ... !n !n, ... !n"),
    **_rejects_empty("_linalg_slogdet.default", "... !n !n -> ..., ..., ... !n !n, ... !n"),
    **_rejects_empty(
        "linalg_inv_ex.default linalg_cholesky_ex.default", "... !n !n -> ... !n !n, ..."
    ),
    **_rejects_empty(
        "cholesky.default cholesky_inverse.default linalg_matrix_exp.default",
        "... !n !n -> ... !n !n",
    ),
    **_rejects_empty("linalg_qr.default", "... !m !n -> ... !m !p, ... !q !n"),
    **_rejects_empty("linalg_ldl_solve.default", "... !n !n, ... !n, ... !n !k -> ... !n !k"),
    **_rejects_empty(
        "cholesky_solve.default linalg_solve_triangular.default",
        "... !m !n, ... !p !q -> ... !r !s",
    ),
    **_rejects_empty("_linalg_svd.default", "... !m !n -> ... !m !p, ... !q, ... !r !n"),
    **_rejects_empty("_linalg_eigh.default linalg_eig.default", "... !n !n -> ... !n, ... !n !n"),
    **_rejects_empty("linalg_eigvals.default", "... !n !n -> ... !n"),
    **_rejects_empty("linalg_lu.default", "... !m !n -> ... !m !m, ... !m !p, ... !p !n"),
    **_rejects_empty("linalg_lu_factor_ex.default", "... !m !n -> ... !m !n, ... !p, ..."),
    **_rejects_empty("linalg_ldl_factor_ex.default", "... !n !n -> ... !n !n, ... !n, ..."),
    **_rejects_empty("linalg_lu_solve.default", "... !n !n, ... !n, ... !p !q -> ... !p !q"),
    **_rejects_empty("linalg_householder_product.default", "... !m !n, ... !k -> ... !m !n"),
    **_rejects_empty("linalg_pinv.atol_rtol_tensor", "... !m !n, ..., ... -> ... !n !m"),
    **_rejects_empty("lu_unpack.default", "... !m !n, ... !k -> ... !m !m, ... !m !p, ... !p !n"),
    **_rejects_empty("triangular_solve.default", "... !m !k, ... !m !m -> ... !m !k, ... !m !m"),
    **_rejects_empty("ormqr.default", "... !m !n, ... !k, ... !p !q -> ... !p !q"),
    **table("_linalg_solve_ex.default", _solve),
}
#: Fused attention: sharded by samples or heads; on CPUs also by queries. The GPU kernels reject
#: empty blocks.
_attention = partial(_rejects_empty, unsharded=_unsharded_attention)
_Q, _K, _V, _OUT = "b h !i !e", "b h !j !e", "b h !j !f", "b h !i !f"
_SUMS, _BIAS = "b h !...", "b h !i !j"
_GRADIENTS = f"{_Q}, {_K}, {_V}"
_FORWARD: dict[str, Rule] = {
    **_attention(
        "_scaled_dot_product_flash_attention.default", f"{_Q}, {_K}, {_V} -> {_OUT}, {_SUMS}"
    ),
    **_attention(
        "_scaled_dot_product_efficient_attention.default "
        "_scaled_dot_product_cudnn_attention.default "
        "_scaled_dot_product_fused_attention_overrideable.default",
        f"{_Q}, {_K}, {_V}, {_BIAS} -> {_OUT}, {_SUMS}",
    ),
    **_attention(
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "b h i !e, b h !j !e, b h !j !f, b h i !j -> b h i !f, b h i",
    ),
}
_BACKWARD: dict[str, Rule] = {
    **_attention(
        "_scaled_dot_product_flash_attention_backward.default",
        f"{_OUT}, {_Q}, {_K}, {_V}, {_OUT}, {_SUMS} -> {_GRADIENTS}",
    ),
    **_attention(
        "_scaled_dot_product_efficient_attention_backward.default",
        f"{_OUT}, {_Q}, {_K}, {_V}, {_BIAS}, {_OUT}, {_SUMS} -> {_GRADIENTS}, {_BIAS}",
    ),
    **_attention(
        "_scaled_dot_product_cudnn_attention_backward.default",
        f"{_OUT}, {_Q}, {_K}, {_V}, {_OUT}, {_SUMS}, _, _, {_BIAS} -> {_GRADIENTS}",
    ),
    **_attention(
        "_scaled_dot_product_fused_attention_overrideable_backward.default",
        f"{_OUT}, {_Q}, {_K}, {_V}, {_BIAS}, {_OUT}, {_SUMS} -> {_GRADIENTS}, {_BIAS}",
    ),
    **_attention(
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        "b h i !f, b h i !e, b h !j !e, b h !j !f, b h i !f, b h i, b h i !j "
        "-> b h i !e, b h !j !e, b h !j !f",
    ),
}
_ATTENTION = {
    **with_length_strategies(_FORWARD),
    **with_length_strategies(_BACKWARD, backward=True),
}


def _images(spaces: Sequence[int], names: str, text: str, sizes: str = "") -> dict[str, Rule]:
    """Return the rules of ops on images, which are not sharded along space.

    Args:
        spaces: numbers of spatial dims.
        names, text: with ``#`` for the number of spatial dims, and for these dims.
    """
    rules: dict[str, Rule] = {}
    for space in spaces:
        dims = ("!w", "!h !w", "!d !h !w")[space - 1]
        ops = names.replace("#", str(space))
        rules.update(_rejects_empty(ops, text.replace("#", dims), sizes=sizes))
    return rules


_ALL, _RESIZED = (1, 2, 3), "* ... # -> ... #"
_GRADIENT, _INDEXED_GRADIENT = "* ... #, ... # -> ... #", "* ... #, ... #, ... # -> ... #"
#: Pooling, padding, resizing, sampling, patches: sharded by samples or channels.
_IMAGES: dict[str, Rule] = {
    **_images(
        _ALL,
        "avg_pool#d.default reflection_pad#d.default replication_pad#d.default "
        "upsample_nearest#d.default upsample_nearest#d.vec _upsample_nearest_exact#d.default "
        "_upsample_nearest_exact#d.vec",
        _RESIZED,
    ),
    **_images(
        (1,),
        "adaptive_avg_pool1d.default upsample_linear1d.default upsample_linear1d.vec",
        _RESIZED,
    ),
    **_images(
        (2,),
        "_adaptive_avg_pool2d.default upsample_bilinear2d.default upsample_bilinear2d.vec "
        "upsample_bicubic2d.default upsample_bicubic2d.vec _upsample_bilinear2d_aa.default "
        "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec",
        _RESIZED,
    ),
    **_images(
        (3,),
        "_adaptive_avg_pool3d.default upsample_trilinear3d.default upsample_trilinear3d.vec",
        _RESIZED,
    ),
    **_images(
        _ALL,
        "upsample_nearest#d_backward.default _upsample_nearest_exact#d_backward.default",
        *(_RESIZED, "input_size"),
    ),
    **_images((1,), "upsample_linear1d_backward.default", _RESIZED, "input_size"),
    **_images(
        (2,),
        "upsample_bilinear2d_backward.default upsample_bicubic2d_backward.default "
        "_upsample_bilinear2d_aa_backward.default _upsample_bicubic2d_aa_backward.default",
        *(_RESIZED, "input_size"),
    ),
    **_images((3,), "upsample_trilinear3d_backward.default", _RESIZED, "input_size"),
    **_images(
        _ALL,
        "reflection_pad#d_backward.default replication_pad#d_backward.default",
        _GRADIENT,
    ),
    **_images(
        (2, 3),
        "avg_pool#d_backward.default _adaptive_avg_pool#d_backward.default max_unpool#d.default",
        _GRADIENT,
    ),
    **_images(
        (2, 3),
        "max_pool#d_with_indices.default adaptive_max_pool#d.default",
        "... # -> ... #, ... #",
    ),
    **_images((2, 3), "fractional_max_pool#d.default", "n c #, n c !s -> n c #, n c #"),
    **_images(
        (2, 3),
        "max_pool#d_with_indices_backward.default adaptive_max_pool#d_backward.default "
        "fractional_max_pool#d_backward.default",
        _INDEXED_GRADIENT,
    ),
    **_rejects_empty(
        "grid_sampler_2d.default grid_sampler_3d.default cudnn_grid_sampler.default",
        "* n c !..., n !... -> n c !...",
    ),
    **_rejects_empty(
        "cudnn_grid_sampler_backward.default",
        "n c !..., n !..., * n c !... -> n c !..., n !...",
    ),
    **_rejects_empty(
        "grid_sampler_2d_backward.default grid_sampler_3d_backward.default",
        "* n c !..., n c !..., n !... -> n c !..., n !...",
    ),
    **_rejects_empty("affine_grid_generator.default", "* n !... -> n !...", sizes="size"),
    **_rejects_empty("im2col.default", "* ... !c !h !w -> ... !k !l"),
    **_rejects_empty("col2im.default", "* ... !k !l -> ... !c !h !w"),
    **_rejects_empty(
        "channel_shuffle.default native_channel_shuffle.default", "= n !c ... -> n !c ..."
    ),
}
#: Ops that need all elements along some dims; only the other dims are sharded.
_ALONG_DIMS: dict[str, Rule] = {
    **rule(
        "sort.default sort.stable median.dim nanmedian.dim mode.default "
        "cummax.default cummin.default",
        "...@dim -> ...@dim, ...@dim",
    ),
    **rule(
        "argsort.default index_fill.int_Scalar index_fill_.int_Scalar index_fill.int_Tensor "
        "index_fill_.int_Tensor cumprod_.default",
        "...@dim -> ...@dim",
    ),
    **rule(
        "index_copy.default index_copy_.default index_reduce.default index_reduce_.default",
        "...@dim, _, ...@dim -> ...@dim",
    ),
    **rule("unfold.default unfold_copy.default", "= ...@dimension -> ...@dimension !w"),
    **rule("unfold_backward.default", "* ...@dim !w -> ...@dim", sizes="input_sizes"),
    **_rejects_empty("_fft_c2c.default _fft_r2c.default _fft_c2r.default", "* ...@dim -> ...@dim"),
}
_losses = partial(_rejects_empty, unsharded=_unsharded_loss)
#: Losses that are computed per sample.
_SAMPLES: dict[str, Rule] = {
    **_losses("multi_margin_loss.default", "n !c, n -> n"),
    **_losses("multilabel_margin_loss_forward.default", "n !c, n !c -> n, n !c"),
}
#: Searches: values or sequence sharded. With a sharded sequence each rank counts the smaller
#: elements of its block, and the counts are summed.
_SEARCHES: dict[str, Rule] = {
    **rule("bucketize.Tensor", "..., s -> ..."),
    **rule("searchsorted.Tensor", "... s, ... v, ... s -> ... v", unsharded=_unsharded_search),
    **rule("take.default", "* _, ... -> ..."),
    **table("isin.Tensor_Tensor", _isin),
    **table("renorm.default renorm_.default", _renorm),
}

RULES: dict[str, Rule] = {
    **_PRODUCTS,
    **_BATCHES,
    **_ATTENTION,
    **_IMAGES,
    **_ALONG_DIMS,
    **_SAMPLES,
    **_SEARCHES,
}
