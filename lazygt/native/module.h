// What the extension is made of. Loading it registers nothing with torch: the recorder does that
// when a client has chosen it, and a worker only ever asks for the executor.
#pragma once
#include <pybind11/pybind11.h>

namespace lazygt {
// Weak: a build of one part alone, for its tests, has only that.
__attribute__((weak)) void bind_recorder(pybind11::module_& m);
__attribute__((weak)) void bind_executor(pybind11::module_& m);
__attribute__((weak)) void bind_runs(pybind11::module_& m);
__attribute__((weak)) void bind_mailboxes(pybind11::module_& m);
__attribute__((weak)) void bind_accelerator(pybind11::module_& m);
__attribute__((weak)) void bind_compiled(pybind11::module_& m);
}  // namespace lazygt
