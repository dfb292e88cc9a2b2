// Kernels that torch calls with C++ arguments, without a stack of boxed ones.
//
// Boxing copies every tensor's handle, which takes the GIL where Python has seen the tensor, and
// makes a list object of every shape. These kernels write the very words that boxed arguments would
// have, find the step, and make its results. Whatever is not a hit with results of the plain kinds
// goes on as the boxed call.
#pragma once
#include "recorder.h"

#include <ATen/core/List.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/boxing/impl/boxing.h>

#include <array>
#include <atomic>
#include <tuple>
#include <vector>

namespace lazygt {
// The tensors of one argument.
template <class F>
void each_of(const at::Tensor& t, const F& function) { function(t); }
template <class F>
void each_of(at::TensorList list, const F& function) {
  for (const auto& t : list) function(t);
}
template <class X, class F>
void each_of(const X&, const F&) {}

// The words of one call.
class UnboxedKey {
 public:
  UnboxedKey(Recorder& recorder, const Facts& f) : recorder_(recorder), f_(f) { words.put(word(OP, f.id)); }
  Words words;

  // False where Python has to look at an argument.
  template <class... A>
  bool put_all(const A&... args) {
    note_defaults(std::index_sequence_for<A...>(), args...);
    size_t i = 0;
    return (next(i++, args) && ...);
  }

 private:
  template <size_t... I, class... A>
  void note_defaults(std::index_sequence<I...>, const A&... args) {
    ((left_out_[I] = f_.defaults[I] != nullptr && is_default(args, *f_.defaults[I])), ...);
    // of positional arguments only those at the end are left out
    bool ends = true;
    for (size_t i = f_.positional; i-- > 0;) left_out_[i] = ends = ends && left_out_[i];
  }

  template <class X>
  bool next(size_t i, const X& argument) {
    if (!left_out_[i]) return put(argument, f_.hoist[i]);
    words.put(word(DEFAULT, 0));
    return true;
  }

  template <class X>
  static bool is_default(const X& given, const c10::IValue& standing) {
    return equals_default(c10::IValue(given), standing);
  }
  static bool is_default(const at::Tensor&, const c10::IValue&) { return false; }
  template <class X>
  static bool is_default(const std::optional<X>& given, const c10::IValue& standing) {
    return given ? !standing.isNone() && is_default(*given, standing) : standing.isNone();
  }

  // whatever is cheap in a box
  template <class X>
  bool put(const X& argument, uint8_t hoist) { return recorder_.put(words, f_, c10::IValue(argument), hoist); }
  bool put(const at::Tensor& t, uint8_t hoist) { return recorder_.put_tensor(words, f_, t, hoist); }
  template <class X>
  bool put(const std::optional<X>& argument, uint8_t hoist) {
    if (argument) return put(*argument, hoist);
    words.put(word(NONE, 0));
    return true;
  }
  bool put(c10::IntArrayRef list, uint8_t hoist) {
    if (hoist == 2) return recorder_.put(words, f_, c10::IValue(list), hoist);
    words.put(word(LIST, list.size()));
    for (int64_t number : list) words.put_int(number);
    return true;
  }
  bool put(c10::SymIntArrayRef list, uint8_t hoist) {
    auto numbers = c10::asIntArrayRefSlowOpt(list);
    return numbers && put(*numbers, hoist);
  }
  bool put(at::OptionalIntArrayRef list, uint8_t hoist) {
    return list ? put(*list, hoist) : put(std::optional<int64_t>(), hoist);
  }
  bool put(at::OptionalSymIntArrayRef list, uint8_t hoist) {
    return list ? put(*list, hoist) : put(std::optional<int64_t>(), hoist);
  }
  bool put(at::TensorList list, uint8_t hoist) {
    words.put(word(LIST, list.size()));
    for (const auto& t : list) {
      if (!recorder_.put_tensor(words, f_, t, hoist == 2)) return false;
    }
    return true;
  }

