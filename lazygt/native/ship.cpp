#include "ship.h"

#include "storage.h"

#include <torch/csrc/jit/python/pybind_utils.h>

namespace lazygt {
namespace {
constexpr size_t AHEAD = 8;  // cells lie scattered: so many are on their way to the processor
}  // namespace

Living living(Recorder& r) {
  Living found{r.step, {}, {}};
  const auto& owners = r.owners;
  for (size_t i = 0; i < owners.size(); ++i) {
    if (i + AHEAD < owners.size()) __builtin_prefetch(owners[i + AHEAD]._unsafe_get_target());
    if (owners[i].use_count() == 0) continue;
    auto cell = owners[i].lock();
    if (!cell || cell->index != int32_t(i) || cell->serial != r.serial) continue;
    found.cells.push_back(std::move(cell));
    found.numbers.push_back(int32_t(i));
  }
  return found;
}

py::object numbers(const Living& living) {
  Step& step = *living.step;
  if (!step.alive_tuple || step.alive != living.numbers) {
    py::tuple all(living.numbers.size());
    for (size_t i = 0; i < living.numbers.size(); ++i) all[i] = living.numbers[i];
    step.alive = living.numbers;
    step.alive_tuple = c10::make_intrusive<Held>(all.ptr());
  }
  return py::reinterpret_borrow<py::object>(step.alive_tuple->object);
}

namespace {
py::list storages(const Living& living) {
  py::list all;
  for (const auto& cell : living.cells) all.append(storage_of(cell));
  return all;
}

// Those that hold memory of their own: what was written in place had entered with its own.
py::list made(Recorder& r) {
  py::list all;
  for (const auto& cell : living(r).cells) {
    if (cell->entered != r.serial) all.append(storage_of(cell));
  }
  return all;
}

// -- what its run gets ---------------------------------------------------------------------------

py::object python_number(const c10::IValue& number) {
  if (number.isDouble()) return checked(PyFloat_FromDouble(number.toDouble()));
  return torch::jit::toPyObject(number);
}
}  // namespace

py::tuple take_params(Recorder& r) {
  py::tuple taken(r.params.size());
  for (size_t i = 0; i < r.params.size(); ++i) taken[i] = python_number(r.params[i]);
  r.params.clear();
  return taken;
}

namespace {
py::tuple take_marks(Recorder& r) {
  py::tuple taken(r.marks.size());
  for (size_t i = 0; i < r.marks.size(); ++i) taken[i] = call_site(r.marks[i]);
  r.marks_taken += r.marks.size();
  r.marks.clear();
  return taken;
}

}  // namespace

CallSites take_sites(Recorder& r) {
  CallSites sites;
  sites.marks.reserve(r.marks.size());  // the next trace is likely to have as many
  sites.marks.swap(r.marks);
  return sites;
}

Shown take_shown(Recorder& r) {
  Shown shown;
  shown.values.reserve(r.owners.size());  // the next trace is likely to have as many
  shown.values.swap(r.owners);
  shown.inputs.swap(r.entrants);
  return shown;
}

Ids take_inputs(Recorder& r) {
  Ids ids;
  ids.list.reserve(r.inputs.size());
  for (const auto& remote : r.inputs) {
    ids.list.push_back(remote->id);
    if (!remote->rest) continue;
    for (auto block : py::handle(remote->rest->object)) ids.list.push_back(py::cast<Remote&>(block).id);
  }
  r.inputs.clear();
  return ids;
}

namespace {
// (ids of its inputs, numbers, call sites) that Python has not taken, and which cells have shown it
py::tuple end(Recorder& r) {
  return py::make_tuple(take_inputs(r), take_params(r), take_sites(r), take_shown(r));
}

// As storages; None: it is gone.
py::list living_storages(const std::vector<c10::weak_intrusive_ptr<Cell>>& cells) {
  py::list all;
  for (const auto& weak : cells) {
    auto cell = weak.lock();
    all.append(cell ? storage_of(cell) : py::none());
  }
  return all;
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

}  // namespace

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

namespace {
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
  type.def("alive", &living)
      .def("made", &made)
      .def("take_params", &take_params)
      .def("take_marks", &take_marks)
      .def("end", &end);
  py::class_<Living>(m, "Living")
      .def_property_readonly("numbers", &numbers)
      .def_property_readonly("storages", &storages);
  py::class_<Shown>(m, "Shown")
      .def_property_readonly("values", [](const Shown& shown) { return living_storages(shown.values); })
      .def_property_readonly("inputs", [](const Shown& shown) { return living_storages(shown.inputs); });
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
