"""Operators of torch's database whose recorded ops are not eager torch's, and why.

Either no number differs, or one may.
"""

from lazygt.record.tensor import NATIVE

CHECKED = "eager torch checks values on a CPU only, which would be a sync point"
CHOSEN = "the workers choose the formula by values that eager torch asks for; the numbers are equal"
CAT = "parts are put together by a concatenation instead of copies into zeros: the same numbers"
INDICES = "a kernel for CPUs alone, without indices: the same elements"
LENGTHS = "the lengths stay a tensor; on a CPU eager torch makes a list of them"
VIEWS = "a write through a view is recorded by the views, not by strides: the same elements"
ORDER = "the same ops, some in another order that no number depends on"
SUMMED = "a sum into a tensor of its own dtype, or one that makes it"
FOLDED = (
    "torch folds a batch of 1 for any tensor that is not plain: its rounding is that of one matrix "
    "product. A choice in Python would make every matmul slower to record"
)

#: What the first samples show, and what only further ones do.
FORWARD_DIFFERENCES = {
    "quantile": CHECKED,
    "nanquantile": CHECKED,
    "nn.functional.one_hot": CHECKED,
    "nn.functional.max_pool1d": INDICES,
    "nn.functional.ctc_loss": LENGTHS,
    "tensor_split": "the sections are fetched",
}
BACKWARD_DIFFERENCES = {
    "quantile": CHECKED,
    "nanquantile": CHECKED,
    "max.reduction_no_dim": CHOSEN,
    "min.reduction_no_dim": CHOSEN,
    "median": CHOSEN,
    "nanmedian": CHOSEN,
    "prod": CHOSEN,
    "nn.functional.ctc_loss": LENGTHS,
    "nn.functional.embedding_bag": "the places of the largest, which its mode does not use",
    "tensor_split": "the sections are fetched",
}
LATER = {
    "matmul": FOLDED,
    "__rmatmul__": FOLDED,
    "masked.prod": CHOSEN,
    "gradient": ORDER,
    "svd_lowrank": ORDER,
    "pca_lowrank": ORDER,
}

#: What torch does for tensors of a Python class alone, as those of the recorder in Python are.
if NATIVE is None:
    FORWARD_DIFFERENCES |= {
        "empty_permuted": VIEWS,
        "linalg.matrix_rank": SUMMED,
        "linalg.matrix_rank.hermitian": SUMMED,
    }
    BACKWARD_DIFFERENCES |= {
        "linalg.eig": CHECKED,
        "cumprod": CHOSEN,
        "masked.cumprod": CHOSEN,
        "linalg.vander": CHOSEN,
        "linalg.eigh": CAT,
        "linalg.householder_product": CAT,
        "matrix_exp": CAT,
        "ormqr": CAT,
        "nn.functional.pad.circular": VIEWS,
        "to": "its device= names a CPU",
        "__getitem__": "the same kernel under its public name",
    }
