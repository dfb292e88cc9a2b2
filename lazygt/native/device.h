// Device "lazygt" for torch, in C++: its guard, its hooks, and a kernel an op.
#pragma once
#include "python.h"

#include <set>
#include <string>

namespace lazygt {
// Registers them, once a process.
//
// Args:
//   elsewhere: ops of aten (with overload) that have kernels of their own, written in Python.
//   composite: composite ops that are recorded as they are.
//   no_session: called with (op, args, kwargs) of an op while no session is open.
void register_device(const std::set<std::string>& elsewhere, const std::set<std::string>& composite,
                     py::object no_session);
// Records an op of another library as one op, though it has a kernel that computes on any device,
// which torch would take before the fallback.
void record_whole(const std::string& space, const std::string& op);
}  // namespace lazygt
