// A program is made once a plan. Each call of an op is a stack of arguments, ready but for the
// values and numbers of the run, which are put into their places; a run holds the GIL only to take
// its inputs, to hand out its outputs and where it calls Python.
#include "execute.h"
#include "module.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace lazygt {
namespace {

using c10::IValue;
using c10::TypePtr;
using torch::jit::Stack;
using Slot = int32_t;

// What one run has.
struct Frame {
  std::vector<at::Tensor> values;  // by slot; undefined: not made yet, dead, or None
  std::vector<IValue> numbers;     // the program's conversions
  Stack stack;
  PyObject* params;
  bool checks = false;  // results are compared with what was promised
};

struct Instruction {
  explicit Instruction(int32_t node) : node(node) {}
  virtual ~Instruction() = default;
  virtual void run(Frame& frame) const = 0;
  const int32_t node;  // of the schedule's graph
};

// -- where returns go ------------------------------------------------------------------------

// One return of an op: nobody's, a value, or a list of which the first ones are values.
struct Place {
  std::vector<Slot> slots;  // -1: nobody's
  bool list = false;

  static Place of(py::handle spec) {
    if (spec.is_none()) return {};
    if (py::isinstance<py::int_>(spec)) return {{spec.cast<Slot>()}, false};
    return {spec.cast<std::vector<Slot>>(), true};
  }
  void take(Frame& frame, IValue&& returned) const {
    if (slots.empty()) return;
    if (!list) return put(frame, slots[0], returned);
    auto items = returned.toListRef();
    TORCH_CHECK(items.size() >= slots.size(), "an op returned a shorter list than before");
    for (size_t i = 0; i < slots.size(); ++i) put(frame, slots[i], items[i]);
  }
  static void put(Frame& frame, Slot slot, const IValue& value) {
    if (slot >= 0) frame.values[slot] = value.isNone() ? at::Tensor() : value.toTensor();
  }
};

std::vector<Place> places_of(const py::sequence& specs) {
  std::vector<Place> places;
  for (auto spec : specs) places.push_back(Place::of(spec));
  return places;
}

// -- boxed calls -------------------------------------------------------------------------------

struct Source {
  // WRAPPED: a number where a tensor is expected, which promotes dtypes as a number does
  enum Kind : uint8_t { CONSTANT, VALUE, OPTIONAL_VALUE, NUMBER, WRAPPED } kind = CONSTANT;
  int32_t index = 0;
  IValue constant;

  IValue in(const Frame& frame) const {
    switch (kind) {
      case VALUE: return frame.values[index];
      case OPTIONAL_VALUE: return frame.values[index].defined() ? frame.values[index] : IValue();
      case NUMBER: return frame.numbers[index];
      case WRAPPED: {
        auto tensor = c10::scalar_to_tensor(frame.numbers[index].toScalar());
        tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
        return tensor;
      }
      default: return constant;
    }
  }
};

struct Boxed final : Instruction {
  struct Argument {
    size_t position;
    Source source;
  };
  struct List {
    size_t position;
    TypePtr element;
    std::vector<Source> items;
  };
  c10::OperatorHandle op;
  Stack given;  // constants; None where a run puts something
  std::vector<Argument> arguments;
  std::vector<List> lists;
  std::vector<Place> places;

  Boxed(int32_t node, c10::OperatorHandle op) : Instruction(node), op(op) {}

  void run(Frame& frame) const override {
    auto& stack = frame.stack;
    stack.assign(given.begin(), given.end());
    for (const auto& argument : arguments) stack[argument.position] = argument.source.in(frame);
    for (const auto& each : lists) {
      // a new one each time: an op may keep it
      c10::impl::GenericList list(each.element);
      list.reserve(each.items.size());
      for (const auto& item : each.items) list.push_back(item.in(frame));
      stack[each.position] = std::move(list);
    }
    op.callBoxed(&stack);
    TORCH_CHECK(stack.size() == places.size(), op.schema().name(), " returned another number");
    for (size_t i = 0; i < places.size(); ++i) places[i].take(frame, std::move(stack[i]));
    stack.clear();
  }
};

// -- others --------------------------------------------------------------------------------------

// How Python spells arguments: `graph.node`.
struct Spelling {
  py::object ref, param, device_mark, device;

