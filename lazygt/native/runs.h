// Runs, as client and worker speak of them.
#pragma once
#include "python.h"

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace lazygt {
// Of a list of ids: the same as was to be expected, or a whole list, or (place, id) pairs.
struct Update {
  enum Kind { WHOLE = 0, PAIRS = 1, EXPECTED } kind = EXPECTED;
  std::vector<int64_t> ids;
};

// What of `runtime.messages.Run` is not out of the ordinary.
struct RunMessage {
  int64_t seq = 0, base = 0;
  std::string digest;  // empty: nothing is run
  Update inputs, frees;
  py::object params;  // null: those of the last run
  std::vector<int64_t> fetches;

  // As it travels: by the number of its class. Its params have no complex ones.
  std::string packed(int64_t tag) const;
};

// Of `Runs`, which bind_runs makes: whether a plan's runs are its, and what it says to a run.
bool knows(py::handle runs, const std::string& digest);
py::object act(py::handle runs, const RunMessage& message);

// Of `Answers`: the number that is all that run `seq` is answered with.
std::optional<c10::IValue> number_in(py::handle answers, py::handle frames, uint64_t seq);
// Whether a number of this dtype may be read so.
bool is_plain(at::ScalarType kind);
}  // namespace lazygt
