// Steps: the native side of record.trie.TrieNode. A step is found below the one before by its key.
#pragma once
#include "facts.h"
#include "handle.h"

#include <algorithm>
#include <unordered_map>

namespace lazygt {
// How the results of a step are made.
enum class Make : uint8_t {
  UNKNOWN,   // not looked at yet
  ONE,       // one fresh tensor
  ITSELF,    // its first argument, written
  ONE_VIEW,
  VIEWS,     // a list of views
  FRESH,     // a list of fresh tensors
  TENSORS,   // several: fresh ones, and arguments that were written in their shape
  PYTHON,    // by record.views.results
};

struct Step;
using StepP = c10::intrusive_ptr<Step>;

// Traces go from one to the next of thousands, so what a hit reads lies close together in it.
struct Step final : c10::intrusive_ptr_target {
  PyObject* node;  // its TrieNode, which owns this; null when the trie has forgotten it
  int32_t first, values, params, inputs, ops;  // as TrieNode's
  bool full;
  bool moves;  // takes its position when it runs
  Make make = Make::UNKNOWN;
  c10::SmallVector<MetaP, 1> fresh, written;  // of its results; null: an undefined tensor
  c10::SmallVector<ViewKindP, 1> kinds;       // of its results, if they are views
  c10::SmallVector<LinkP, 1> links;           // so, to them from a whole storage
  std::vector<int32_t> alive;  // the values that were shown when a trace ended here last
  HeldP alive_tuple;           // the same in Python: compared in no time, when it is a key

  explicit Step(py::handle node);  // needs the GIL
  // The step below by that key, or null.
  Step* find(const Words& key);
  void add(const Words& key, StepP step);
  // By the key that leads to a step below this one; empty: none does.
  Words key_of(const Step* step) const;
  void forget(const Step* step);
  // Of the steps below.
  std::vector<std::vector<uint64_t>> keys() const;
  void release_resources() override { children_.clear(); }

 private:
  struct Child {
    c10::SmallVector<uint64_t, 7> key;
    StepP step;
    MetaP named;  // by its address in the key
    bool matches(const Words& words) const {
      return key.size() == words.size() && std::equal(words.begin(), words.end(), key.begin());
    }
  };
  size_t likely_ = 0;  // the child that came last time
  c10::SmallVector<Child, 1> children_;
  std::unordered_map<uint64_t, std::vector<size_t>> places_;  // by hash, once there are many
};

// The native side of a TrieNode, made if need be; needs the GIL.
StepP step_of(py::handle node);
// Says how the results of an op's step are made; needs the GIL.
void prepare(Step& step, const Facts& f);
// The view kinds of a step, made once; needs the GIL.
const c10::SmallVector<ViewKindP, 1>& kinds_of(Step& step);
// Adds the step of a TrieNode below another's as it was added, below `before`, for an earlier one: by
// the same key, but for how an input looks, and for sizes among an op's arguments. Both do the same,
// perhaps in other sizes. Needs the GIL.
void add_again(py::handle parent, py::handle made, py::handle before, py::handle old);
void set_view_ops(py::object view_ops);  // record.views.view_ops
}  // namespace lazygt
