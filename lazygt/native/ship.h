// A trace that has ended, on its way to the workers: which values are still shown, what its run
// gets, and what handles show of its outputs.
#pragma once
#include "recorder.h"

namespace lazygt {
// The user's frame of each op, as a sequence of graph.source.CallSite.
struct CallSites {
  std::vector<Mark> marks;
};

// The cells that still show a value of the trace, and those values' numbers.
struct Living {
  StepP step;  // where it ended
  std::vector<CellP> cells;
  std::vector<int32_t> numbers;
};

// What handles show of the outputs of a plan: planner.CachedPlan says more of it.
struct Outputs {
  std::vector<int32_t> numbers;  // of the trace's values, in order
  std::vector<int32_t> makers;
  std::vector<uint32_t> shardings;
};

void bind_ship(py::module_& m, py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>& type);
}  // namespace lazygt
