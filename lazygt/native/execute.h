// What else runs programs.
#pragma once
#include "python.h"

namespace lazygt {
// Runs one; `inputs` is emptied. A list of the outputs, or (node, values) where it stopped.
py::object run_program(py::handle program, const py::list& inputs, const py::tuple& params);
}  // namespace lazygt
