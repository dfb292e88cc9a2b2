// Device "lazygt" for torch, in C++: its guard, its hooks, and a kernel an op.
#pragma once
#include "python.h"

#include <ATen/core/boxing/BoxedKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>
#include <vector>

namespace lazygt {
// Registers them, once a process.
//
// Args:
//   elsewhere: ops of aten (with overload) that have kernels of their own, written in Python.
//   composite: composite ops that are recorded as they are.
//   no_session: called with (op, args, kwargs) of an op while no session is open.
void register_device(const std::set<std::string>& elsewhere, const std::set<std::string>& composite,
                     py::object no_session);
// The generator of the CPU that one of this device draws from; any other generator itself.
py::object host_generator(py::object generator);
// Records a call as the kernel of boxed arguments does.
void record_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack);
// The ops of aten (with overload) that have a kernel which takes arguments without boxes.
std::vector<std::string> unboxed_ops();
// Whether an op of aten (with overload) has a kernel that takes its arguments without boxes.
bool takes_unboxed(const std::string& name);
// Registers that kernel; what it can't do it leaves to the boxed one.
void register_unboxed(const c10::OperatorHandle& op, const std::string& name, c10::BoxedKernel boxed);
// Records an op of another library as one op, though it has a kernel that computes on any device,
// which torch would take before the fallback.
void record_whole(const std::string& space, const std::string& op);
}  // namespace lazygt
