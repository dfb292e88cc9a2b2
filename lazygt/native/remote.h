// What workers hold, as the client speaks of it: runtime.values.RemoteValue, and what becomes of
// its id when nobody speaks of it any more.
#pragma once
#include "marks.h"

#include <atomic>
#include <optional>
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

// What is surprising in a list of ids: all of it, or (place, id) pairs.
struct IdUpdate {
  bool whole;
  std::vector<int64_t> numbers;
};

// runtime.wire.DeltaCodec says what it does; the workers have that one.
class DeltaCodec {
 public:
  // Nothing: the list is as was to be expected.
  std::optional<IdUpdate> encode(std::vector<int64_t> ids, int64_t base);

 private:
  int64_t base_ = 0;
  std::vector<int64_t> ids_;
  std::vector<bool> moving_;
};

void bind_remote(py::module_& m);
}  // namespace lazygt
