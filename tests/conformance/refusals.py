"""What of torch's operator database does not run as on the CPU, and why."""

UNWRITTEN = "its result is memory that nobody has written: there is nothing to compare"
SPARSE = "sparse tensors are refused: lazygt holds dense strided ones only"
CUDA = "torch runs it on CUDA alone"

FORWARD = {
    "empty": UNWRITTEN,
    "empty_like": UNWRITTEN,
    "empty_permuted": UNWRITTEN,
    "empty_strided": UNWRITTEN,
    "new_empty": UNWRITTEN,
    "new_empty_strided": UNWRITTEN,
    "resize_": "refused with a reason: it would expose memory that no op has written",
    "as_strided.partial_views": "it looks at memory around its input, which does not move along",
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
    "as_strided.partial_views": FORWARD["as_strided.partial_views"],
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
}
