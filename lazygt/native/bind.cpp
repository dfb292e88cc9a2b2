// What Python sees of recording.
#include "device.h"
#include "fetch.h"
#include "module.h"
#include "recorder.h"
#include "ship.h"
#include "storage.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <unordered_set>

namespace lazygt {
namespace {
const at::Tensor& tensor_of(py::handle t) {
  TORCH_CHECK(THPVariable_Check(t.ptr()), "expected a tensor");
  return THPVariable_Unpack(t.ptr());
}

py::object wrap(at::Tensor t) { return checked(THPVariable_Wrap(std::move(t))); }

template <class Items, class Function>
py::tuple tuple_of(const Items& items, Function function) {
  py::tuple tuple(items.size());
  for (size_t i = 0; i < items.size(); ++i) tuple[i] = function(items[i]);
  return tuple;
}

// -- by METH_O: they are asked often -------------------------------------------------------------

PyObject* is_lazy_object(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(object)) Py_RETURN_FALSE;
  return PyBool_FromLong(is_lazy(THPVariable_Unpack(object)));
  END_HANDLE_TH_ERRORS
}

PyObject* storage_of_handle(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  return storage_of(handle(tensor_of(object))->cell).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* view_of_handle(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const auto& view = handle(tensor_of(object))->view;
  if (!view) Py_RETURN_NONE;
  return py::cast(view).release().ptr();
  END_HANDLE_TH_ERRORS
}

// The dicts among `namespaces` that have one of the objects `wanted` as a value.
py::list holders(const py::list& namespaces, const py::list& wanted) {
  std::unordered_set<PyObject*> ids;
  for (py::handle object : wanted) ids.insert(object.ptr());
  py::list found;
  for (py::handle namespace_ : namespaces) {
    Py_ssize_t at = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(namespace_.ptr(), &at, nullptr, &value)) {
      if (ids.count(value) == 0) continue;
      found.append(namespace_);
      break;
    }
  }
  return found;
}

PyMethodDef methods[] = {
    {"is_lazy", is_lazy_object, METH_O, "Whether it is a handle."},
    {"storage_of", storage_of_handle, METH_O, "What a handle looks at."},
    {"view_of", view_of_handle, METH_O, "How it looks at it, or None."},
    {nullptr, nullptr, 0, nullptr},
};

// -- what has been recorded ----------------------------------------------------------------------

void bind_trace(py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>& type) {
  type.def_readonly("serial", &Recorder::serial)
      .def("begin", [](Recorder& r, uint64_t serial, py::object root, py::object trace) {
        r.begin(serial, step_of(root), trace);
      })
      .def_property(
          "step", [](Recorder& r) { return py::reinterpret_borrow<py::object>(r.step->node); },
          [](Recorder& r, py::object node) { r.step = step_of(node); })
      .def_property_readonly("ops", [](Recorder& r) { return r.marks_taken + r.marks.size(); })
      .def("advance", [](Recorder& r, py::object node) { r.advance(step_of(node)); })
      .def_property_readonly("room", [](Recorder& r) { return r.owners.size(); })
      .def_property_readonly("entered", [](Recorder& r) { return py::cast(r.inputs); })
      .def("reserve", [](Recorder& r) { r.reserve(*r.step); })
      .def("settle", &Recorder::settle)
      .def("index_of", [](Recorder& r, py::object t) { return r.index_of(handle(tensor_of(t))); })
      .def("enter", [](Recorder& r, py::object storage) { r.enter(cell_of(storage)); })
      .def("own", [](Recorder& r, py::object storage, int32_t index) { r.own(cell_of(storage), index); })
      .def("show", [](Recorder& r, int32_t index, py::object meta) {
        TORCH_CHECK(index >= 0 && size_t(index) < r.owners.size(), "the trace has no value ", index);
        return wrap(r.show(index, meta_of(meta)));
      })
      .def("show_views", [](Recorder& r, py::object source) {
        py::list views;
        const auto& kinds = kinds_of(*r.step);
        for (size_t i = 0; i < kinds.size(); ++i) {
          views.append(wrap(r.show_view(*r.step, *handle(tensor_of(source)), i)));
        }
        return views;
      });
}
}  // namespace

Recorder* recorder_of(py::handle owner) {
  return py::cast<Recorder*>(attribute(owner, "native"));
}

