// Kernels for ops that come often, without boxed arguments. Boxing copies each handle, and a handle
// whose Python object lives costs the GIL to copy.
#pragma once
#include "recorder.h"

#include <torch/library.h>

#include <set>
#include <string>

namespace lazygt {
void record_boxed(Facts& f, Stack& stack);  // device.cpp
// Their names, without "aten::".
std::set<std::string> register_typed(torch::Library& aten);
}  // namespace lazygt
