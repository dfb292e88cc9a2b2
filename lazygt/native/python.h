// What C++ asks of Python: references that may be dropped without the GIL, and exceptions that
// travel through torch.
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace lazygt {
namespace py = pybind11;

// Holds the GIL for a block, whether or not the thread had it.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

inline bool python_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Drops a reference from a thread that may not have the GIL; at the interpreter's end it stays.
inline void drop(PyObject* object) {
  if (object == nullptr || python_ends()) return;
  Gil gil;
  Py_DECREF(object);
}

// A Python object that C++ shares without the GIL: it is taken for the last drop only.
struct Held final : c10::intrusive_ptr_target {
  PyObject* object;
  explicit Held(PyObject* borrowed) : object(borrowed) { Py_INCREF(object); }
  void release_resources() override { drop(std::exchange(object, nullptr)); }
  ~Held() override { drop(object); }
};
using HeldP = c10::intrusive_ptr<Held>;

// Throws the Python exception that is set, as torch's own kernels do. Needs the GIL.
[[noreturn]] inline void throw_python() {
  python_error error;
  error.persist();
  throw error;
}

// The result of a C API call, owned; throws when there is none. Needs the GIL.
inline py::object checked(PyObject* result) {
  if (result == nullptr) throw_python();
  return py::reinterpret_steal<py::object>(result);
}

// `target.name(...)`; what it raises is thrown as torch's kernels throw it. Needs the GIL.
template <class... A>
py::object call_method(py::handle target, const char* name, const A&... arguments) {
  auto method = checked(PyObject_GetAttrString(target.ptr(), name));
  return checked(PyObject_CallFunctionObjArgs(method.ptr(), arguments.ptr()..., nullptr));
}

inline py::object attribute(py::handle target, const char* name) {
  return checked(PyObject_GetAttrString(target.ptr(), name));
}

inline int64_t int_attribute(py::handle target, const char* name) {
  auto value = attribute(target, name);
  int64_t number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred()) throw_python();
  return number;
}

// Names of Python's attributes, made once.
#define NAME(name)                                                      \
  [] {                                                                  \
    static PyObject* const name_ = PyUnicode_InternFromString(#name);   \
    return name_;                                                       \
  }()

inline py::object get(py::handle object, PyObject* name) {
  return checked(PyObject_GetAttr(object.ptr(), name));
}
inline void set(py::handle object, PyObject* name, py::handle value) {
  if (PyObject_SetAttr(object.ptr(), name, value.ptr()) < 0) throw_python();
}

inline py::object number_object(int64_t number) { return checked(PyLong_FromLongLong(number)); }
inline int64_t number_of(PyObject* object) {
  int64_t number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw_python();
  return number;
}
inline int64_t get_number(py::handle object, PyObject* name) { return number_of(get(object, name).ptr()); }
}  // namespace lazygt
