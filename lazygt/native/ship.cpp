#include "ship.h"

#include "storage.h"

#include <torch/csrc/jit/python/pybind_utils.h>

namespace lazygt {
namespace {
Living living(Recorder& r) {
  Living found;
  for (size_t i = 0; i < r.owners.size(); ++i) {
    if (r.owners[i].use_count() == 0) continue;
    auto cell = r.owners[i].lock();
    if (!cell || cell->index != int32_t(i) || cell->serial != r.serial) continue;
    found.cells.push_back(std::move(cell));
    found.numbers.push_back(int32_t(i));
  }
  return found;
}

py::tuple numbers(const Living& living) {
  py::tuple all(living.numbers.size());
  for (size_t i = 0; i < living.numbers.size(); ++i) all[i] = living.numbers[i];
  return all;
}

py::list storages(const Living& living) {
  py::list all;
  for (const auto& cell : living.cells) all.append(storage_of(cell));
  return all;
}

// Moves out what the trace has noted; the next one is likely to note as much.
Ended end(Recorder& r) {
  Ended ended;
  static_cast<Noted&>(ended) = std::move(static_cast<Noted&>(r));
  ended.serial = r.serial;
  static_cast<Noted&>(r) = Noted();
  r.params.reserve(ended.params.size());
  r.inputs.reserve(ended.inputs.size());
  r.marks.reserve(ended.marks.size());
  return ended;
}

Ids input_ids(const Ended& ended) {
  Ids ids;
  ids.list.reserve(ended.inputs.size());
  for (const auto& [cell, remote] : ended.inputs) ids.list.push_back(remote->id);
  return ids;
}

// An input that nobody else holds is freed with its run.
void let_go(Ended& ended) {
  for (auto& [weak, remote] : ended.inputs) {
    auto cell = weak.lock();
    if (cell && cell->serial == ended.serial && cell->index < 0) cell->serial = 0;
  }
  ended.inputs.clear();
}

// -- what Python takes over ----------------------------------------------------------------------

py::object python_number(const c10::IValue& number) {
  if (number.isDouble()) return checked(PyFloat_FromDouble(number.toDouble()));
  return torch::jit::toPyObject(number);
}

py::list take_params(Noted& noted) {
  py::list taken;
  for (const auto& number : noted.params) taken.append(python_number(number));
  noted.params.clear();
  return taken;
}

py::list take_marks(Noted& noted) {
  py::list taken;
  for (const auto& mark : noted.marks) taken.append(call_site(mark));
  noted.marks_taken += noted.marks.size();
  noted.marks.clear();
  return taken;
}

// (weak reference to the storage, RemoteValue) of each
py::list take_inputs(Noted& noted) {
  py::list taken;
  auto entered = std::move(noted.inputs);
  noted.inputs.clear();
  for (auto& [weak, remote] : entered) {
    auto cell = weak.lock();
    if (!cell) cell = c10::make_intrusive<Cell>(nullptr, 0, 0, intern({}, {}, 0, at::kFloat));  // gone
    auto reference = checked(PyWeakref_NewRef(storage_of(cell).ptr(), nullptr));
    taken.append(py::make_tuple(reference, remote));
  }
  return taken;
}

// -- what handles show of a run ------------------------------------------------------------------

Outputs outputs_of(const std::vector<int32_t>& numbers, const std::vector<int32_t>& makers,
                   const py::tuple& shardings) {
  TORCH_CHECK(numbers.size() == makers.size() && numbers.size() == shardings.size() &&
              std::is_sorted(numbers.begin(), numbers.end()), "outputs are in order");
  Outputs outputs{numbers, makers, {}};
  for (auto sharding : shardings) outputs.shardings.push_back(sharding_number(sharding));
  return outputs;
}

// A plan may make more than is still shown: what it makes in vain stays in `values`.
void rebind(const Outputs& outputs, const Living& living, Values& values, const CallSites& sites,
            py::handle backward) {
  Mark elsewhere = mark_of(backward);
  size_t place = 0;
  for (size_t i = 0; i < living.cells.size(); ++i) {
    while (place < outputs.numbers.size() && outputs.numbers[place] < living.numbers[i]) ++place;
    TORCH_CHECK(place < outputs.numbers.size() && outputs.numbers[place] == living.numbers[i],
                "the plan does not make value ", living.numbers[i]);
    auto remote = values.take(place);
    remote->sharding = outputs.shardings[place];
    const Mark& mark = sites.marks.at(outputs.makers[place]);
    remote->mark = mark.code == nullptr ? elsewhere : mark;
    living.cells[i]->set_remote(std::move(remote));
  }
}

template <class Class>
void bind_noted(Class& type) {
  type.def("take_params", [](typename Class::type& noted) { return take_params(noted); })
      .def("take_marks", [](typename Class::type& noted) { return take_marks(noted); })
      .def("take_inputs", [](typename Class::type& noted) { return take_inputs(noted); });
}

CallSites sites_of(const py::list& rows) {
  CallSites sites;
  for (auto row : rows) sites.marks.push_back(mark_of(row));
  return sites;
}

py::object site(const CallSites& sites, int64_t at) {
  int64_t size = int64_t(sites.marks.size());
  if (at < -size || at >= size) throw py::index_error();
  return call_site(sites.marks[at < 0 ? at + size : at]);
}
}  // namespace

void bind_ship(py::module_& m, py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>& type) {
  type.def("alive", &living).def("end", &end);
  bind_noted(type);
  py::class_<Living>(m, "Living")
      .def_property_readonly("numbers", &numbers)
      .def_property_readonly("storages", &storages);
  py::class_<Ended> ended(m, "Ended");
  ended.def("input_ids", &input_ids).def("let_go", &let_go);
  ended.def("call_sites", [](Ended& noted) { return CallSites{std::move(noted.marks)}; });
  bind_noted(ended);
  py::class_<CallSites>(m, "CallSites")
      .def(py::init(&sites_of))
      .def("__len__", [](const CallSites& sites) { return sites.marks.size(); })
      .def("__getitem__", &site)
      .def("__iter__", [](const CallSites& sites) {
        py::list all;
        for (const auto& mark : sites.marks) all.append(call_site(mark));
        return py::iter(all);
      });
  py::class_<Outputs>(m, "Outputs").def(py::init(&outputs_of)).def("rebind", &rebind);
}
}  // namespace lazygt