  bool put(const at::ITensorListRef& list, uint8_t hoist) {
    words.put(word(LIST, list.size()));
    for (const at::Tensor& t : list) {
      if (!recorder_.put_tensor(words, f_, t, hoist == 2)) return false;
    }
    return true;
  }

  Recorder& recorder_;
  const Facts& f_;
  std::array<bool, 24> left_out_{};
};

// The kernel of every op with that signature.
template <class Signature>
class Unboxed;

template <class Result, class... A>
class Unboxed<Result(A...)> final : public c10::OperatorKernel {
 public:
  Unboxed(const c10::OperatorHandle& op, c10::BoxedKernel boxed) : op_(op), boxed_(std::move(boxed)) {}

  Result operator()(A... args) {
    Recorder* recorder = active_recorder();
    if (C10_LIKELY(recorder != nullptr && !recorder->closed)) {
      if (C10_UNLIKELY(facts_.load(std::memory_order_acquire) == nullptr)) {
        facts_.store(&facts_of(op_), std::memory_order_release);
      }
      Hold hold(recorder->lock);
      if constexpr (std::is_same_v<Result, at::Tensor>) {
        if (C10_UNLIKELY(is_twin(args...))) return shown_again(*recorder, args...);
      }
      try {
        if (Step* step = found(*recorder, args...)) {
          recorder->advance(StepP::reclaim_copy(step));
          return shown(*recorder, *step, args...);
        }
      } catch (...) {
        recorder->settle();
        throw;
      }
    }
    return c10::impl::BoxedKernelWrapper<Result(A...)>::call(boxed_, op_, {}, std::forward<A>(args)...);
  }

 private:
  static constexpr bool WRITES = std::is_same_v<Result, at::Tensor&>;

  Facts& facts() const { return *facts_.load(std::memory_order_relaxed); }

  // The step of the call, if its results can be made here; else the trace is as it was.
  Step* found(Recorder& recorder, const A&... args) const {
    if (!is_step(recorder, args...)) return nullptr;
    const Step* reached = recorder.step.get();
    const size_t numbers = recorder.params.size();
    UnboxedKey key(recorder, facts());
    if (C10_LIKELY(key.put_all(args...))) {
      Step* step = recorder.step->find(key.words);
      Moved moved;
      if (step == nullptr && facts().rule != nullptr) {
        step = recorder.find_moved(facts(), *first_tensor(args...), key.words, moved);
      }
      if (C10_LIKELY(step != nullptr && is_plain(*step, args...))) return step;
    }
    // the numbers are noted anew; Python may have taken them over where a value has entered
    if (recorder.step.get() != reached || recorder.params.size() != numbers) recorder.settle();
    return nullptr;
  }

  bool is_step(const Recorder& recorder, const A&... args) const {
    size_t i = 0;
    switch (facts().record_kind) {
      case RecordKind::ORDINARY:
        return true;
      case RecordKind::RESHAPED:
        return i == 0;
      case RecordKind::DRAW:
        return recorder.draws;
      case RecordKind::DEVICE:
        return ((int(i++) != facts().at || is_here(args)) && ...);
      case RecordKind::BOTH_LAZY:
        return ((i++ > 1 || is_lazy_tensor(args)) && ...);
      default:
        return false;
    }
  }