  bool is_ref(py::handle arg) const { return py::type::handle_of(arg).is(ref); }
  bool is_param(py::handle arg) const { return py::type::handle_of(arg).is(param); }
  static int32_t index(py::handle arg) { return arg.attr("index").cast<int32_t>(); }

  // Whether something in it is known only in a run.
  bool varies(py::handle arg) const {
    if (!PyTuple_Check(arg.ptr())) return is_ref(arg) || is_param(arg);
    for (auto item : arg) {
      if (varies(item)) return true;
    }
    return false;
  }
  // What Python is called with.
  py::object argument(py::handle arg, const Frame* frame) const {
    if (PyTuple_Check(arg.ptr())) {
      py::list items;
      for (auto item : arg) items.append(argument(item, frame));
      return items;
    }
    if (arg.is(device_mark)) return device;
    if (frame && is_ref(arg)) {
      return py::reinterpret_steal<py::object>(THPVariable_Wrap(frame->values[index(arg)]));
    }
    if (frame && is_param(arg)) {
      return py::reinterpret_borrow<py::object>(PyTuple_GetItem(frame->params, index(arg)));
    }
    return py::reinterpret_borrow<py::object>(arg);
  }
};

// What only Python can call: lazygt's own ops, custom ones, compiled groups.
struct Called final : Instruction {
  std::shared_ptr<const Spelling> spelling;
  py::object kernel;
  py::tuple args, kwargs;
  std::vector<Place> places;

  Called(int32_t node, std::shared_ptr<const Spelling> spelling, py::object kernel, py::tuple args,
         py::tuple kwargs, std::vector<Place> places)
      : Instruction(node), spelling(std::move(spelling)), kernel(std::move(kernel)), args(std::move(args)),
        kwargs(std::move(kwargs)), places(std::move(places)) {}

  void run(Frame& frame) const override {
    py::gil_scoped_acquire gil;
    py::tuple given(args.size());
    for (size_t i = 0; i < args.size(); ++i) given[i] = spelling->argument(args[i], &frame);
    py::dict named;
    for (auto pair : kwargs) {
      auto item = py::reinterpret_borrow<py::tuple>(pair);
      named[item[0]] = spelling->argument(item[1], &frame);
    }
    py::object returned = kernel(*given, **named);
    if (places.size() == 1) return take(frame, places[0], returned);
    if (places.empty()) return;
    auto items = returned.cast<py::sequence>();
    TORCH_CHECK(items.size() == places.size(), "a kernel returned another number");
    for (size_t i = 0; i < places.size(); ++i) take(frame, places[i], items[i]);
  }
  static void take(Frame& frame, const Place& place, py::handle returned) {
    if (place.slots.empty()) return;
    const auto& type = place.list ? static_cast<TypePtr>(c10::ListType::ofTensors())
                                  : static_cast<TypePtr>(c10::TensorType::get());
    place.take(frame, torch::jit::toIValue(returned, type));
  }
};

// A copy with the very same strides: kernels round differently on other layouts.
struct Clone final : Instruction {
  Slot to, from;
  py::object careful;  // where torch's own copy has other strides

  Clone(int32_t node, Slot to, Slot from, py::object careful)
      : Instruction(node), to(to), from(from), careful(std::move(careful)) {}

  void run(Frame& frame) const override {
    auto copy = at::clone(frame.values[from]);
    if (copy.strides() != frame.values[from].strides()) {
      py::gil_scoped_acquire gil;
      copy = at::Tensor();
      copy = careful(frame.values[from]).cast<at::Tensor>();
    }
    frame.values[to] = std::move(copy);
  }
};

// A value in memory laid out as the client expects.
struct Restride final : Instruction {
  Slot slot;
  std::vector<int64_t> strides;

  Restride(int32_t node, Slot slot, std::vector<int64_t> strides)
      : Instruction(node), slot(slot), strides(std::move(strides)) {}

  void run(Frame& frame) const override {
    auto& value = frame.values[slot];
    if (value.strides() == c10::IntArrayRef(strides)) return;
    auto laid_out = at::empty_strided(value.sizes(), strides, value.options());
    value = laid_out.copy_(value);
  }
};

// A first run compares a value with what the client expects; a stride by which no element is found
// does not matter.
struct Check final : Instruction {
  Slot slot;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;

