// What workers hold, as the client speaks of it: runtime.values.RemoteValue, and what becomes of
// its id when nobody speaks of it any more.
#pragma once
#include "marks.h"

#include <atomic>
#include <vector>

namespace lazygt {
struct Ids {
  std::vector<int64_t> list;
};

// Ids to free with the next run. Any thread may add one, with or without the GIL.
class Freed final : public c10::intrusive_ptr_target {
 public:
  void add(int64_t id) {
    auto* entry = new Entry{id, newest_.load(std::memory_order_relaxed)};
    while (!newest_.compare_exchange_weak(entry->before, entry)) {
    }
  }
  bool empty() const { return newest_.load() == nullptr; }
  Ids take();  // in order
  ~Freed() override { take(); }

 private:
  struct Entry {
    int64_t id;
    Entry* before;
  };
  std::atomic<Entry*> newest_{nullptr};  // no lock: a fork might leave it taken
};
using FreedP = c10::intrusive_ptr<Freed>;

struct Remote final : c10::intrusive_ptr_target {
  int64_t id;
  uint32_t sharding = 0;  // how it lies on the mesh; 0: whole on every worker
  Mark mark{nullptr, 0};  // the user's line that made it
  FreedP freed;
  HeldP rest;  // the further blocks of a value of which a rank holds several

  Remote(int64_t id, FreedP freed) : id(id), freed(std::move(freed)) {}
  ~Remote() override { freed->add(id); }
};
using RemoteP = c10::intrusive_ptr<Remote>;

// The values that a run makes, whose ids follow one another. What nobody takes is freed.
class Values {
 public:
  Values(int64_t first, size_t count, FreedP freed)
      : first_(first), taken_(count), freed_(std::move(freed)) {}
  Values(const Values&) = delete;
  ~Values();
  RemoteP take(size_t place);
  size_t size() const { return taken_.size(); }

 private:
  int64_t first_;
  std::vector<bool> taken_;
  FreedP freed_;
};

void bind_remote(py::module_& m);
}  // namespace lazygt
