#include "facts.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace lazygt {
namespace {
PyObject* teacher = nullptr;
std::atomic<uint32_t> last_id{0};
std::mutex lock;  // of what is known
// while another thread has it nobody forks: it would stay locked in the child
[[maybe_unused]] const int held_over_forks =
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { new (&lock) std::mutex(); });

Out kind_of(const std::string& letters) {
  if (letters == "f") return Out::FRESH;
  if (letters == "fl") return Out::FRESH_LIST;
  if (letters == "v") return Out::VIEW;
  if (letters == "vl") return Out::VIEW_LIST;
  if (letters == "w") return Out::WRITTEN;
  if (letters == "wl") return Out::WRITTEN_LIST;
  return Out::OTHER;
}

void read_schema(Facts& f) {
  const auto& schema = f.op.schema();
  for (const auto& a : schema.arguments()) {
    f.positional += !a.kwarg_only();
    f.defaults.push_back(a.default_value() ? &*a.default_value() : nullptr);
  }
  for (const auto& r : schema.returns()) {
    int at = -1;
    const auto* wanted = r.alias_info();
    for (size_t i = 0; wanted != nullptr && wanted->isWrite() && at < 0 && i < f.defaults.size(); ++i) {
      const auto* info = schema.arguments()[i].alias_info();
      if (info != nullptr && info->isWrite() && info->beforeSets() == wanted->beforeSets()) at = int(i);
    }
    f.returned.push_back(at);
  }
  for (size_t i = 0; i < f.defaults.size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && !info->isWrite()) {
      f.viewed = int(i);
      break;
    }
  }
}

void read_facts(Facts& f, py::handle facts) {
  const auto& arguments = f.op.schema().arguments();
  for (auto number : py::cast<std::vector<int>>(attribute(facts, "hoist"))) f.hoist.push_back(uint8_t(number));
  auto named = py::cast<py::dict>(attribute(facts, "hoist_named"));
  for (size_t i = f.hoist.size(); i < arguments.size(); ++i) {
    f.hoist.push_back(py::cast<uint8_t>(named[arguments[i].name().c_str()]));
  }
  f.writes = py::cast<std::vector<int>>(attribute(facts, "writes"));
  for (const auto& name : py::cast<std::vector<std::string>>(attribute(facts, "writes_named"))) {
    f.writes.push_back(*f.op.schema().argumentIndexWithName(name));
  }
  for (const auto& letters : py::cast<std::vector<std::string>>(attribute(facts, "outputs"))) {
    f.outs.push_back(kind_of(letters));
  }
  f.pointwise = py::cast<bool>(attribute(facts, "pointwise"));
  if (!attribute(facts, "position").is_none()) f.rule = move_rule(py::cast<std::string>(attribute(facts, "name")));
  f.facts = facts.inc_ref().ptr();
}

std::unique_ptr<Facts> read(const c10::OperatorHandle& op, py::handle func, py::handle facts) {
  auto f = std::make_unique<Facts>(Facts{op, ++last_id, func.inc_ref().ptr(), nullptr});
  read_schema(*f);
  read_facts(*f, facts);
  return f;
}

// teacher(func) -> (record_kind, argument, its OpFacts, OpFacts when the flag is on or None)
std::unique_ptr<Facts> learn(const c10::OperatorHandle& op) {
  Gil gil;
  try {
    auto func = torch::detail::getTorchApiFunction(op);
    auto told = checked(PyObject_CallFunctionObjArgs(teacher, func.ptr(), nullptr));
    auto [record_kind, at, facts, writing] =
        py::cast<std::tuple<int, int, py::object, py::object>>(told);
    auto f = read(op, func, facts);
    f->record_kind = RecordKind(record_kind);
    f->at = at;
    if (!writing.is_none()) f->writing = read(op, func, writing).release();
    return f;
  } catch (py::error_already_set& error) {
    error.restore();
    throw_python();
  }
}

bool is_of(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.real_type();
  if (type->kind() == kind) return true;
  auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == kind;
}

py::object to_python(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isNone()) return py::none();
  auto borrowed = [](auto* object) {
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(object));
  };
  if (is_of(argument, c10::TypeKind::ScalarTypeType)) {
    return borrowed(torch::getTHPDtype(static_cast<at::ScalarType>(value.toInt())));
  }
  if (is_of(argument, c10::TypeKind::LayoutType)) {
    return borrowed(torch::getTHPLayout(static_cast<at::Layout>(value.toInt())));
  }
  if (is_of(argument, c10::TypeKind::MemoryFormatType)) {
    return borrowed(torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
  }
  return torch::jit::toPyObject(value);
}
}  // namespace

void set_teacher(py::object learn) { teacher = learn.release().ptr(); }

Facts& facts_of(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<const void*, std::unique_ptr<Facts>>();
  {
    std::lock_guard<std::mutex> guard(lock);
    auto place = known->find(&op.schema());
    if (place != known->end()) return *place->second;
  }
  auto learnt = learn(op);
  std::lock_guard<std::mutex> guard(lock);
  auto& f = (*known)[&op.schema()];
  if (!f) f = std::move(learnt);
  return *f;
}

bool equals_default(const c10::IValue& given, const c10::IValue& standing) {
  if (given.isNone() || standing.isNone()) return given.isNone() && standing.isNone();
  if (given.isInt()) return standing.isInt() && given.toInt() == standing.toInt();
  if (given.isDouble()) return standing.isDouble() && given.toDouble() == standing.toDouble();
  if (given.isBool()) return standing.isBool() && given.toBool() == standing.toBool();
  if (given.isTensor()) return false;
  return given == standing;
}

size_t given_positional(const Facts& f, c10::ArrayRef<c10::IValue> args) {
  size_t count = f.positional;
  while (count > 0 && f.defaults[count - 1] && equals_default(args[count - 1], *f.defaults[count - 1])) --count;
  return count;
}

std::pair<py::object, py::object> python_arguments(const Facts& f, c10::ArrayRef<c10::IValue> args) {
  const auto& arguments = f.op.schema().arguments();
  size_t count = given_positional(f, args);
  py::tuple positional{count};
  for (size_t i = 0; i < count; ++i) positional[i] = to_python(arguments[i], args[i]);
  py::dict named;
  for (size_t i = f.positional; i < args.size(); ++i) {
    if (f.defaults[i] && equals_default(args[i], *f.defaults[i])) continue;
    named[arguments[i].name().c_str()] = to_python(arguments[i], args[i]);
  }
  return {std::move(positional), std::move(named)};
}

void push_results(const c10::OperatorHandle& op, py::handle result, std::vector<c10::IValue>& stack) {
  const auto& returns = op.schema().returns();
  if (returns.empty()) return;
  if (returns.size() == 1) {
    stack.push_back(torch::jit::toIValue(result, returns[0].real_type()));
    return;
  }
  auto results = py::cast<py::sequence>(result);
  TORCH_CHECK(py::len(results) == returns.size(), op.schema().name(), " returned ", py::len(results),
              " results, expected ", returns.size());
  for (size_t i = 0; i < returns.size(); ++i) {
    stack.push_back(torch::jit::toIValue(py::object(results[i]), returns[i].real_type()));
  }
}
}  // namespace lazygt
