// Meta: what graph.meta.TensorMeta says of a tensor; one object a distinct meta, kept for good.
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace lazygt {
struct Meta {
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  bool conj, neg;
  bool plain;         // row-major from offset 0 and no lazy bits
  bool dense_number;  // one element, not complex
  mutable PyObject* python = nullptr;

  bool shows_like(const Meta& other) const { return sizes == other.sizes && strides == other.strides; }
};

const Meta* intern(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset,
                   at::ScalarType dtype, bool conj = false, bool neg = false);
// Both need the GIL.
const Meta* meta_of(py::handle tensor_meta);
py::handle tensor_meta(const Meta* meta);
}  // namespace lazygt
