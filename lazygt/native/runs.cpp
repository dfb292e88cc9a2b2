// A worker's runs of plans that it has run before: from the message to its answer without Python;
// and the client's look at an answer that is one number.
//
// What is out of the ordinary (a value that failed, one that is sent along, a timed run) is left to
// Python, before anything has changed; so is the rest of a run in which a node has failed.
#include "runs.h"

#include "execute.h"
#include "module.h"
#include "packed.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <array>
#include <unordered_map>

namespace lazygt {
namespace {
using Ids = std::vector<int64_t>;

// -- what a run message says -----------------------------------------------------------------------

// Ids above this, which no session reaches, are Python's: sums of two ids then fit 64 bits.
constexpr int64_t LAST_ID = (int64_t(1) << 62) - 1;

bool is_id(int64_t id) { return id >= 0 && id <= LAST_ID; }

Ids packed_ids(Packed& from) {
  size_t count = from.array();
  Ids ids;
  for (size_t i = 0; i < count && from.fine(); ++i) ids.push_back(int64_t(from.count()));
  return ids;
}

Update packed_update(Packed& from) {
  if (from.nil()) return {};
  size_t parts = from.array();
  uint64_t kind = from.count();
  if (parts != 2 || kind > Update::PAIRS) return {Update::WHOLE, {-1}};  // there is no such id
  return {Update::Kind(kind), packed_ids(from)};
}

py::object packed_number(Packed& from) {
  int64_t below;
  if (from.real()) return checked(PyFloat_FromDouble(from.number()));
  if (from.truth()) return py::bool_(true);
  if (from.falsehood()) return py::bool_(false);
  if (from.negative(below)) return number_object(below);
  return checked(PyLong_FromUnsignedLongLong(from.count()));
}

py::object packed_params(Packed& from) {
  size_t count = from.array();
  if (!from.fine() || count > 1 << 20) return {};
  py::tuple params(count);
  for (size_t i = 0; i < count; ++i) params[i] = packed_number(from);
  return std::move(params);
}

// The message in these bytes; nothing where it says what is Python's.
std::optional<RunMessage> unpacked(const void* bytes, size_t size, int64_t tag) {
  Packed from(bytes, size);
  RunMessage message;
  size_t fields = from.array(), digits = 0;
  if (fields < 4 || fields > 10 || from.count() != uint64_t(tag)) return std::nullopt;
  message.seq = int64_t(from.count());
  if (!from.nil()) {
    const char* digest = from.bytes(digits);
    if (digest == nullptr || digits == 0) return std::nullopt;
    message.digest.assign(digest, digits);
  }
  message.base = int64_t(from.count());
  if (fields > 4) message.inputs = packed_update(from);
  if (fields > 5) message.frees = packed_update(from);
  if (fields > 6 && !from.nil()) {
    message.params = packed_params(from);
    if (!message.params) return std::nullopt;
  }
  if (fields > 7 && from.array() != 0) return std::nullopt;  // values that are sent along
  if (fields > 8 && from.array() != 0) return std::nullopt;  // room that is given back
  if (fields > 9) message.fetches = packed_ids(from);
  if (!from.fine() || !from.ended() || !is_id(message.base) || message.seq < 0) return std::nullopt;
  return message;
}

void pack_ids(std::string& to, const Ids& ids) {
  pack_array(to, ids.size());
  for (int64_t id : ids) pack_count(to, uint64_t(id));
}

void pack_update(std::string& to, const Update& update) {
  if (update.kind == Update::EXPECTED) return pack_nil(to);
  pack_array(to, 2);
  pack_count(to, update.kind);
  pack_ids(to, update.ids);
}

void pack_number(std::string& to, PyObject* number) {
  if (PyFloat_Check(number)) return pack_real(to, PyFloat_AS_DOUBLE(number));
  if (PyBool_Check(number)) return pack_truth(to, number == Py_True);
  pack_int(to, number_of(number));
}

Ids ids_of(const py::object& items) {
  Ids ids;
  for (auto item : py::reinterpret_borrow<py::tuple>(items)) ids.push_back(number_of(item.ptr()));
  return ids;
}

Update update_of(const py::object& update) {
  if (update.is_none()) return {};
  auto parts = py::reinterpret_borrow<py::tuple>(update);
  return {Update::Kind(number_of(py::object(parts[0]).ptr())), ids_of(parts[1])};
}

// The message that this object is, which was not packed.
std::optional<RunMessage> handed_over(py::handle run) {
  auto digest = get(run, NAME(digest)), timed = get(run, NAME(timed));
  if (timed.ptr() == Py_True) return std::nullopt;
  for (PyObject* name : {NAME(puts), NAME(releases)}) {
    if (PyObject_Size(get(run, name).ptr()) != 0) return std::nullopt;
  }
  RunMessage message;
  if (!digest.is_none()) message.digest = digest.cast<std::string>();
  message.seq = number_of(get(run, NAME(seq)).ptr());
  message.base = number_of(get(run, NAME(base)).ptr());
  message.inputs = update_of(get(run, NAME(inputs)));
  message.frees = update_of(get(run, NAME(frees)));
  auto params = get(run, NAME(params));
  if (!params.is_none()) message.params = std::move(params);
  message.fetches = ids_of(get(run, NAME(fetches)));
  return message;
}

// -- lists of ids: `wire.DeltaCodec`, which Python and this share ----------------------------------

class Codec {
 public:
  explicit Codec(py::object python) : python_(std::move(python)) {}

