// Marks: the user's frame of each op (graph.source.CallSite), taken without the GIL.
#pragma once
#include "python.h"

namespace lazygt {
struct Mark {
  PyCodeObject* code;  // kept for good once seen; null: no user's frame is on this thread's stack
  int lasti;
};
Mark user_mark();
// (code, lasti) or None; needs the GIL.
py::object call_site(const Mark& mark);
// Of such a tuple; its code object is kept, too.
Mark mark_of(py::handle call_site);
void set_library_test(py::object is_library);  // graph.source.is_library
}  // namespace lazygt