  bool is_plain(const Step& step, const A&... args) const {
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      return step.make == Make::ONE || (step.make == Make::ONE_VIEW && facts().viewed == 0);
    } else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
      return step.make == Make::FRESH || (step.make == Make::VIEWS && facts().viewed == 0);
    } else if constexpr (WRITES || std::is_void_v<Result>) {
      size_t count = 0;
      bool fits = step.make == (WRITES ? Make::ITSELF : Make::TENSORS);
      each_written([&](const at::Tensor& t) {
        fits = fits && count < step.written.size() && shows(t, step.written[count]);
        ++count;
      }, args...);
      return fits && count == step.written.size() && step.fresh.empty();
    } else {
      return step.make == Make::TENSORS && step.written.empty() &&
             step.fresh.size() == std::tuple_size_v<Result>;
    }
  }

  Result shown(Recorder& recorder, Step& step, A&... args) const {
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      at::Tensor result = step.make == Make::ONE ? recorder.show(step.first, step.fresh[0])
                                                 : recorder.show_view(step, *viewed(args...), 0);
      recorder.overflow_if_full();
      return result;
    } else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
      std::vector<at::Tensor> result;
      result.reserve(step.fresh.size());
      for (size_t i = 0; i < step.fresh.size(); ++i) {
        result.push_back(step.make == Make::FRESH ? recorder.show(step.first + int32_t(i), step.fresh[i])
                                                  : recorder.show_view(step, *viewed(args...), i));
      }
      recorder.overflow_if_full();
      return result;
    } else if constexpr (WRITES || std::is_void_v<Result>) {
      int32_t index = step.first;
      each_written([&](const at::Tensor& t) { recorder.write(t, index++); }, args...);
      recorder.overflow_if_full();
      if constexpr (WRITES) return std::get<0>(std::tie(args...));
    } else {
      auto result = tuple_of(recorder, step, std::make_index_sequence<std::tuple_size_v<Result>>());
      recorder.overflow_if_full();
      return result;
    }
  }

  template <size_t... I>
  static auto tuple_of(Recorder& recorder, const Step& step, std::index_sequence<I...>) {
    return Result(step.fresh[I] ? recorder.show(step.first + int32_t(I), step.fresh[I]) : at::Tensor()...);
  }

  template <class F>
  void each_written(const F& function, const A&... args) const {
    int i = 0;
    const auto one = [&](const auto& argument) {
      for (int at : facts().writes) if (at == i) each_of(argument, function);
      ++i;
    };
    (one(args), ...);
  }

  // A view that shows what its first argument shows.
  bool is_twin(const A&... args) const {
    if (facts().record_kind != RecordKind::TWIN && facts().record_kind != RecordKind::RESHAPED) return false;
    const at::Tensor* source = first_tensor(args...);
    if (source == nullptr || !is_lazy(*source)) return false;
    return facts().record_kind == RecordKind::TWIN || (is_shape_of(*source, args) || ...);
  }

  static at::Tensor shown_again(Recorder& recorder, const A&... args) {
    at::Tensor twin = twin_of(*viewed(args...));
    recorder.overflow_if_full();
    return twin;
  }

  static const at::Tensor* first_tensor(const A&... args) {
    const auto& first = std::get<0>(std::tie(args...));
    if constexpr (std::is_same_v<decltype(first), const at::Tensor&>) return &first;
    return nullptr;
  }
  static Handle* viewed(const A&... args) {
    const at::Tensor* source = first_tensor(args...);
    TORCH_CHECK(source != nullptr, "only a tensor has views");
    return handle(*source);
  }

  template <class X>
  static bool is_shape_of(const at::Tensor&, const X&) { return false; }
  static bool is_shape_of(const at::Tensor& t, c10::SymIntArrayRef shape) {
    auto sizes = c10::asIntArrayRefSlowOpt(shape);
    return sizes && t.sizes() == *sizes;
  }

  template <class X>
  static bool is_here(const X&) { return true; }
  static bool is_here(const std::optional<c10::Device>& device) { return !device || device->is_privateuseone(); }
  template <class X>
  static bool is_lazy_tensor(const X&) { return true; }
  static bool is_lazy_tensor(const at::Tensor& t) { return is_lazy(t); }

  const c10::OperatorHandle op_;
  const c10::BoxedKernel boxed_;
  std::atomic<Facts*> facts_{nullptr};  // known from the first call on; threads may be first together
};

}  // namespace lazygt
