#include "device.h"

#include "recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>

namespace lazygt {
namespace {
PyObject* without_session = nullptr;

// -- kernels -------------------------------------------------------------------------------------

void refuse(const Facts& f, Stack& stack) {
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  auto [positional, named] = python_arguments(f, torch::jit::last(stack, f.arguments()));
  auto result = checked(PyObject_CallFunctionObjArgs(without_session, f.func, positional.ptr(), named.ptr(), nullptr));
  torch::jit::drop(stack, f.arguments());
  push_results(f.op, result, stack);
}

// A meta tensor that only claims to be of this device: torch's FakeTensor detaches such ones.
bool is_of_fake(const Facts& f, const Stack& stack) {
  const auto& first = stack[stack.size() - f.arguments()];
  return first.isTensor() && first.toTensor().defined() && !is_lazy(first.toTensor());
}

void record_boxed(Facts& f, Stack& stack) {
  if (C10_UNLIKELY(f.record_kind == RecordKind::TWIN && is_of_fake(f, stack))) {
    f.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return;
  }
  Recorder* recorder = active_recorder();
  if (C10_UNLIKELY(recorder == nullptr)) {
    refuse(f, stack);
    return;
  }
  Hold hold(recorder->lock);
  recorder->record(f, stack);
}

struct Kernel final : c10::OperatorKernel {
  std::atomic<Facts*> facts{nullptr};  // threads may be first together
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    auto* f = facts.load(std::memory_order_acquire);
    if (C10_UNLIKELY(f == nullptr)) facts.store(f = &facts_of(op), std::memory_order_release);
    record_boxed(*f, *stack);
  }
};

// Ops without a kernel of their own: those of other libraries, whose definition may change, and
// factories.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  if (op.schema().name().rfind("aten::", 0) == 0) {
    record_boxed(facts_of(op), *stack);
    return;
  }
  Facts f{op, 0, nullptr, nullptr};
  {
    Gil gil;
    f.func = torch::detail::getTorchApiFunction(op).ptr();
  }
  for (const auto& a : op.schema().arguments()) {
    f.positional += !a.kwarg_only();
    f.hoist.push_back(0);
    f.defaults.push_back(a.default_value() ? &*a.default_value() : nullptr);
  }
  record_boxed(f, *stack);
}

}  // namespace

void record_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack) { record_boxed(facts_of(op), stack); }

namespace {
bool takes_tensors(const c10::FunctionSchema& schema) {
  for (const auto& a : schema.arguments()) {
    auto type = a.real_type();
    while (true) {
      if (type->kind() == c10::TypeKind::TensorType) return true;
      if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
      else if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
      else break;
    }
  }
  return false;
}

// Factories that every other one goes through.
const std::set<std::string> BLANKS{"empty.memory_format", "empty_strided"};

void register_kernels(const std::set<std::string>& elsewhere, const std::set<std::string>& composite) {
  static auto* everything = new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  everything->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findSchema(name);
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!op || !(takes_tensors(op->schema()) || BLANKS.count(full))) continue;
    bool decomposed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (elsewhere.count(full) || (decomposed && !composite.count(full))) continue;
    auto boxed = std::make_unique<Kernel>();
    if (takes_unboxed(full)) {
      register_unboxed(*op, full, c10::BoxedKernel::makeFromFunctor(std::move(boxed)));
    } else {
      aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(boxed)));
    }
  }
}

// -- what torch asks of a device -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return lazy_device(); }
  c10::Device getDevice() const override { return lazy_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, lazy_device()); }
};

// A generator of this device: one of the CPU in all but its device. What draws through it draws in
// the client, so that a seed gives the numbers that it gives on a CPU.
struct Generator final : c10::GeneratorImpl {
  const at::Generator host;

  // without a key: an op goes where its tensors are, and the CPU's kernels refuse it in torch's words
  explicit Generator(at::Generator host)
      : c10::GeneratorImpl(lazy_device(), c10::DispatchKeySet()), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.unsafeGetGeneratorImpl()->set_current_seed(seed); }
  // torch asks for it when a generator is copied; one of the CPU has none
  uint64_t get_offset() const override { return 0; }
  void set_offset(uint64_t offset) override {
    if (offset != 0) host.unsafeGetGeneratorImpl()->set_offset(offset);
  }
  uint64_t current_seed() const override { return host.unsafeGetGeneratorImpl()->current_seed(); }
  uint64_t seed() override { return host.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override { return new Generator(host.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto* shared =
        new at::Generator(at::make_generator<Generator>(at::detail::getDefaultCPUGenerator()));
    return *shared;
  }
};
}  // namespace

py::object host_generator(py::object generator) {
  auto given = THPGenerator_Unwrap(generator.ptr());
  if (given.device().type() != c10::DeviceType::PrivateUse1) return generator;
  const auto* ours = static_cast<Generator*>(given.unsafeGetGeneratorImpl());
  return py::reinterpret_steal<py::object>(THPGenerator_Wrap(ours->host));
}

void register_device(const std::set<std::string>& elsewhere, const std::set<std::string>& composite,
                     py::object no_session) {
  TORCH_CHECK(without_session == nullptr, "device lazygt is registered already");
  without_session = no_session.release().ptr();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::PrivateUse1, new Guard());
  py::gil_scoped_release release;
  register_kernels(elsewhere, composite);
}

void record_whole(const std::string& space, const std::string& op) {
  static std::mutex lock;
  static auto* libraries = new std::map<std::string, torch::Library>();
  static auto* known = new std::set<std::string>();
  std::lock_guard<std::mutex> guard(lock);
  if (!known->insert(space + "::" + op).second) return;
  auto [place, _] = libraries->try_emplace(space, torch::Library::IMPL, space, KEY, __FILE__, __LINE__);
  place->second.impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace lazygt
