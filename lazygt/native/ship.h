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

// The cells that have shown each value and each input of a trace, so far as they live.
struct Shown {
  std::vector<c10::weak_intrusive_ptr<Cell>> values, inputs;
};

// What handles show of the outputs of a plan: planner.CachedPlan says more of it.
struct Outputs {
  std::vector<int32_t> numbers;  // of the trace's values, in order
  std::vector<int32_t> makers;
  std::vector<uint32_t> shardings;
};

// What is still shown of the trace, and the same as Python's tuple of numbers.
Living living(Recorder& r);
py::object numbers(const Living& living);

// What Python has not taken of a trace that ends. An input that nobody else holds is freed with the run.
Ids take_inputs(Recorder& r);  // the ids of all blocks
py::tuple take_params(Recorder& r);
CallSites take_sites(Recorder& r);
Shown take_shown(Recorder& r);

// Shows a run's values. What the plan makes in vain stays in `values`.
void rebind(const Outputs& outputs, const Living& living, Values& values, const CallSites& sites,
            py::handle backward);

void bind_ship(py::module_& m, py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>& type);
}  // namespace lazygt