  // What the list is now; false where the update does not fit it. Nothing changes.
  bool decode(const Update& update, int64_t base, Ids& ids) {
    known_ = get(python_, NAME(ids));
    base_ = number_of(get(python_, NAME(base)).ptr());
    const size_t known = size_t(PyList_GET_SIZE(known_.ptr()));
    if (update.kind == Update::WHOLE) {
      ids = update.ids;
      return are_ids(ids);
    }
    auto moving = get(python_, NAME(moving));
    ids.resize(known);
    for (size_t i = 0; i < known; ++i) {
      ids[i] = number_of(PyList_GET_ITEM(known_.ptr(), i));
      if (PyList_GET_ITEM(moving.ptr(), i) == Py_True) ids[i] += base - base_;
    }
    if (update.kind == Update::EXPECTED) return are_ids(ids);
    for (size_t i = 0; i + 1 < update.ids.size(); i += 2) {
      if (update.ids[i] < 0 || size_t(update.ids[i]) >= known) return false;
      ids[size_t(update.ids[i])] = update.ids[i + 1];
    }
    return update.ids.size() % 2 == 0 && are_ids(ids);
  }

  // Takes note of what was decoded.
  void keep(const Update& update, int64_t base, const Ids& ids) {
    const bool same_length = size_t(PyList_GET_SIZE(known_.ptr())) == ids.size();
    const bool learns = update.kind != Update::EXPECTED;
    if (learns || (base == base_ && !ids.empty())) {
      py::list moving(ids.size());
      for (size_t i = 0; i < ids.size(); ++i) {
        bool moved = learns && same_length && base != base_ &&
            ids[i] == number_of(PyList_GET_ITEM(known_.ptr(), i)) + base - base_;
        PyList_SET_ITEM(moving.ptr(), i, py::bool_(moved).release().ptr());
      }
      set(python_, NAME(moving), moving);
    }
    if (base == base_ && !learns) return;
    py::list list(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      PyList_SET_ITEM(list.ptr(), i, number_object(ids[i]).release().ptr());
    }
    set(python_, NAME(ids), list);
    set(python_, NAME(base), number_object(base));
  }

 private:
  static bool are_ids(const Ids& ids) { return std::all_of(ids.begin(), ids.end(), is_id); }