  Check(int32_t node, Slot slot, std::vector<int64_t> sizes, std::vector<int64_t> strides,
        at::ScalarType dtype)
      : Instruction(node), slot(slot), sizes(std::move(sizes)), strides(std::move(strides)), dtype(dtype) {}

  void run(Frame& frame) const override {
    const auto& value = frame.values[slot];
    if (!frame.checks || !value.defined()) return;
    TORCH_CHECK(value.scalar_type() == dtype && value.sizes() == c10::IntArrayRef(sizes) && lies(value),
                "another result than was promised");
  }
  bool lies(const at::Tensor& value) const {
    if (value.numel() <= 1) return true;
    auto have = value.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1 && have[i] != strides[i]) return false;
    }
    return true;
  }
};

struct Alias final : Instruction {
  Slot to, from;

  Alias(int32_t node, Slot to, Slot from) : Instruction(node), to(to), from(from) {}
  void run(Frame& frame) const override { frame.values[to] = frame.values[from]; }
};

struct Free final : Instruction {
  std::vector<Slot> slots;

  Free(int32_t node, std::vector<Slot> slots) : Instruction(node), slots(std::move(slots)) {}
  void run(Frame& frame) const override {
    for (Slot slot : slots) frame.values[slot].reset();
  }
};

// -- the program -----------------------------------------------------------------------------------

class Program {
 public:
  // `values`: of the graph; slots above are for copies that a node needs meanwhile.
  Program(Slot values, py::object ref, py::object param, py::object device_mark, py::object device,
          py::object clone)
      : values_(values), slots_(values), clone_(std::move(clone)),
        spelling_(std::make_shared<Spelling>(Spelling{std::move(ref), std::move(param),
                                                      std::move(device_mark), std::move(device)})) {}
  // One of the same values in other sizes, still empty: `take_over` takes what is the same there.
  std::unique_ptr<Program> resized() const {
    std::unique_ptr<Program> program(new Program(values_, slots_, clone_, spelling_));
    program->conversions_ = conversions_;
    return program;
  }

  // The instructions of a node of `like`, with other checks if there are any. Nodes come in order.
  void take_over(const Program& like, int32_t node, const py::list& checks) {
    while (taken_ < like.code_.size() && like.code_[taken_]->node < node) ++taken_;
    size_t checked = 0;
    for (; taken_ < like.code_.size() && like.code_[taken_]->node == node; ++taken_) {
      const auto& instruction = like.code_[taken_];
      if (checks.empty() || !dynamic_cast<const Check*>(instruction.get())) {
        code_.push_back(instruction);
        continue;
      }
      TORCH_CHECK(checked < checks.size(), "a node has fewer results than before");
      py::tuple expected = checks[checked++];
      check(node, expected[0].cast<Slot>(), expected[1].cast<std::vector<int64_t>>(),
            expected[2].cast<std::vector<int64_t>>(), expected[3]);
    }
    TORCH_CHECK(checked == checks.size(), "a node has more results than before");
  }

  Slot spare() { return slots_++; }

