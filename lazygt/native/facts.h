// What recording needs to know of an op: read from Python's graph.ops.OpFacts, at its first use.
#pragma once
#include "positions.h"
#include "python.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace lazygt {
// How an op is recorded.
enum class RecordKind : uint8_t {
  PYTHON,     // by the Python recorder: a handler, a draw, or a result that only values tell
  ORDINARY,   // as a step, here
  MASKED,     // so, unless an index is a mask
  DEVICE,     // so, unless it says another device
  BOTH_LAZY,  // so, if its first two arguments are lazy (copy_)
  FLAGGED,    // so, by one of two facts: it writes more when a flag is set (batch norm)
  RESHAPED,   // so, unless the shape is the same (view): then it is a twin
  TWIN,       // no step: another handle for the same (detach)
  ITSELF,     // no step: its first argument
  ITEM,       // a number of the client is read here, others by Python
  AS_VIEW,    // as a view of that shape: its strides say nothing more (reshape asks for both)
  DRAW,       // as a step, while the workers have the random stream
  BLANK,      // no step: torch.empty, as long as it is plain
};

enum class Out : uint8_t { FRESH, FRESH_LIST, VIEW, VIEW_LIST, WRITTEN, WRITTEN_LIST, OTHER };

struct Facts {
  c10::OperatorHandle op;
  uint32_t id;
  PyObject* func;   // the OpOverload
  PyObject* facts;  // the OpFacts
  RecordKind record_kind = RecordKind::PYTHON;
  int at = 0;                // DEVICE: that argument; FLAGGED: the flag
  Facts* writing = nullptr;  // FLAGGED: when the flag is on
  size_t positional = 0;     // arguments that are not keyword-only
  std::vector<uint8_t> hoist;  // 1: a number there is data; 2: a list of numbers is
  std::vector<const c10::IValue*> defaults;  // null: none
  std::vector<int> writes;                   // arguments, in the schema's order
  std::vector<Out> outs;
  std::vector<int> returned;  // of each result the argument that it is, or -1
  int viewed = 0;             // the argument that results are views of
  bool pointwise = false;
  MoveRule rule = nullptr;  // of an op with a position

  size_t arguments() const { return hoist.size(); }
};

// Of an op of torch's own; the first call takes the GIL. Lives for good.
Facts& facts_of(const c10::OperatorHandle& op);
// The argument is left out, as torch leaves it out when it calls Python.
bool equals_default(const c10::IValue& given, const c10::IValue& standing);
// Positional arguments before those at the end that are as the schema says.
size_t given_positional(const Facts& f, c10::ArrayRef<c10::IValue> args);
// (args, kwargs) as torch would hand them to __torch_dispatch__; needs the GIL.
std::pair<py::object, py::object> python_arguments(const Facts& f, c10::ArrayRef<c10::IValue> args);
// Puts what Python returned on the stack; needs the GIL.
void push_results(const c10::OperatorHandle& op, py::handle result, std::vector<c10::IValue>& stack);
// Says who tells of an op: lazygt.record.bridge.learn.
void set_teacher(py::object learn);
}  // namespace lazygt