void bind_recorder(py::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw_python();
  m.attr("Cell") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(storage_base()));
  py::class_<View, ViewP>(m, "View")
      .def_readwrite("serial", &View::serial)
      .def_readwrite("base", &View::base)
      .def_readwrite("index", &View::index)
      .def_property_readonly("ops", [](const View& view) {
        auto last = view.now().first;
        return tuple_of(chain(last), [](Link* link) { return py::handle(link->kind->op->object); });
      })
      .def_property_readonly("numbers", [](const View& view) {
        auto last = view.now().first;
        auto links = chain(last);
        links.erase(std::remove_if(links.begin(), links.end(), [](Link* l) { return !l->kind->moves; }), links.end());
        return tuple_of(links, [](Link* link) { return py::int_(link->position); });
      })
      .def_property_readonly("params", [](const View& view) {
        return tuple_of(view.now().second, [](int32_t param) { return py::int_(param); });
      })
      .def_property_readonly("shift", [](const View& view) { return view.now().first->shift; })
      .def("copy", [](const View& view) { return c10::make_intrusive<View>(view.now().first, 0, 0, 0); });
  py::class_<Lock>(m, "Lock")
      .def("acquire", &Lock::acquire)
      .def("release", &Lock::release)
      .def("__enter__", &Lock::acquire)
      .def("__exit__", [](Lock& lock, py::args) { lock.release(); })
      .def("_is_owned", &Lock::owned);
  // never freed: a kernel on another thread may be in it, and storages may outlive its session
  py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>> type(m, "Recorder");
  type.def(py::init([](py::object python) { return new Recorder(python); }))
      .def_property_readonly("lock", [](Recorder& r) -> Lock& { return r.lock; }, py::return_value_policy::reference)
      .def_property("closed", [](Recorder& r) { return r.closed.load(); }, [](Recorder& r, bool on) { r.closed = on; })
      .def_readwrite("anchored", &Recorder::anchored)
      .def_property("draws", [](Recorder& r) { return r.draws.load(); }, [](Recorder& r, bool on) { r.draws = on; })
      .def_readwrite("anchor", &Recorder::anchor)
      .def("leave", [](Recorder& r) {
        r.closed = true;
        r.python = r.trace = nullptr;
        r.step.reset();
        r.root.reset();
        r.owners.clear();
        r.inputs.clear();
      });
  bind_remote(m);
  bind_trace(type);
  bind_ship(m, type);
  bind_fetcher(m);
  m.def("handle", [](py::object meta, py::object storage, py::object view) {
    return wrap(new_handle(*meta_of(meta), cell_of(storage), view.is_none() ? ViewP() : py::cast<ViewP>(view)));
  });
  m.def("metas", &metas);
  m.def("owned_metas", &owned_metas);
  m.def("activate", [](py::object recorder) {
    set_active_recorder(recorder.is_none() ? nullptr : py::cast<Recorder*>(recorder));
  });
  m.def("forget", [](py::object parent, py::object child) {
    if (attribute(parent, "native").is_none() || attribute(child, "native").is_none()) return;
    step_of(parent)->forget(step_of(child).get());
  });
  m.def("add_again", [](const py::list& pairs) {  // (step, the earlier one) of each, the first known
    for (size_t i = 1; i < pairs.size(); ++i) {
      py::tuple above = pairs[i - 1], pair = pairs[i];
      add_again(above[0], pair[0], above[1], pair[1]);
    }
  });
  m.def("keys_below", [](py::object node) { return step_of(node)->keys(); });
  m.def("step_below", [](py::object node, const std::vector<uint64_t>& words) -> py::object {
    Words key;
    key.append(words.begin(), words.end());
    Step* step = step_of(node)->find(key);
    return step == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(step->node);
  });
  m.def("new_serial", &new_serial);
  m.def("set_storage_type", [](py::object type) { set_storage_type(type); });
  m.def("connect", [](py::object learn, py::object view_ops, py::object is_library, py::object closed) {
    set_closed_owner(std::move(closed));
    set_teacher(std::move(learn));
    set_view_ops(std::move(view_ops));
    set_library_test(std::move(is_library));
  });
  m.def("register_device", &register_device);
  m.def("host_generator", &host_generator);
  m.def("unboxed_ops", &unboxed_ops);
  m.def("holders", &holders, "Find the dicts that have one of some objects as a value.");
  m.def("record_boxed", [](const std::string& name, const std::string& overload, const py::args& args,
                           const py::kwargs& kwargs) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    auto stack = torch::jit::createStackForSchema(op.schema(), args, kwargs, std::nullopt);
    {
      py::gil_scoped_release release;
      record_boxed(op, stack);
    }
    return torch::jit::createPyObjectForStack(std::move(stack));
  });
  m.def("record_whole", &record_whole, py::call_guard<py::gil_scoped_release>());
}
}  // namespace lazygt
