// Ids on their way to the workers: which values nobody speaks of any more, and lists of ids as the
// wire has them.
#include "remote.h"

#include "storage.h"

#include <algorithm>

namespace lazygt {
Ids Freed::take() {
  Ids ids;
  for (Entry* entry = newest_.exchange(nullptr); entry != nullptr;) {
    ids.list.push_back(entry->id);
    delete std::exchange(entry, entry->before);
  }
  std::sort(ids.list.begin(), ids.list.end());
  return ids;
}

Values::~Values() {
  for (size_t place = 0; place < taken_.size(); ++place) {
    if (!taken_[place]) freed_->add(first_ + int64_t(place));
  }
}

RemoteP Values::take(size_t place) {
  TORCH_CHECK(place < taken_.size() && !taken_[place], "a run has no value ", place, " to give");
  auto remote = c10::make_intrusive<Remote>(first_ + int64_t(place), freed_);
  taken_[place] = true;
  return remote;
}

std::optional<IdUpdate> DeltaCodec::encode(std::vector<int64_t> ids, int64_t base) {
  if (ids.empty() && ids_.empty()) {
    base_ = base;
    return std::nullopt;
  }
  int64_t step = base - base_;
  bool alike = ids.size() == ids_.size();
  std::vector<int64_t> wrong;  // (place, id) each
  std::vector<bool> moving(ids.size());
  for (size_t i = 0; alike && i < ids.size(); ++i) {
    if (ids[i] != ids_[i] + (moving_[i] ? step : 0)) {
      wrong.push_back(int64_t(i));
      wrong.push_back(ids[i]);
    }
    moving[i] = step != 0 && ids[i] == ids_[i] + step;
  }
  std::optional<IdUpdate> update;
  if (!alike) update = {true, ids};
  else if (!wrong.empty()) update = {false, std::move(wrong)};
  ids_ = std::move(ids);
  moving_ = std::move(moving);
  base_ = base;
  return update;
}

namespace {
std::vector<int64_t> list_of(py::handle ids) {
  if (py::isinstance<Ids>(ids)) return py::cast<const Ids&>(ids).list;
  return py::cast<std::vector<int64_t>>(ids);
}

py::object encoded(DeltaCodec& codec, py::handle ids, int64_t base) {
  auto update = codec.encode(list_of(ids), base);
  if (!update) return py::none();
  py::tuple all(update->numbers.size());
  for (size_t i = 0; i < update->numbers.size(); ++i) all[i] = update->numbers[i];
  return py::make_tuple(update->whole ? 0 : 1, all);
}

py::list blocks(const RemoteP& value) {
  py::list ids;
  ids.append(value->id);
  if (value->rest) for (auto block : py::handle(value->rest->object)) ids.append(block.attr("id"));
  return ids;
}
}  // namespace

void bind_remote(py::module_& m) {
  py::class_<Ids>(m, "Ids")
      .def("__len__", [](const Ids& ids) { return ids.list.size(); })
      .def("__iter__", [](const Ids& ids) { return py::iter(py::cast(ids.list)); });
  py::class_<Freed, FreedP>(m, "Freed")
      .def(py::init<>())
      .def("add", &Freed::add)
      .def("take", &Freed::take)
      .def("__bool__", [](const Freed& freed) { return !freed.empty(); });
  py::class_<Remote, RemoteP>(m, "RemoteValue")
      .def(py::init<int64_t, FreedP>())
      .def_readonly("id", &Remote::id)
      .def_property_readonly("ids", [](const RemoteP& value) { return py::tuple(blocks(value)); })
      .def_property(
          "sharding", [](const Remote& value) { return sharding_of(value.sharding); },
          [](Remote& value, py::object sharding) { value.sharding = sharding_number(sharding); })
      .def_property(
          "call_site", [](const Remote& value) { return call_site(value.mark); },
          [](Remote& value, py::object site) { value.mark = mark_of(site); })
      .def_property(
          "rest",
          [](const Remote& value) -> py::object {
            if (!value.rest) return py::tuple();
            return py::reinterpret_borrow<py::object>(value.rest->object);
          },
          [](Remote& value, py::object rest) { value.rest = c10::make_intrusive<Held>(rest.ptr()); });
  py::class_<Values>(m, "Values")
      .def(py::init<int64_t, size_t, FreedP>())
      .def("__len__", &Values::size)
      .def("__iter__", [](Values& values) {  // takes them all
        py::list all;
        for (size_t place = 0; place < values.size(); ++place) all.append(values.take(place));
        return py::iter(all);
      });
  py::class_<DeltaCodec>(m, "DeltaCodec").def(py::init<>()).def("encode", &encoded);
}
}  // namespace lazygt
