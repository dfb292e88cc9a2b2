"""What of torch's operator database does not run as on the CPU, and why."""

from lazygt.record.tensor import NATIVE

SPARSE = "sparse tensors are refused: lazygt holds dense strided ones only"
CUDA = "torch runs it on CUDA alone"

#: Their results are memory that nobody has written: shapes and dtypes are all there is to compare.
UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)

FORWARD = {
    "resize_": "refused with a reason: it would expose memory that no op has written",
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
    "jiterator_unary": CUDA,
    "jiterator_binary": CUDA,
    "jiterator_binary_return_by_ref": CUDA,
    "jiterator_2inputs_2outputs": CUDA,
    "jiterator_4inputs_with_extra_args": CUDA,
}

BACKWARD = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
}

# -- recorded for GPUs by a session that computes nothing -----------------------------------------

VALUES = "its shape depends on values"
KERNEL = "torch has no meta kernel of it: only the workers can tell the shape of its result"
CHECKED = "torch checks a value, which is 0 where nothing is computed"
STATISTICS = "without training the statistics are empty on a CPU and not on a GPU"

UNKNOWN_FORWARD = FORWARD | {
    "argwhere": VALUES,
    "bincount": VALUES,
    "combinations": VALUES,
    "masked_select": VALUES,
    "nn.functional.one_hot": VALUES,
    "nonzero": VALUES,
    "unique": VALUES,
    "unique_consecutive": VALUES,
    "cov": CHECKED,
    "geqrf": KERNEL,
    "histogram": KERNEL,
    "histogramdd": KERNEL,
    "linalg.lstsq": KERNEL,
    "linalg.lstsq.grad_oriented": KERNEL,
    "nn.functional.ctc_loss": KERNEL,
    "native_batch_norm": STATISTICS,
    "_native_batch_norm_legit": STATISTICS,
}

UNKNOWN_BACKWARD = BACKWARD | {
    "combinations": VALUES,
    "masked_select": VALUES,
    "index_fill": VALUES,
    "index_put": VALUES,
    "cov": CHECKED,
    "linalg.lstsq": KERNEL,
    "linalg.lstsq.grad_oriented": KERNEL,
    "nn.functional.ctc_loss": KERNEL,
    "nn.functional.fractional_max_pool3d": KERNEL,
    "nn.functional.multi_margin_loss": KERNEL,
    "nn.functional.multilabel_margin_loss": KERNEL,
}
if NATIVE is not None:  # torch asks for the values of tensors that are of no Python class
    UNKNOWN_BACKWARD |= {"linalg.eig": CHECKED}
