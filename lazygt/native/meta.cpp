#include "meta.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace lazygt {
namespace {
constexpr size_t FEW = 4096;  // so many are kept, owned or not
using Words = std::vector<int64_t>;
struct Hash {
  size_t operator()(const Words& words) const {
    uint64_t h = 1469598103934665603ull;
    for (auto word : words) {
      h = (h ^ uint64_t(word)) * 1099511628211ull;
      h ^= h >> 29;
    }
    return h;
  }
};

std::mutex& lock() {
  static std::mutex lock;
  return lock;
}
// while another thread has it nobody forks: it would stay locked in the child
[[maybe_unused]] const int held_over_forks = pthread_atfork(
    [] { lock().lock(); }, [] { lock().unlock(); }, [] { new (&lock()) std::mutex(); });
std::unordered_map<Words, MetaP, Hash>& known() {
  static auto* metas = new std::unordered_map<Words, MetaP, Hash>();
  return *metas;
}

// Takes out of the table what it alone owns. Needs the lock: nobody else can come to own such a meta
// meanwhile.
std::vector<MetaP> take_unowned() {
  std::vector<MetaP> unowned;
  for (auto entry = known().begin(); entry != known().end();) {
    if (entry->second.use_count() > 1) {
      ++entry;
      continue;
    }
    unowned.push_back(std::move(entry->second));
    entry = known().erase(entry);
  }
  return unowned;
}

// So, whenever the table has doubled.
std::vector<MetaP> take_unowned_if_many() {
  static size_t limit = FEW;
  if (known().size() <= limit) return {};
  auto unowned = take_unowned();
  limit = std::max(FEW, 2 * known().size());
  return unowned;
}

// Drops their Python objects; without the lock, since this may wait for the GIL.
void drop_python(const std::vector<MetaP>& unowned) {
  if (unowned.empty() || python_ends()) return;
  Gil gil;
  for (const auto& meta : unowned) Py_CLEAR(meta->python);
}

// Adds a meta to the table; the one that is there by now, if another thread has been quicker.
MetaP add(Words key, MetaP made) {
  std::vector<MetaP> unowned;
  {
    std::lock_guard<std::mutex> guard(lock());
    made = known().emplace(std::move(key), made).first->second;
    unowned = take_unowned_if_many();
  }
  drop_python(unowned);
  return made;
}

bool is_row_major(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != step) return false;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

Words ints(py::handle tuple) {
  TORCH_CHECK(PyTuple_Check(tuple.ptr()), "a shape or stride of a TensorMeta is no tuple");
  Words words(PyTuple_GET_SIZE(tuple.ptr()));
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), Py_ssize_t(i)));
    if (words[i] == -1 && PyErr_Occurred()) throw_python();
  }
  return words;
}

py::object tuple_of(const Words& words) {
  auto tuple = checked(PyTuple_New(Py_ssize_t(words.size())));
  for (size_t i = 0; i < words.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), Py_ssize_t(i), PyLong_FromLongLong(words[i]));
  }
  return tuple;
}

py::handle python_intern() {
  static PyObject* function =
      attribute(checked(PyImport_ImportModule("lazygt.graph.meta")), "intern").release().ptr();
  return function;
}
}  // namespace

Meta::Meta(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype, bool conj,
           bool neg)
    : sizes(sizes.vec()),
      strides(strides.vec()),
      offset(offset),
      dtype(dtype),
      conj(conj),
      neg(neg),
      plain(offset == 0 && !conj && !neg && is_row_major(sizes, strides)) {}

MetaP intern(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype,
             bool conj, bool neg) {
  Words key;
  key.reserve(4 + sizes.size() + strides.size());
  key = {int64_t(dtype), offset, int64_t(conj) | int64_t(neg) << 1, int64_t(sizes.size())};
  key.insert(key.end(), sizes.begin(), sizes.end());
  key.insert(key.end(), strides.begin(), strides.end());
  {
    std::lock_guard<std::mutex> guard(lock());
    auto there = known().find(key);
    if (there != known().end()) return there->second;
  }
  return add(std::move(key), c10::make_intrusive<Meta>(sizes, strides, offset, dtype, conj, neg));
}

MetaP meta_of(py::handle tensor_meta) {
  auto dtype = attribute(tensor_meta, "dtype");
  TORCH_CHECK(THPDtype_Check(dtype.ptr()), "the dtype of a TensorMeta is no torch.dtype");
  MetaP meta =
      intern(ints(attribute(tensor_meta, "shape")), ints(attribute(tensor_meta, "stride")),
             int_attribute(tensor_meta, "offset"),
             reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type,
             attribute(tensor_meta, "conj").ptr() == Py_True,
             attribute(tensor_meta, "neg").ptr() == Py_True);
  if (meta->python == nullptr) meta->python = tensor_meta.inc_ref().ptr();
  return meta;
}

py::object tensor_meta(const Meta& meta) {
  if (meta.python == nullptr) {
    auto dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(meta.dtype));
    auto made = python_intern()(tuple_of(meta.sizes), tuple_of(meta.strides), py::handle(dtype),
                                meta.offset, meta.conj, meta.neg);
    if (meta.python == nullptr) meta.python = made.release().ptr();
  }
  return py::reinterpret_borrow<py::object>(meta.python);
}

size_t metas() {
  std::lock_guard<std::mutex> guard(lock());
  return known().size();
}

size_t owned_metas() {
  std::vector<MetaP> unowned;
  size_t owned;
  {
    std::lock_guard<std::mutex> guard(lock());
    unowned = take_unowned();
    owned = known().size();
  }
  drop_python(unowned);
  return owned;
}
}  // namespace lazygt