  py::object python_, known_;
  int64_t base_ = 0;
};

// -- numbers ---------------------------------------------------------------------------------------

// How the meta of a single number is packed, by its dtype; empty: it is Python's.
using Metas = std::array<std::string, size_t(at::ScalarType::NumOptions)>;

Metas metas_of(const py::dict& numbers) {
  Metas metas;
  for (auto [dtype, packed] : numbers) {
    auto kind = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    metas[size_t(kind)] = packed.cast<std::string>();
  }
  return metas;
}

template <class T>
T element(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

c10::IValue number_at(at::ScalarType kind, const char* bytes) {
  switch (kind) {
    case at::kFloat: return double(element<float>(bytes));
    case at::kDouble: return element<double>(bytes);
    case at::kLong: return element<int64_t>(bytes);
    case at::kInt: return int64_t(element<int32_t>(bytes));
    case at::kShort: return int64_t(element<int16_t>(bytes));
    case at::kChar: return int64_t(element<int8_t>(bytes));
    case at::kByte: return int64_t(element<uint8_t>(bytes));
    case at::kBool: return element<uint8_t>(bytes) != 0;
    default: throw py::value_error("no plain number");
  }
}

// What a client takes of answers.
class Answers {
 public:
  Answers(const py::dict& numbers, int64_t tag) : metas_(metas_of(numbers)), tag_(uint64_t(tag)) {}

  // The number that is all that run `seq` is answered with; nothing where there is more to it.
  std::optional<c10::IValue> number(py::handle frames, uint64_t seq) const {
    if (!PyList_Check(frames.ptr()) || PyList_GET_SIZE(frames.ptr()) != 2) return std::nullopt;
    PyObject *frame = PyList_GET_ITEM(frames.ptr(), 0), *data = PyList_GET_ITEM(frames.ptr(), 1);
    if (!PyBytes_Check(frame) || !PyBytes_Check(data)) return std::nullopt;
    Packed from(PyBytes_AS_STRING(frame), size_t(PyBytes_GET_SIZE(frame)));
    if (from.array() != 5 || from.count() != tag_ || from.count() != seq) return std::nullopt;
    if (from.array() != 0 || from.array() != 0 || from.array() != 1) return std::nullopt;
    if (from.array() != 2 || from.count() != 0 || !from.fine()) return std::nullopt;
    for (size_t kind = 0; kind < metas_.size(); ++kind) {
      if (metas_[kind].empty() || !from.exactly(metas_[kind])) continue;
      const auto type = at::ScalarType(kind);
      if (!from.ended() || size_t(PyBytes_GET_SIZE(data)) != at::elementSize(type)) return std::nullopt;
      return number_at(type, PyBytes_AS_STRING(data));
    }
    return std::nullopt;
  }
  py::object python_number(const py::list& frames, uint64_t seq) const {
    auto number = this->number(frames, seq);
    return number ? torch::jit::toPyObject(*number) : py::none();
  }

 private:
  Metas metas_;
  uint64_t tag_;
};

// -- runs ------------------------------------------------------------------------------------------

struct Plan {
  py::object program, known;  // `known` has the params of the last run
  Codec inputs, frees;
  size_t inputs_count, params_count;
  std::vector<size_t> owned;  // inputs that it overwrites
};

class Runs {
 public:
  // `values` and `borrowed`: the store's. `numbers`: dtype -> how the meta of a number is packed.
  Runs(py::dict values, py::dict borrowed, const py::dict& numbers, py::object run, int64_t run_tag,
       int64_t done_tag)
      : values_(std::move(values)), borrowed_(std::move(borrowed)), run_(std::move(run)),
        run_tag_(run_tag), done_tag_(done_tag), metas_(metas_of(numbers)) {}

  void keep(const std::string& digest, py::object program, py::object known, size_t inputs,
            size_t params, std::vector<size_t> owned) {
    Codec input_ids(get(known, NAME(inputs))), free_ids(get(known, NAME(frees)));
    plans_.erase(digest);
    plans_.emplace(digest, Plan{std::move(program), std::move(known), std::move(input_ids),
                                std::move(free_ids), inputs, params, std::move(owned)});
  }
  void clear() { plans_.clear(); }

  // Acts on a message. None: it is Python's, and nothing has changed. A list: the answer's frames.
  // (seq, base, digest, fetches, outcome): the answer is Python's; the outcome is (node, values)
  // where the program stopped, or None.
  py::object run(py::handle frame) {
    auto message = read(frame);
    return message ? act(*message) : py::none();
  }
  bool knows(const std::string& digest) const { return plans_.count(digest) != 0; }
  py::object act(const RunMessage& message) {
    if (message.digest.empty()) return without_plan(message);
    auto place = plans_.find(message.digest);
    if (place == plans_.end()) return py::none();
    Plan& plan = place->second;
    Ids inputs, frees;
    if (!plan.inputs.decode(message.inputs, message.base, inputs)) return py::none();
    if (!plan.frees.decode(message.frees, message.base, frees)) return py::none();
    py::list given(inputs.size());
    if (!gather(plan, message, inputs, frees, given)) return py::none();
    plan.inputs.keep(message.inputs, message.base, inputs);
    plan.frees.keep(message.frees, message.base, frees);
    if (message.params) set(plan.known, NAME(params), message.params);
    py::tuple params = get(plan.known, NAME(params));
    for (int64_t id : frees) forget(id);
    py::object program = plan.program;  // Python may run meanwhile, and drop the plan
    py::object outcome;
    {
      at::AutoDispatchBelowAutograd guard;
      outcome = run_program(program, given, params);
    }
    if (!PyList_Check(outcome.ptr())) return rest(message, outcome);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outcome.ptr()); ++i) {
      auto id = number_object(message.base + i);
      if (PyDict_SetItem(values_.ptr(), id.ptr(), PyList_GET_ITEM(outcome.ptr(), i)) < 0) throw_python();
    }
    auto answer = answered(message);
    return answer ? answer : rest(message, py::none());
  }

