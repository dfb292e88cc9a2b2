#include "trie.h"

#include <algorithm>

namespace lazygt {
namespace {
constexpr const char* CAPSULE = "lazygt.Step";
constexpr size_t MANY = 8;
PyObject* view_ops_of = nullptr;
std::atomic<uint64_t> last_kind{0};

uint64_t hash(const uint64_t* words, size_t n) {
  uint64_t h = 0x9E3779B97F4A7C15ull ^ n;
  for (size_t i = 0; i < n; ++i) {
    h = (h ^ words[i]) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

void free_capsule(PyObject* capsule) {
  auto* step = static_cast<Step*>(PyCapsule_GetPointer(capsule, CAPSULE));
  step->node = nullptr;
  c10::raw::intrusive_ptr::decref(step);
}

c10::SmallVector<MetaP, 1> metas_of(py::handle tuple) {
  c10::SmallVector<MetaP, 1> result;
  for (auto meta : tuple) result.push_back(meta.is_none() ? MetaP() : meta_of(meta));
  return result;
}

// The meta whose address stands in a key.
MetaP named_in(const Words& key) {
  bool names = key.size() == 2 && (tag_of(key[0]) == INPUT || tag_of(key[0]) == BLANK);
  return names ? MetaP::reclaim_copy(reinterpret_cast<Meta*>(key[1])) : MetaP();
}

// The end of the argument that begins at a word of a key.
size_t end_of(const Words& key, size_t at) {
  const uint64_t head = key[at];
  switch (tag_of(head)) {
    case WIDE_INT:
    case DOUBLE:
      return at + 2;
    case COMPLEX:
      return at + 3;
    case STRING:
      return at + 1 + size_t((head & PAYLOAD) + 7) / 8;
    case LIST: {
      size_t end = at + 1;
      for (uint64_t items = head & PAYLOAD; items > 0 && end < key.size(); --items) end = end_of(key, end);
      return end;
    }
    default:
      return at + 1;
  }
}

// Puts an int, or a tuple of ints, in a key; false: it is neither.
bool put_ints(Words& key, PyObject* value) {
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) key.put_int(number);
    return overflow == 0;
  }
  if (!PyTuple_CheckExact(value)) return false;
  const Py_ssize_t items = PyTuple_GET_SIZE(value);
  key.put(word(LIST, uint64_t(items)));
  for (Py_ssize_t i = 0; i < items; ++i) {
    PyObject* item = PyTuple_GET_ITEM(value, i);
    if (!PyLong_CheckExact(item) || !put_ints(key, item)) return false;
  }
  return true;
}

// Puts other ints in a key: those of `made`, a key in Python, where it has another object than `old`.
// False: the keys differ in more than `positional` ints and lists of them, or in their lengths.
bool put_sizes(Words& key, py::handle made, py::handle old, Py_ssize_t positional) {
  if (!PyTuple_CheckExact(made.ptr()) || !PyTuple_CheckExact(old.ptr())) return false;
  const Py_ssize_t length = PyTuple_GET_SIZE(made.ptr());
  if (length != PyTuple_GET_SIZE(old.ptr()) || positional >= length) return false;
  Words sized;
  sized.put(key[0]);
  size_t at = 1;
  for (Py_ssize_t i = 1; i < length; ++i) {
    PyObject *now = PyTuple_GET_ITEM(made.ptr(), i), *before = PyTuple_GET_ITEM(old.ptr(), i);
    if (i > positional) {
      if (now != before) return false;
      continue;
    }
    if (at >= key.size()) return false;
    const size_t end = end_of(key, at);
    if (end > key.size()) return false;
    const Tag tag = tag_of(key[at]);
    if (now == before) {
      sized.append(key.begin() + at, key.begin() + end);
    } else if ((tag != INT && tag != LIST) || !put_ints(sized, now)) {
      return false;
    }
    at = end;
  }
  sized.append(key.begin() + at, key.end());
  if (sized.size() != key.size()) return false;
  key = std::move(sized);
  return true;
}

bool all_of(const std::vector<Out>& outs, Out kind) {
  return std::all_of(outs.begin(), outs.end(), [&](Out out) { return out == kind; });
}

Make make_of(const Step& step, const Facts& f, py::handle node) {
  if (attribute(node, "dynamic").ptr() == Py_True) return Make::PYTHON;
  bool writes = !step.written.empty();
  if (f.outs.size() == 1 && !writes) {
    if (f.outs[0] == Out::VIEW) return Make::ONE_VIEW;
    if (f.outs[0] == Out::VIEW_LIST) return Make::VIEWS;
    if (f.outs[0] == Out::FRESH && step.fresh[0]) return Make::ONE;
    if (f.outs[0] == Out::FRESH_LIST) return Make::FRESH;
  }
  if (all_of(f.outs, Out::WRITTEN) && f.outs.size() == 1 && f.writes == std::vector<int>{0} &&
      step.written.size() == 1 && step.fresh.empty()) {
    return Make::ITSELF;
  }
  bool tensors = std::all_of(f.outs.begin(), f.outs.end(), [](Out out) {
    return out == Out::FRESH || out == Out::WRITTEN;
  });
  return tensors ? Make::TENSORS : Make::PYTHON;
}
ViewKindP kind_of(py::handle op, int32_t which) {
  auto kind = c10::make_intrusive<ViewKind>(++last_kind, which, meta_of(attribute(op, "meta")),
                                            c10::make_intrusive<Held>(op.ptr()));
  kind->moves = !attribute(op, "pitch").is_none();
  if (kind->moves) kind->pitch = int_attribute(op, "pitch");
  kind->absolute = attribute(op, "absolute").ptr() == Py_True;
  kind->beginning_matters = attribute(attribute(op, "facts"), "beginning_matters").ptr() == Py_True;
  return kind;
}
}  // namespace

Step::Step(py::handle trie_node)
    : node(trie_node.ptr()),
      first(int32_t(int_attribute(trie_node, "first"))),
      values(int32_t(int_attribute(trie_node, "values"))),
      params(int32_t(int_attribute(trie_node, "params"))),
      inputs(int32_t(int_attribute(trie_node, "inputs"))),
      ops(int32_t(int_attribute(trie_node, "ops"))),
      full(attribute(trie_node, "full").ptr() == Py_True),
      moves(attribute(trie_node, "moves").ptr() == Py_True) {}

Step* Step::find(const Words& key) {
  size_t place = children_.size();
  if (C10_LIKELY(likely_ < place && children_[likely_].matches(key))) {
    place = likely_;
  } else if (!places_.empty()) {
    auto same = places_.find(hash(key.data(), key.size()));
    if (same == places_.end()) return nullptr;
    for (auto at : same->second) if (children_[at].matches(key)) place = at;
  } else {
    for (size_t at = 0; at < children_.size(); ++at) if (children_[at].matches(key)) place = at;
  }
  if (place == children_.size()) return nullptr;
  likely_ = place;
  Step* step = children_[place].step.get();
  return C10_LIKELY(step->node != nullptr) ? step : nullptr;
}

void Step::add(const Words& key, StepP step) {
  if (Step* known = find(key)) {
    TORCH_CHECK(known == step.get(), "a step's key leads to two steps");
    return;
  }
  children_.push_back({{key.begin(), key.end()}, std::move(step), named_in(key)});
  likely_ = children_.size() - 1;
  if (children_.size() < MANY) return;
  size_t at = places_.empty() ? 0 : likely_;
  for (; at < children_.size(); ++at) {
    const auto& words = children_[at].key;
    places_[hash(words.data(), words.size())].push_back(at);
  }
}

void Step::forget(const Step* step) {
  children_.erase(std::remove_if(children_.begin(), children_.end(),
                                 [&](const Child& child) { return child.step.get() == step; }),
                  children_.end());
  likely_ = 0;
  places_.clear();
  if (children_.size() < MANY) return;
  for (size_t at = 0; at < children_.size(); ++at) {
    const auto& words = children_[at].key;
    places_[hash(words.data(), words.size())].push_back(at);
  }
}

std::vector<std::vector<uint64_t>> Step::keys() const {
  std::vector<std::vector<uint64_t>> keys;
  for (const auto& child : children_) keys.emplace_back(child.key.begin(), child.key.end());
  return keys;
}

Words Step::key_of(const Step* step) const {
  Words words;
  for (const auto& child : children_) {
    if (child.step.get() == step) words.assign(child.key.begin(), child.key.end());
  }
  return words;
}

StepP step_of(py::handle node) {
  auto known = attribute(node, "native");
  if (!known.is_none()) {
    void* pointer = PyCapsule_GetPointer(known.ptr(), CAPSULE);
    if (pointer == nullptr) throw_python();
    return StepP::reclaim_copy(static_cast<Step*>(pointer));
  }
  auto step = c10::make_intrusive<Step>(node);
  auto capsule = checked(PyCapsule_New(step.get(), CAPSULE, free_capsule));
  c10::raw::intrusive_ptr::incref(step.get());
  if (PyObject_SetAttrString(node.ptr(), "native", capsule.ptr()) < 0) throw_python();
  return step;
}

void prepare(Step& step, const Facts& f) {
  if (step.make != Make::UNKNOWN) return;
  auto node = attribute(step.node, "node");
  step.fresh = metas_of(attribute(node, "fresh"));
  step.written = metas_of(attribute(node, "written"));
  step.make = make_of(step, f, node);
  if (step.make == Make::ONE_VIEW || step.make == Make::VIEWS) kinds_of(step);
}

const c10::SmallVector<ViewKindP, 1>& kinds_of(Step& step) {
  if (!step.kinds.empty()) return step.kinds;
  auto ops = checked(PyObject_CallFunctionObjArgs(view_ops_of, step.node, nullptr));
  int32_t which = 0;
  for (auto op : ops) {
    step.kinds.push_back(kind_of(op, which++));
    step.links.push_back(c10::make_intrusive<Link>(LinkP(), step.kinds.back(), 0));
  }
  return step.kinds;
}

void add_again(py::handle parent, py::handle made, py::handle before, py::handle old) {
  static PyObject *native = PyUnicode_InternFromString("native"), *key_name = PyUnicode_InternFromString("key"),
                  *node_name = PyUnicode_InternFromString("node"), *input_name = PyUnicode_InternFromString("input");
  auto get = [](py::handle of, PyObject* name) { return checked(PyObject_GetAttr(of.ptr(), name)); };
  if (get(before, native).is_none() || get(old, native).is_none()) return;  // Python alone was there
  auto node = get(made, node_name), input = get(made, input_name);
  auto from = step_of(old);
  Words key = step_of(before)->key_of(from.get());
  if (key.empty()) return;
  if (input.is_none()) {
    auto known = get(old, key_name), now = get(made, key_name);
    if (!now.is(known) && !put_sizes(key, now, known, py::ssize_t(py::len(attribute(node, "args"))))) return;
  }
  const MetaP entering = input.is_none() ? MetaP() : meta_of(input);
  if (entering) key[1] = meta_word(entering);
  auto step = step_of(made);
  const bool same = node.is(get(old, node_name));
  if (from->make != Make::UNKNOWN) {
    step->make = from->make;
    step->fresh = same ? from->fresh : metas_of(attribute(node, "fresh"));
    step->written = same ? from->written : metas_of(attribute(node, "written"));
  }
  if (same) {
    step->kinds = from->kinds;
    step->links = from->links;
  } else if (!from->kinds.empty()) {
    for (size_t i = 0; i < kinds_of(*step).size(); ++i) {
      const auto &kind = step->kinds[i], &known = from->kinds[i];
      if (known->words.empty()) continue;
      kind->words.assign(key.begin(), key.end());
      kind->at = known->at;
      kind->rule = known->rule;
    }
  }
  step_of(parent)->add(key, step);
}

void set_view_ops(py::object view_ops) { view_ops_of = view_ops.release().ptr(); }
}  // namespace lazygt
