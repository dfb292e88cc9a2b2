// Handles: tensors without memory. A handle looks at a Cell, which has the value (record.tensor
// calls it a Storage), directly or through a chain of views.
#pragma once
#include "meta.h"
#include "positions.h"
#include "remote.h"

#include <c10/core/TensorImpl.h>

#include <typeinfo>
#include <utility>
#include <vector>

namespace lazygt {
struct Recorder;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
inline c10::Device lazy_device() { return {c10::DeviceType::PrivateUse1, 0}; }

// What one or more handles look at. Only its recorder's lock protects it, but it may die anywhere.
struct Cell final : c10::intrusive_ptr_target {
  Recorder* owner;  // lives for good
  uint64_t serial;  // of the trace that its value is in
  int32_t index;    // of its value there; an input's is negative
  bool blank = false;
  bool keeps_proxy = false;
  uint64_t entered = 0;  // the trace that it has entered last
  const MetaP meta;
  RemoteP remote;             // its value on the workers
  at::Tensor host;            // a number that is computed in the client
  PyObject* proxy = nullptr;  // what Python sees of it: see storage.cpp

  Cell(Recorder* owner, uint64_t serial, int32_t index, MetaP meta)
      : owner(owner), serial(serial), index(index), meta(std::move(meta)) {}
  void set_recorded(uint64_t trace, int32_t value) {
    blank = false;
    serial = trace;
    index = value;
    remote.reset();
  }
  void set_remote(RemoteP value) {
    blank = false;
    serial = 0;
    host.reset();
    remote = std::move(value);
  }
  void release_resources() override;
};
using CellP = c10::intrusive_ptr<Cell>;

// One view op and which of its results: all but the tensor that it is applied to.
struct ViewKind final : c10::intrusive_ptr_target {
  uint64_t id;                  // told apart by it in keys; 0: Python alone can take the view again
  std::vector<uint64_t> words;  // of the step that made it
  uint32_t at = 0;              // where in them the tensor is
  MoveRule rule = nullptr;      // of an op whose position is in them
  int32_t which;
  const MetaP meta;
  bool moves = false;              // its position is a number of the run
  int64_t pitch = 0;               // then: bytes from one position to the next
  bool absolute = false;           // it says itself where it begins
  bool beginning_matters = false;  // it looks at where its operand begins
  HeldP op;  // record.tensor.ViewOp
  ViewKind(uint64_t id, int32_t which, MetaP meta, HeldP op)
      : id(id), which(which), meta(std::move(meta)), op(std::move(op)) {}
};
using ViewKindP = c10::intrusive_ptr<ViewKind>;

struct Link final : c10::intrusive_ptr_target {
  c10::intrusive_ptr<Link> before;
  ViewKindP kind;
  int64_t position;  // if the kind moves
  int64_t shift;     // bytes from where metas of graphs say that it begins to where it does
  Link(c10::intrusive_ptr<Link> before, ViewKindP kind, int64_t position);
};
using LinkP = c10::intrusive_ptr<Link>;
// The ops that lead to the last one, the cell's end first.
c10::SmallVector<Link*, 4> chain(const LinkP& last);

// How a handle and its detached twins look at their cell, and where that stands in the trace.
struct View final : c10::intrusive_ptr_target {
  LinkP link;  // the last op
  std::vector<int32_t> params;  // the numbers of the trace that are its positions
  uint64_t serial;
  int32_t base, index;
  View(LinkP link, uint64_t serial, int32_t base, int32_t index)
      : link(std::move(link)), serial(serial), base(base), index(index) {}
  // It was taken again, at positions. Whoever has not the recorder's lock looks by `now`.
  void take(LinkP again, std::vector<int32_t> numbers);
  std::pair<LinkP, std::vector<int32_t>> now() const;
};
using ViewP = c10::intrusive_ptr<View>;

struct Handle final : c10::TensorImpl {
  CellP cell;
  ViewP view;

  Handle(const Meta& meta, CellP cell, ViewP view);
  const Meta& meta() const { return view ? *view->link->kind->meta : *cell->meta; }
  void show(const Meta& meta);
  // Begins where it does, and not where the metas of graphs say.
  void shift() { if (view) storage_offset_ += view->link->shift / int64_t(itemsize()); }
  // A view of an ordinary tensor is an ordinary one, in inference_mode too.
  void be_like(Handle& source);

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version, bool allow_changes) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version, bool allow_changes) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& source) override;
  void release_resources() override;
  const char* tensorimpl_type_name() const override { return "lazygt.Handle"; }

 private:
  Handle(const Handle& source, int);
  template <class Version>
  c10::intrusive_ptr<c10::TensorImpl> twin(Version&& version, bool allow_changes) const;
};

inline bool is_lazy(const c10::TensorImpl* impl) { return typeid(*impl) == typeid(Handle); }
inline bool is_lazy(const at::Tensor& t) { return t.defined() && is_lazy(t.unsafeGetTensorImpl()); }
inline Handle* handle(const at::Tensor& t) {
  TORCH_CHECK(is_lazy(t), "expected a lazygt tensor");
  return static_cast<Handle*>(t.unsafeGetTensorImpl());
}
at::Tensor new_handle(const Meta& meta, CellP cell, ViewP view = {});
// Another handle for the same.
at::Tensor twin_of(Handle& source);
}  // namespace lazygt