 private:
  std::optional<RunMessage> read(py::handle frame) const {
    if (py::type::handle_of(frame).is(run_)) return handed_over(frame);
    Py_buffer view;
    if (PyObject_GetBuffer(frame.ptr(), &view, PyBUF_SIMPLE) < 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    auto message = unpacked(view.buf, size_t(view.len), run_tag_);
    PyBuffer_Release(&view);
    return message;
  }

  // Frees, and sends what is there; the list of frees is a whole one.
  py::object without_plan(const RunMessage& message) {
    if (message.frees.kind == Update::PAIRS || !may_free(message.frees.ids)) return py::none();
    for (int64_t id : message.frees.ids) forget(id);
    auto answer = answered(message);
    return answer ? answer : rest(message, py::none());
  }

  bool may_free(const Ids& frees) const {
    return std::all_of(frees.begin(), frees.end(), [&](int64_t id) { return id >= 0 && !is_borrowed(id); });
  }

  // The values of the inputs, where nothing about them is Python's.
  bool gather(const Plan& plan, const RunMessage& message, const Ids& inputs, const Ids& frees,
              py::list& given) const {
    if (!may_free(frees)) return false;
    for (size_t position : plan.owned) {
      if (position >= inputs.size() || is_borrowed(inputs[position])) return false;
      if (std::find(frees.begin(), frees.end(), inputs[position]) == frees.end()) return false;
    }
    if (plan.inputs_count != inputs.size()) return false;
    const size_t params = message.params
        ? size_t(PyObject_Size(message.params.ptr()))
        : size_t(PyObject_Size(get(plan.known, NAME(params)).ptr()));
    if (params != plan.params_count) return false;
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyObject* value = PyDict_GetItemWithError(values_.ptr(), number_object(inputs[i]).ptr());
      if (value == nullptr || !THPVariable_Check(value)) return false;
      Py_INCREF(value);
      PyList_SET_ITEM(given.ptr(), i, value);
    }
    return true;
  }

