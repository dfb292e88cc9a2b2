#include "handle.h"

#include <mutex>

namespace lazygt {
namespace {
std::mutex links;  // those of views that are taken again
}  // namespace

void forget_proxy(PyObject* proxy);  // storage.cpp

void Cell::release_resources() {
  remote.reset();
  host.reset();
  // what Python sees of it dies with it; only a weak reference may just have brought it back
  if (proxy == nullptr || !keeps_proxy || python_ends()) return;
  Gil gil;
  forget_proxy(proxy);
  Py_DECREF(std::exchange(proxy, nullptr));
}

Link::Link(c10::intrusive_ptr<Link> previous, ViewKindP op, int64_t position)
    : before(std::move(previous)), kind(std::move(op)), position(position), shift(before ? before->shift : 0) {
  if (C10_UNLIKELY(kind->moves)) shift += (position - SAMPLE) * kind->pitch;
  if (C10_UNLIKELY(kind->absolute)) shift = 0;
}

c10::SmallVector<Link*, 4> chain(const LinkP& last) {
  c10::SmallVector<Link*, 4> ops;
  for (Link* l = last.get(); l != nullptr; l = l->before.get()) ops.push_back(l);
  std::reverse(ops.begin(), ops.end());
  return ops;
}

void View::take(LinkP again, std::vector<int32_t> numbers) {
  std::lock_guard<std::mutex> guard(links);
  link.swap(again);
  params.swap(numbers);
}

std::pair<LinkP, std::vector<int32_t>> View::now() const {
  std::lock_guard<std::mutex> guard(links);
  return {link, params};
}

Handle::Handle(const Meta& meta, CellP cell, ViewP view)
    : c10::TensorImpl(c10::DispatchKeySet(KEY), c10::scalarTypeToTypeMeta(meta.dtype), lazy_device()),
      cell(std::move(cell)),
      view(std::move(view)) {
  show(meta);
  if (C10_UNLIKELY(meta.conj)) _set_conj(true);
  if (C10_UNLIKELY(meta.neg)) _set_neg(true);
}

Handle::Handle(const Handle& source, int)
    : c10::TensorImpl(c10::DispatchKeySet(KEY), source.dtype(), lazy_device()),
      cell(source.cell),
      view(source.view) {}

void Handle::show(const Meta& meta) {
  sizes_and_strides_.set_sizes(meta.sizes);
  refresh_numel();
  if (C10_LIKELY(meta.plain)) {
    empty_tensor_restride(c10::MemoryFormat::Contiguous);
  } else {
    sizes_and_strides_.set_strides(meta.strides);
    refresh_contiguous();
  }
  storage_offset_ = meta.offset;
}

void Handle::be_like(Handle& source) {
  if (C10_LIKELY(!is_inference() || source.is_inference())) return;
  bool conj = is_conj(), neg = is_neg();
  key_set_ = source.key_set_;
  _set_conj(conj);
  _set_neg(neg);
  set_version_counter(c10::VariableVersion(0));
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> Handle::twin(Version&& version, bool allow_changes) const {
  auto impl = c10::intrusive_ptr<Handle>::unsafe_steal_from_new(new Handle(*this, 0));
  copy_tensor_metadata(this, impl.get(), std::forward<Version>(version), allow_changes);
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> Handle::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_changes) const {
  return twin(version, allow_changes);
}

c10::intrusive_ptr<c10::TensorImpl> Handle::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_changes) const {
  return twin(std::move(version), allow_changes);
}

void Handle::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& source) {
  TORCH_CHECK(lazygt::is_lazy(source.get()),
              "incompatible tensor type: the data of a lazygt tensor can't be set to one on ",
              source->device(), "; use .data = value.to('lazygt')");
  auto* other = static_cast<Handle*>(source.get());
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
  cell = other->cell;
  view = other->view;
}

void Handle::release_resources() {
  c10::TensorImpl::release_resources();
  cell.reset();
  view.reset();
}

at::Tensor new_handle(const Meta& meta, CellP cell, ViewP view) {
  return at::Tensor(c10::make_intrusive<Handle>(meta, std::move(cell), std::move(view)));
}

at::Tensor twin_of(Handle& source) {
  auto twin = c10::make_intrusive<Handle>(source.meta(), source.cell, source.view);
  twin->shift();
  twin->be_like(source);
  return at::Tensor(std::move(twin));
}
}  // namespace lazygt
