"""Ops with strategies in one line of text; ``factors`` has the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import ascii_lowercase

from lazygt.graph.node import Node
from lazygt.passes.sharding.rules.attention import along_lengths
from lazygt.passes.sharding.rules.factors import rule, strategies_by
from lazygt.passes.sharding.rules.strategy import Call, Metas, Rule, Strategy, table
from lazygt.passes.sharding.rules.write_back import along_the_index

#: For kernels that take no empty block.
_filled = partial(rule, no_empty=True)


def _trilinear(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of ``_trilinear``: a product of three operands, summed over dims.

    Each operand has dims of size 1 put in.
    """
    call = Call(node, metas, parts)
    letters = ascii_lowercase[: len(call.shape("i1")) + len(call["expand1"])]
    operands = ["* " + _letters(letters, without=call[f"expand{number}"]) for number in (1, 2, 3)]
    result = _letters(letters, without=call["sumdim"])
    return strategies_by(call, f"{', '.join(operands)} -> {result}", no_empty=True)


def _letters(letters: str, without: Sequence[int]) -> str:
    return " ".join(letter for dim, letter in enumerate(letters) if dim not in without)


def _solve(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of a solve, with vectors on the right in the shape of the rows.

    Else there are matrices on the right.
    """
    call = Call(node, metas, parts)
    matrices, right = call.shape("A"), call.shape("B")
    vectors = len(right) == 1 or right == matrices[:-1]
    item = "... !n" if vectors else "... !n !k"
    return strategies_by(
        call, f"... !n !n, {item} -> {item}, ... !n !n, ... !n, ...", no_empty=True
    )


def _isin(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of isin: in some part of the others, or with ``invert`` in none."""
    call = Call(node, metas, parts)
    others = " ".join(ascii_lowercase[: len(call.shape("test_elements"))])
    return strategies_by(call, f"..., {others} -> {'min' if call['invert'] else 'max'} ...")


def _scaled_down(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    """Return the strategies of renorm, which scales slices along ``dim`` by their norms.

    A slice's norm needs all of it.
    """
    call = Call(node, metas, parts)
    rank = len(call.shape("self"))
    dims = [f"!{letter}" for letter in ascii_lowercase[:rank]]
    dims[call["dim"]] = "z"
    text = " ".join(dims)
    return strategies_by(call, f"{text} -> {text}")


def _spread(call: Call) -> str:
    """Return the letters kept whole where torch broadcasts one number as one.

    It does so for products of empty blocks, with any number of rows.
    """
    return "ik" if call.meta("self").numel == 1 else ""


def _averaged(call: Call) -> str:
    """Return the letters kept whole in a mean over samples, which counts those of all ranks."""
    return "n" if call["reduction"] == 1 else ""


def _unsorted(call: Call) -> str:
    """Return the letters kept whole with a sorter, which has places of the whole sequence."""
    return "s" if call.has("sorter") else ""


def _attended(call: Call) -> str:
    """Return the letters kept whole in an attention.

    Dropout is drawn for the whole; a causal mask counts from the first query.
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
    **rule("addmv.default addmv_.default", "+ i, * i k, * k -> i", keeping=_spread),
    **rule("addbmm.default addbmm_.default", "+ i j, * b i k, * b k j -> i j"),
    **rule("addr.default addr_.default", "+ i j, * i, * j -> i j"),
    **rule("_addmm_activation.default", "i j, i !k, !k j -> i j"),
    **rule("_int_mm.default", "i k, k j -> i j"),
    **rule("_embedding_bag_per_sample_weights_backward.default", "* !b e, * !v e -> !k"),
    **rule("linalg_cross.default", "* ...@dim, * ...@dim -> ...@dim"),
    **_filled("_cdist_forward.default _euclidean_dist.default", "... i !m, ... j !m -> ... i j"),
    **_filled("_cdist_backward.default", "* ... i j, ... i !m, ... j !m, ... i j -> ... i !m"),
    **table("_trilinear.default", _trilinear),
}
#: Batches of matrices: each rank has its own of them. A matrix is never split.
_BATCHES: dict[str, Rule] = {
    **_filled("_linalg_det.default", "... !n !n -> ..., ... !n !n, ... !n"),
    **_filled("_linalg_slogdet.default", "... !n !n -> ..., ..., ... !n !n, ... !n"),
    **_filled("linalg_inv_ex.default linalg_cholesky_ex.default", "... !n !n -> ... !n !n, ..."),
    **_filled(
        "cholesky.default cholesky_inverse.default linalg_matrix_exp.default",
        "... !n !n -> ... !n !n",
    ),
    **_filled("linalg_qr.default", "... !m !n -> ... !m !p, ... !q !n"),
    **_filled("linalg_ldl_solve.default", "... !n !n, ... !n, ... !n !k -> ... !n !k"),
    **_filled(
        "cholesky_solve.default linalg_solve_triangular.default",
        "... !m !n, ... !p !q -> ... !r !s",
    ),
    **_filled("_linalg_svd.default", "... !m !n -> ... !m !p, ... !q, ... !r !n"),
    **_filled("_linalg_eigh.default linalg_eig.default", "... !n !n -> ... !n, ... !n !n"),
    **_filled("linalg_eigvals.default", "... !n !n -> ... !n"),
    **_filled("linalg_lu.default", "... !m !n -> ... !m !m, ... !m !p, ... !p !n"),
    **_filled("linalg_lu_factor_ex.default", "... !m !n -> ... !m !n, ... !p, ..."),
    **_filled("linalg_ldl_factor_ex.default", "... !n !n -> ... !n !n, ... !n, ..."),
    **_filled("linalg_lu_solve.default", "... !n !n, ... !n, ... !p !q -> ... !p !q"),
    **_filled("linalg_householder_product.default", "... !m !n, ... !k -> ... !m !n"),
    **_filled("linalg_pinv.atol_rtol_tensor", "... !m !n, ..., ... -> ... !n !m"),
    **_filled("lu_unpack.default", "... !m !n, ... !k -> ... !m !m, ... !m !p, ... !p !n"),
    **_filled("triangular_solve.default", "... !m !k, ... !m !m -> ... !m !k, ... !m !m"),
    **_filled("ormqr.default", "... !m !n, ... !k, ... !p !q -> ... !p !q"),
    **table("_linalg_solve_ex.default", _solve),
}
#: Fused attention: by samples or by heads; on CPUs also by queries. Kernels divide by the number
#: of blocks.
_attention = partial(_filled, keeping=_attended)
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
_ATTENTION = {**along_lengths(_FORWARD), **along_lengths(_BACKWARD, backward=True)}
#: Pooling, padding, resizing, sampling, patches: samples and channels pass, space stays whole.
_PICTURES: dict[str, Rule] = {
    **_filled(
        "avg_pool1d.default adaptive_avg_pool1d.default reflection_pad1d.default "
        "replication_pad1d.default upsample_nearest1d.default upsample_nearest1d.vec "
        "upsample_linear1d.default upsample_linear1d.vec _upsample_nearest_exact1d.default "
        "_upsample_nearest_exact1d.vec",
        "* ... !w -> ... !w",
    ),
    **_filled(
        "avg_pool2d.default _adaptive_avg_pool2d.default reflection_pad2d.default "
        "replication_pad2d.default upsample_nearest2d.default upsample_nearest2d.vec "
        "upsample_bilinear2d.default upsample_bilinear2d.vec upsample_bicubic2d.default "
        "upsample_bicubic2d.vec _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec "
        "_upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.vec "
        "_upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec",
        "* ... !h !w -> ... !h !w",
    ),
    **_filled(
        "avg_pool3d.default _adaptive_avg_pool3d.default reflection_pad3d.default "
        "replication_pad3d.default upsample_nearest3d.default upsample_nearest3d.vec "
        "upsample_trilinear3d.default upsample_trilinear3d.vec _upsample_nearest_exact3d.default "
        "_upsample_nearest_exact3d.vec",
        "* ... !d !h !w -> ... !d !h !w",
    ),
    **_filled(
        "reflection_pad1d_backward.default replication_pad1d_backward.default",
        "* ... !w, ... !w -> ... !w",
    ),
    **_filled(
        "avg_pool2d_backward.default _adaptive_avg_pool2d_backward.default "
        "reflection_pad2d_backward.default replication_pad2d_backward.default",
        "* ... !h !w, ... !h !w -> ... !h !w",
    ),
    **_filled(
        "avg_pool3d_backward.default _adaptive_avg_pool3d_backward.default "
        "reflection_pad3d_backward.default replication_pad3d_backward.default",
        "* ... !d !h !w, ... !d !h !w -> ... !d !h !w",
    ),
    **_filled(
        "max_pool2d_with_indices.default adaptive_max_pool2d.default",
        "... !h !w -> ... !h !w, ... !h !w",
    ),
    **_filled(
        "max_pool3d_with_indices.default adaptive_max_pool3d.default",
        "... !d !h !w -> ... !d !h !w, ... !d !h !w",
    ),
    **_filled("fractional_max_pool2d.default", "n c !h !w, n c !s -> n c !h !w, n c !h !w"),
    **_filled(
        "fractional_max_pool3d.default", "n c !d !h !w, n c !s -> n c !d !h !w, n c !d !h !w"
    ),
    **_filled(
        "max_pool2d_with_indices_backward.default adaptive_max_pool2d_backward.default "
        "fractional_max_pool2d_backward.default",
        "* ... !h !w, ... !h !w, ... !h !w -> ... !h !w",
    ),
    **_filled(
        "max_pool3d_with_indices_backward.default adaptive_max_pool3d_backward.default "
        "fractional_max_pool3d_backward.default",
        "* ... !d !h !w, ... !d !h !w, ... !d !h !w -> ... !d !h !w",
    ),
    **_filled("max_unpool2d.default", "* ... !h !w, ... !h !w -> ... !h !w"),
    **_filled("max_unpool3d.default", "* ... !d !h !w, ... !d !h !w -> ... !d !h !w"),
    **_filled(
        "upsample_nearest1d_backward.default _upsample_nearest_exact1d_backward.default "
        "upsample_linear1d_backward.default",
        "* ... !w -> ... !w",
        sizes="input_size",
    ),
    **_filled(
        "upsample_nearest2d_backward.default _upsample_nearest_exact2d_backward.default "
        "upsample_bilinear2d_backward.default upsample_bicubic2d_backward.default "
        "_upsample_bilinear2d_aa_backward.default _upsample_bicubic2d_aa_backward.default",
        "* ... !h !w -> ... !h !w",
        sizes="input_size",
    ),
    **_filled(
        "upsample_nearest3d_backward.default _upsample_nearest_exact3d_backward.default "
        "upsample_trilinear3d_backward.default",
        "* ... !d !h !w -> ... !d !h !w",
        sizes="input_size",
    ),
    **_filled(
        "grid_sampler_2d.default grid_sampler_3d.default cudnn_grid_sampler.default",
        "* n c !..., n !... -> n c !...",
    ),
    **_filled(
        "cudnn_grid_sampler_backward.default",
        "n c !..., n !..., * n c !... -> n c !..., n !...",
    ),
    **_filled(
        "grid_sampler_2d_backward.default grid_sampler_3d_backward.default",
        "* n c !..., n c !..., n !... -> n c !..., n !...",
    ),
    **_filled("affine_grid_generator.default", "* n !... -> n !...", sizes="size"),
    **_filled("im2col.default", "* ... !c !h !w -> ... !k !l"),
    **_filled("col2im.default", "* ... !k !l -> ... !c !h !w"),
    **_filled("channel_shuffle.default native_channel_shuffle.default", "= n !c ... -> n !c ..."),
}
#: Along one dim or some all elements are needed; the others pass.
_ALONG: dict[str, Rule] = {
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
    **along_the_index(
        rule("index_copy.default index_copy_.default", "...@dim, _, ...@dim -> ...@dim")
    ),
    **rule("index_reduce.default index_reduce_.default", "...@dim, _, ...@dim -> ...@dim"),
    **rule("unfold.default unfold_copy.default", "= ...@dimension -> ...@dimension !w"),
    **rule("unfold_backward.default", "* ...@dim !w -> ...@dim", sizes="input_sizes"),
    **_filled("_fft_c2c.default _fft_r2c.default _fft_c2r.default", "* ...@dim -> ...@dim"),
}
_losses = partial(_filled, keeping=_averaged)
#: Losses of each sample.
_SAMPLES: dict[str, Rule] = {
    **_losses("multi_margin_loss.default", "n !c, n -> n"),
    **_losses("multilabel_margin_loss_forward.default", "n !c, n !c -> n, n !c"),
}
#: Places of values among others: each rank looks up its own in the whole of the others, or all
#: in its own block, which gives how many of that are smaller.
_SEARCHES: dict[str, Rule] = {
    **rule("bucketize.Tensor", "..., s -> ..."),
    **rule("searchsorted.Tensor", "... s, ... v, ... s -> ... v", keeping=_unsorted),
    **rule("take.default", "* _, ... -> ..."),
    **table("isin.Tensor_Tensor", _isin),
    **table("renorm.default renorm_.default", _scaled_down),
}

RULES: dict[str, Rule] = {
    **_PRODUCTS,
    **_BATCHES,
    **_ATTENTION,
    **_PICTURES,
    **_ALONG,
    **_SAMPLES,
    **_SEARCHES,
}