  bool is_borrowed(int64_t id) const {
    if (PyDict_Size(borrowed_.ptr()) == 0) return false;
    return PyDict_Contains(borrowed_.ptr(), number_object(id).ptr()) != 0;
  }
  void forget(int64_t id) {
    auto key = number_object(id);
    if (PyDict_GetItem(values_.ptr(), key.ptr()) != nullptr) PyDict_DelItem(values_.ptr(), key.ptr());
  }

  // The frames of an answer that has no value, or one number; null where Python has to make it.
  py::object answered(const RunMessage& message) const {
    std::string head;
    if (message.fetches.empty()) {
      head = {char(0x92), char(done_tag_)};
      pack_count(head, uint64_t(message.seq));
      py::list frames;
      frames.append(py::bytes(head));
      return std::move(frames);
    }
    if (message.fetches.size() > 1) return {};
    auto key = number_object(message.fetches[0]);
    PyObject* value = PyDict_GetItem(values_.ptr(), key.ptr());
    if (value == nullptr || !THPVariable_Check(value)) return {};
    const at::Tensor& number = THPVariable_Unpack(value);
    const std::string& meta = metas_[size_t(number.scalar_type())];
    if (meta.empty() || number.dim() != 0 || !number.device().is_cpu() || number._is_zerotensor() ||
        number.layout() != at::kStrided || number.is_conj() || number.is_neg()) {
      return {};
    }
    head = {char(0x95), char(done_tag_)};
    pack_count(head, uint64_t(message.seq));
    head += {char(0x90), char(0x90), char(0x91), char(0x92), char(0)};
    head += meta;
    py::list frames;
    frames.append(py::bytes(head));
    frames.append(py::bytes(static_cast<const char*>(number.const_data_ptr()), number.element_size()));
    return std::move(frames);
  }

  static py::object rest(const RunMessage& message, const py::object& outcome) {
    py::tuple fetches(message.fetches.size());
    for (size_t i = 0; i < message.fetches.size(); ++i) fetches[i] = number_object(message.fetches[i]);
    return py::make_tuple(message.seq, message.base, py::bytes(message.digest), fetches, outcome);
  }

  py::dict values_, borrowed_;
  py::object run_;
  int64_t run_tag_, done_tag_;
  Metas metas_;
  std::unordered_map<std::string, Plan> plans_;
};
}  // namespace

std::string RunMessage::packed(int64_t tag) const {
  std::string to;
  pack_array(to, 10);  // with what comes before what it fetches
  pack_count(to, uint64_t(tag));
  pack_count(to, uint64_t(seq));
  if (digest.empty()) pack_nil(to);
  else pack_bytes(to, digest);
  pack_count(to, uint64_t(base));
  pack_update(to, inputs);
  pack_update(to, frees);
  if (!params) {
    pack_nil(to);
  } else {
    pack_array(to, size_t(PyTuple_GET_SIZE(params.ptr())));
    for (auto number : params) pack_number(to, number.ptr());
  }
  pack_array(to, 0);
  pack_array(to, 0);
  pack_ids(to, fetches);
  return to;
}

bool is_plain(at::ScalarType kind) {
  switch (kind) {
    case at::kFloat: case at::kDouble: case at::kLong: case at::kInt:
    case at::kShort: case at::kChar: case at::kByte: case at::kBool: return true;
    default: return false;
  }
}

bool knows(py::handle runs, const std::string& digest) { return py::cast<Runs&>(runs).knows(digest); }
py::object act(py::handle runs, const RunMessage& message) { return py::cast<Runs&>(runs).act(message); }
std::optional<c10::IValue> number_in(py::handle answers, py::handle frames, uint64_t seq) {
  return py::cast<const Answers&>(answers).number(frames, seq);
}

void bind_runs(py::module_& module) {
  py::class_<Runs>(module, "Runs")
      .def(py::init<py::dict, py::dict, py::dict, py::object, int64_t, int64_t>())
      .def("keep", &Runs::keep)
      .def("clear", &Runs::clear)
      .def("run", &Runs::run);
  py::class_<Answers>(module, "Answers")
      .def(py::init<py::dict, int64_t>())
      .def("number", &Answers::python_number);
}
}  // namespace lazygt
