// A proxy owns its cell while Python holds the proxy. When Python drops the last reference and the
// cell lives on, the cell owns the proxy from there (as torch does with its tensors), so weak
// references to it, and what Python has put there, last as long as the cell.
#include "storage.h"

#include "recorder.h"

#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>

namespace lazygt {
namespace {
struct Proxy {
  PyObject_HEAD
  Cell* cell;  // counted unless the cell keeps this proxy; null when the cell is gone
  PyObject *placed, *saved, *addresses, *weak_references;
};

PyTypeObject* shown_as = nullptr;

Proxy* proxy(PyObject* self) { return reinterpret_cast<Proxy*>(self); }

// Python drops its last reference.
void finalize(PyObject* self) {
  Cell* cell = proxy(self)->cell;
  if (cell == nullptr || cell->keeps_proxy || c10::raw::intrusive_ptr::use_count(cell) < 2) return;
  cell->keeps_proxy = true;
  Py_INCREF(self);
  c10::raw::intrusive_ptr::decref(cell);
}

void deallocate(PyObject* self) {
  auto* p = proxy(self);
  if (p->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  if (Cell* cell = std::exchange(p->cell, nullptr)) {
    bool counted = !cell->keeps_proxy;
    cell->proxy = nullptr;
    cell->keeps_proxy = false;
    if (counted) c10::raw::intrusive_ptr::decref(cell);
  }
  Py_CLEAR(p->placed);
  Py_CLEAR(p->saved);
  Py_CLEAR(p->addresses);
  Py_TYPE(self)->tp_free(self);
}

PyObject* create(CellP cell) {
  TORCH_CHECK(shown_as != nullptr, "no type for storages has been set");
  auto* self = proxy(shown_as->tp_alloc(shown_as, 0));
  if (self == nullptr) throw_python();
  self->cell = cell.release();  // counted
  self->cell->proxy = reinterpret_cast<PyObject*>(self);
  self->cell->keeps_proxy = false;
  return reinterpret_cast<PyObject*>(self);
}

PyObject* make(PyTypeObject*, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *owner, *meta;
  unsigned long long serial;
  int index;
  if (!PyArg_ParseTuple(arguments, "OKiO", &owner, &serial, &index, &meta)) return nullptr;
  return create(c10::make_intrusive<Cell>(recorder_of(owner), serial, index, meta_of(meta)));
  END_HANDLE_TH_ERRORS
}

// -- attributes; a proxy whose cell is gone shows a value of no trace --------------------------

PyObject* get_owner(PyObject* self, void*) {
  Cell* cell = proxy(self)->cell;
  if (cell == nullptr) Py_RETURN_NONE;
  return owner_of(*cell).release().ptr();
}
PyObject* get_serial(PyObject* self, void*) {
  Cell* cell = proxy(self)->cell;
  return PyLong_FromUnsignedLongLong(cell ? cell->serial : 0);
}
PyObject* get_index(PyObject* self, void*) {
  Cell* cell = proxy(self)->cell;
  return PyLong_FromLong(cell ? cell->index : 0);
}
PyObject* get_blank(PyObject* self, void*) {
  Cell* cell = proxy(self)->cell;
  return PyBool_FromLong(cell && cell->blank);
}
PyObject* get_meta(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  Cell* cell = proxy(self)->cell;
  TORCH_CHECK(cell != nullptr, "the storage that this stood for is gone");
  const MetaP meta = cell->meta;  // another thread may end the cell while Python runs
  return tensor_meta(*meta).release().ptr();
  END_HANDLE_TH_ERRORS
}
PyObject* get_remote(PyObject* self, void*) {
  Cell* cell = proxy(self)->cell;
  if (cell == nullptr || !cell->remote) Py_RETURN_NONE;
  HANDLE_TH_ERRORS
  return py::cast(cell->remote).release().ptr();
  END_HANDLE_TH_ERRORS
}
PyObject* get_host(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  Cell* cell = proxy(self)->cell;
  if (cell == nullptr || !cell->host.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(cell->host);
  END_HANDLE_TH_ERRORS
}

template <class Set>
int assign(PyObject* self, PyObject* value, Set set) {
  Cell* cell = proxy(self)->cell;
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "an attribute of a storage can't be deleted");
    return -1;
  }
  try {
    if (cell != nullptr) set(*cell);
  } catch (python_error& error) {
    error.restore();
    return -1;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return -1;
  }
  return PyErr_Occurred() ? -1 : 0;
}
int set_serial(PyObject* self, PyObject* value, void*) {
  return assign(self, value, [&](Cell& cell) { cell.serial = PyLong_AsUnsignedLongLong(value); });
}
int set_index(PyObject* self, PyObject* value, void*) {
  return assign(self, value, [&](Cell& cell) { cell.index = int32_t(PyLong_AsLong(value)); });
}
int set_blank(PyObject* self, PyObject* value, void*) {
  return assign(self, value, [&](Cell& cell) { cell.blank = PyObject_IsTrue(value) == 1; });
}
int set_remote(PyObject* self, PyObject* value, void*) {
  return assign(self, value, [&](Cell& cell) {
    cell.remote = value == Py_None ? RemoteP() : py::cast<RemoteP>(py::handle(value));
  });
}
int set_host(PyObject* self, PyObject* value, void*) {
  return assign(self, value, [&](Cell& cell) {
    if (value != Py_None) TORCH_CHECK(THPVariable_Check(value), "a host value is a tensor");
    cell.host = value == Py_None ? at::Tensor() : THPVariable_Unpack(value);
  });
}

PyGetSetDef attributes[] = {
    {"owner", get_owner, nullptr, nullptr, nullptr},
    {"serial", get_serial, set_serial, nullptr, nullptr},
    {"index", get_index, set_index, nullptr, nullptr},
    {"blank", get_blank, set_blank, nullptr, nullptr},
    {"meta", get_meta, nullptr, nullptr, nullptr},
    {"remote", get_remote, set_remote, nullptr, nullptr},
    {"host", get_host, set_host, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyMemberDef members[] = {
    {"placed", T_OBJECT, offsetof(Proxy, placed), 0, nullptr},
    {"saved", T_OBJECT_EX, offsetof(Proxy, saved), 0, nullptr},
    {"_addresses", T_OBJECT_EX, offsetof(Proxy, addresses), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

std::vector<PyObject*>& shardings() {
  static auto* known = new std::vector<PyObject*>();
  return *known;
}
}  // namespace

void forget_proxy(PyObject* object) { proxy(object)->cell = nullptr; }

PyTypeObject* storage_base() {
  static PyTypeObject type = [] {
    PyTypeObject t = {PyVarObject_HEAD_INIT(nullptr, 0)};
    t.tp_name = "lazygt._native.Cell";
    t.tp_basicsize = sizeof(Proxy);
    t.tp_dealloc = deallocate;
    t.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
    t.tp_weaklistoffset = offsetof(Proxy, weak_references);
    t.tp_members = members;
    t.tp_getset = attributes;
    t.tp_new = make;
    t.tp_finalize = finalize;
    return t;
  }();
  if (type.tp_dict == nullptr && PyType_Ready(&type) < 0) throw_python();
  return &type;
}

void set_storage_type(py::handle type) {
  TORCH_CHECK(PyType_Check(type.ptr()) &&
                  PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), storage_base()),
              "storages are shown as a subclass of Cell");
  auto* shown = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  TORCH_CHECK(shown->tp_basicsize == storage_base()->tp_basicsize, "it must have no slots");
  // Python finalises what its collector tracks once only, and a proxy is brought back often
  shown->tp_flags &= ~Py_TPFLAGS_HAVE_GC;
  shown->tp_traverse = nullptr;
  shown->tp_clear = nullptr;
  shown->tp_free = PyObject_Free;
  PyType_Modified(shown);
  shown_as = shown;
}

py::object storage_of(const CellP& cell) {
  PyObject* known = cell->proxy;
  if (known == nullptr) return py::reinterpret_steal<py::object>(create(cell));
  if (!cell->keeps_proxy) return py::reinterpret_borrow<py::object>(known);
  cell->keeps_proxy = false;  // its reference becomes the caller's, and the proxy counts again
  c10::raw::intrusive_ptr::incref(cell.get());
  return py::reinterpret_steal<py::object>(known);
}

CellP cell_of(py::handle storage) {
  TORCH_CHECK(PyObject_TypeCheck(storage.ptr(), storage_base()), "expected a storage");
  Cell* cell = proxy(storage.ptr())->cell;
  TORCH_CHECK(cell != nullptr, "the storage that this stood for is gone");
  return CellP::reclaim_copy(cell);
}

uint32_t sharding_number(py::handle sharding) {
  if (sharding.is_none()) return 0;
  static PyObject* numbers = PyDict_New();
  PyObject* known = PyDict_GetItemWithError(numbers, sharding.ptr());
  if (known != nullptr) return uint32_t(PyLong_AsUnsignedLong(known));
  if (PyErr_Occurred()) throw_python();
  shardings().push_back(sharding.inc_ref().ptr());
  auto number = checked(PyLong_FromSize_t(shardings().size()));
  if (PyDict_SetItem(numbers, sharding.ptr(), number.ptr()) < 0) throw_python();
  return uint32_t(shardings().size());
}

py::object sharding_of(uint32_t number) {
  if (number == 0) return py::none();
  return py::reinterpret_borrow<py::object>(shardings().at(number - 1));
}
}  // namespace lazygt
