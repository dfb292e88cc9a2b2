// What Python sees of a Cell: an object with the attributes of record.tensor.Storage. It is made
// when Python asks, and is the same object for as long as the cell lives or Python holds it.
#pragma once
#include "handle.h"

namespace lazygt {
// All need the GIL.
PyTypeObject* storage_base();               // lazygt._native.Cell
void set_storage_type(py::handle type);     // what it shows as: a subclass without slots
py::object storage_of(const CellP& cell);
CellP cell_of(py::handle storage);
uint32_t sharding_number(py::handle sharding);  // 0: None
py::object sharding_of(uint32_t number);
}  // namespace lazygt
