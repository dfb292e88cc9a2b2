// Meta: what graph.meta.TensorMeta says of a tensor; one object a distinct meta, as long as somebody
// owns it. Whoever keeps a meta, or its address in a key, owns it by a MetaP.
#pragma once
#include "python.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace lazygt {
struct Meta final : c10::intrusive_ptr_target {
  const std::vector<int64_t> sizes, strides;
  const int64_t offset;
  const at::ScalarType dtype;
  const bool conj, neg;
  const bool plain;                    // row-major from offset 0 and no lazy bits
  mutable PyObject* python = nullptr;  // its TensorMeta, once it was needed

  Meta(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype, bool conj, bool neg);
  bool shows_like(const Meta& other) const { return sizes == other.sizes && strides == other.strides; }
};
using MetaP = c10::intrusive_ptr<Meta>;
// Its address, which stands for it in keys.
inline uint64_t meta_word(const MetaP& meta) { return reinterpret_cast<uint64_t>(meta.get()); }

MetaP intern(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype,
             bool conj = false, bool neg = false);
// Both need the GIL.
MetaP meta_of(py::handle tensor_meta);
py::object tensor_meta(const Meta& meta);
// The number of metas that are there.
size_t metas();
// So, once those that nobody owns are freed; they are by and by, too. Needs the GIL.
size_t owned_metas();
}  // namespace lazygt