  // A call of a torch op; false where only Python can make it: the dispatcher has none of this name,
  // or does not take the arguments.
  bool call(int32_t node, const std::string& name, const std::string& overload,
            const py::tuple& args, const py::tuple& kwargs, const py::sequence& places) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!op) return false;
    auto boxed = std::make_shared<Boxed>(node, *op);
    const auto before = conversions_.size();
    try {
      give(*boxed, args, py::dict(kwargs));
    } catch (const std::exception&) {
      PyErr_Clear();
      conversions_.erase(conversions_.begin() + before, conversions_.end());
      return false;
    }
    boxed->places = places_of(places);
    boxed->places.resize(op->schema().returns().size());
    code_.push_back(std::move(boxed));
    return true;
  }

  void call_python(int32_t node, py::object kernel, py::tuple args, py::tuple kwargs,
                   const py::sequence& places) {
    code_.push_back(std::make_shared<Called>(node, spelling_, std::move(kernel), std::move(args),
                                             std::move(kwargs), places_of(places)));
  }
  void clone(int32_t node, Slot to, Slot from) { add<Clone>(node, to, from, clone_); }
  void alias(int32_t node, Slot to, Slot from) { add<Alias>(node, to, from); }
  void free(int32_t node, std::vector<Slot> slots) { add<Free>(node, std::move(slots)); }
  void restride(int32_t node, Slot slot, std::vector<int64_t> strides) {
    add<Restride>(node, slot, std::move(strides));
  }
  void check(int32_t node, Slot slot, std::vector<int64_t> sizes, std::vector<int64_t> strides,
             py::handle dtype) {
    TORCH_CHECK(THPDtype_Check(dtype.ptr()), "expected a torch.dtype");
    add<Check>(node, slot, std::move(sizes), std::move(strides),
               reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  }
  void finish(std::vector<Slot> outputs) { outputs_ = std::move(outputs); }
  void stop(int32_t node) { end_ = node; }

  // Runs; `inputs` is emptied. The outputs, or (node, values by number, made) where it stopped: a node
  // failed, or the program ends before it, or it has made something else than was promised.
  py::object run(const py::list& inputs, const py::tuple& params, bool checks) const {
    Frame frame;
    frame.checks = checks;
    frame.values.resize(slots_);
    frame.params = params.ptr();
    for (size_t i = 0; i < inputs.size(); ++i) {
      frame.values[i] = THPVariable_Unpack(PyList_GET_ITEM(inputs.ptr(), i));
    }
    PyList_SetSlice(inputs.ptr(), 0, PyList_GET_SIZE(inputs.ptr()), nullptr);
    if (!convert(frame)) return stopped(frame, 0);
    size_t reached = 0;
    {
      py::gil_scoped_release unlocked;
      reached = advance(frame);
    }
    if (reached < code_.size()) {
      const bool made = dynamic_cast<const Check*>(code_[reached].get()) != nullptr;
      return stopped(frame, code_[reached]->node, made);
    }
    if (!outputs_) return stopped(frame, end_);
    py::list outputs(outputs_->size());
    for (size_t i = 0; i < outputs_->size(); ++i) {
      PyList_SET_ITEM(outputs.ptr(), i, THPVariable_Wrap(frame.values[(*outputs_)[i]]));
    }
    return outputs;
  }

  size_t size() const { return code_.size(); }

 private:
  struct Conversion {
    int32_t param;
    TypePtr type;
    std::optional<int32_t> length;
  };

  Program(Slot values, Slot slots, py::object clone, std::shared_ptr<const Spelling> spelling)
      : values_(values), slots_(slots), clone_(std::move(clone)), spelling_(std::move(spelling)) {}

  template <class Kind, class... Args>
  void add(int32_t node, Args&&... args) {
    code_.push_back(std::make_shared<Kind>(node, std::forward<Args>(args)...));
  }

  void give(Boxed& boxed, const py::tuple& args, const py::dict& named) {
    const auto& schema = boxed.op.schema().arguments();
    size_t used = 0;
    for (size_t i = 0; i < schema.size(); ++i) {
      py::str name(schema[i].name());
      const bool given = i < args.size() || named.contains(name);
      used += given;
      if (given) {
        give(boxed, i < args.size() ? py::object(args[i]) : py::object(named[name]), i);
      } else {
        TORCH_CHECK(schema[i].default_value(), "no argument ", schema[i].name());
        boxed.given.push_back(*schema[i].default_value());
      }
    }
    TORCH_CHECK(used == args.size() + named.size(), "an argument that the schema has not");
  }

  // The argument at a position of the schema.
  void give(Boxed& boxed, py::handle arg, size_t position) {
    const auto& schema = boxed.op.schema();
    const auto& argument = schema.arguments()[position];
    const bool as_tensors = numbers_as_tensors(schema.name());
    if (!spelling_->varies(arg)) {
      torch::jit::ToIValueAllowNumbersAsTensors allow(as_tensors);
      boxed.given.push_back(torch::jit::toIValue(spelling_->argument(arg, nullptr),
                                                 argument.real_type(), argument.N()));
      return;
    }
    boxed.given.emplace_back();
    if (!PyTuple_Check(arg.ptr())) {
      auto source = source_of(arg, argument.real_type(), argument.N(), as_tensors);
      boxed.arguments.push_back({position, std::move(source)});
      return;
    }
    auto element = bare(argument.real_type())->expect<c10::ListType>()->getElementType();
    // as torch takes a list of ints where sizes may stand
    if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
    std::vector<Source> items;
    for (auto item : arg) items.push_back(source_of(item, element, std::nullopt, as_tensors));
    boxed.lists.push_back({position, std::move(element), std::move(items)});
  }

  Source source_of(py::handle arg, const TypePtr& type, std::optional<int32_t> length,
                   bool as_tensors) {
    if (spelling_->is_ref(arg)) {
      const bool optional = type->kind() == c10::TypeKind::OptionalType;
      const auto kind = optional ? Source::OPTIONAL_VALUE : Source::VALUE;
      return {kind, Spelling::index(arg), {}};
    }
    if (spelling_->is_param(arg)) {
      const bool wrapped = bare(type)->kind() == c10::TypeKind::TensorType;
      const auto number = wrapped ? static_cast<TypePtr>(c10::NumberType::get()) : type;
      conversions_.push_back({Spelling::index(arg), number, length});
      const auto kind = wrapped ? Source::WRAPPED : Source::NUMBER;
      return {kind, static_cast<int32_t>(conversions_.size()) - 1, {}};
    }
    torch::jit::ToIValueAllowNumbersAsTensors allow(as_tensors);
    auto constant = torch::jit::toIValue(spelling_->argument(arg, nullptr), type, length);
    return {Source::CONSTANT, 0, std::move(constant)};
  }

  static TypePtr bare(const TypePtr& type) {
    auto optional = type->cast<c10::OptionalType>();
    return optional ? optional->getElementType() : type;
  }

  // As torch decides it for a call from Python.
  static bool numbers_as_tensors(const std::string& name) {
    auto symbol = c10::Symbol::fromQualString(name);
    return symbol.is_prims() ||
        (symbol.is_aten() && torch::should_allow_numbers_as_tensors(symbol.toUnqualString()));
  }

  // The run's numbers, as torch takes them from Python; false if it does not take one.
  bool convert(Frame& frame) const {
    frame.numbers.reserve(conversions_.size());
    try {
      for (const auto& each : conversions_) {
        PyObject* number = PyTuple_GetItem(frame.params, each.param);
        frame.numbers.push_back(torch::jit::toIValue(number, each.type, each.length));
      }
    } catch (const std::exception&) {  // its node will say so
      PyErr_Clear();
      return false;
    }
    return true;
  }

  // Runs without the GIL; the number of the instruction that failed, or how many there are.
  size_t advance(Frame& frame) const {
    size_t at = 0;
    try {
      for (; at < code_.size(); ++at) code_[at]->run(frame);
    } catch (py::error_already_set& error) {
      py::gil_scoped_acquire gil;
      if (!error.matches(PyExc_Exception)) throw;
    } catch (const std::exception&) {  // the interpreter will meet it again, and report it
      py::gil_scoped_acquire gil;
      PyErr_Clear();
    }
    return at;
  }

  py::object stopped(const Frame& frame, int32_t node, bool made = false) const {
    py::dict values;
    for (Slot slot = 0; slot < values_; ++slot) {
      values[py::int_(slot)] =
          py::reinterpret_steal<py::object>(THPVariable_Wrap(frame.values[slot]));
    }
    return py::make_tuple(node, values, made);
  }

  Slot values_, slots_;
  int32_t end_ = 0;
  py::object clone_;
  std::shared_ptr<const Spelling> spelling_;
  std::vector<std::shared_ptr<const Instruction>> code_;  // shared with programs in other sizes
  size_t taken_ = 0;  // how many of another program's were looked at
  std::vector<Conversion> conversions_;
  std::optional<std::vector<Slot>> outputs_;
};

}  // namespace

py::object run_program(py::handle program, const py::list& inputs, const py::tuple& params) {
  return program.cast<const Program&>().run(inputs, params, false);
}

void bind_executor(py::module_& module) {
  py::class_<Program>(module, "Program")
      .def(py::init<Slot, py::object, py::object, py::object, py::object, py::object>())
      .def("resized", &Program::resized)
      .def("take_over", &Program::take_over)
      .def("check", &Program::check)
      .def("spare", &Program::spare)
      .def("call", &Program::call)
      .def("call_python", &Program::call_python)
      .def("clone", &Program::clone)
      .def("alias", &Program::alias)
      .def("free", &Program::free)
      .def("restride", &Program::restride)
      .def("finish", &Program::finish)
      .def("stop", &Program::stop)
      .def("run", &Program::run)
      .def("__len__", &Program::size);
}

}  // namespace lazygt
