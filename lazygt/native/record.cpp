#include "fetch.h"
#include "recorder.h"
#include "runs.h"

#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>

namespace lazygt {
namespace {
template <class F>
void each_tensor(const c10::IValue& value, const F& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, function);
  }
}

bool has_mask(const c10::IValue& indices) {
  bool masked = false;
  each_tensor(indices, [&](const at::Tensor& t) {
    masked = masked || t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
  });
  return masked;
}

bool is_here(const c10::IValue& device) {
  return device.isNone() || (device.isDevice() && device.toDevice().is_privateuseone());
}

c10::DimVector row_major(c10::IntArrayRef sizes) {
  c10::DimVector strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) strides[i] = step;
  return strides;
}

void replace(Stack& stack, size_t arguments, c10::IValue result) {
  torch::jit::drop(stack, arguments);
  stack.push_back(std::move(result));
}
}  // namespace

c10::DispatchKeySet above_python() {
  using c10::DispatchKeySet;
  static const auto keys =
      DispatchKeySet(DispatchKeySet::FULL) ^
      (DispatchKeySet(DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
       DispatchKeySet(c10::DispatchKey::Python));
  return keys;
}

bool shows(const at::Tensor& t, const MetaP& written) {
  if (!is_lazy(t) || !written) return false;
  const Meta& shown = handle(t)->meta();
  return &shown == written.get() || shown.shows_like(*written);
}

// -- one op --------------------------------------------------------------------------------------

void Recorder::record(Facts& f, Stack& stack) {
  const size_t n = f.arguments();
  const auto& argument = [&](size_t i) -> const c10::IValue& { return stack[stack.size() - n + i]; };
  bool recorded = false;
  Facts* facts = &f;
  switch (closed ? RecordKind::PYTHON : f.record_kind) {
    case RecordKind::PYTHON:
      break;
    case RecordKind::TWIN:
    case RecordKind::RESHAPED:
      if (!argument(0).isTensor() || !is_lazy(argument(0).toTensor())) break;
      if (f.record_kind == RecordKind::TWIN || argument(0).toTensor().sizes() == argument(1).toDimVector()) {
        replace(stack, n, twin_of(*handle(argument(0).toTensor())));
        recorded = true;
      } else {
        recorded = ordinary(f, stack);
      }
      break;
    case RecordKind::ITSELF:
      replace(stack, n, argument(0));
      recorded = true;
      break;
    case RecordKind::ITEM:
      recorded = item(stack);
      break;
    case RecordKind::AS_VIEW: {
      static Facts& view = facts_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", ""));
      stack.pop_back();
      record(view, stack);
      return;
    }
    case RecordKind::MASKED:
      if (!has_mask(argument(1))) recorded = ordinary(f, stack);
      break;
    case RecordKind::DEVICE:
      if (is_here(argument(f.at))) recorded = ordinary(f, stack);
      break;
    case RecordKind::BOTH_LAZY:
      if (is_lazy(argument(0).toTensor()) && is_lazy(argument(1).toTensor())) {
        recorded = ordinary(f, stack);
      }
      break;
    case RecordKind::FLAGGED:
      if (argument(f.at).isBool() && argument(f.at).toBool()) facts = f.writing;
      recorded = ordinary(*facts, stack);
      break;
    case RecordKind::DRAW:
      if (draws) recorded = ordinary(f, stack);
      break;
    case RecordKind::BLANK:
      recorded = blank(f, stack);
      break;
    case RecordKind::ORDINARY:
      recorded = ordinary(f, stack);
  }
  if (!recorded) record_in_python(f, stack);
  overflow_if_full();  // after what is no step, too: an op that failed may have left it full
}

void Recorder::overflow_if_full() {
  if (C10_LIKELY(!step->full && !anchored)) return;
  if (!step->full && !marks.empty() && marks.back().lasti != anchor) return;
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  call_method(python, "overflow");
}

// empty.memory_format(size, dtype, layout, device, pin_memory, memory_format) or
// empty_strided(size, stride, dtype, layout, device, pin_memory)
bool Recorder::blank(const Facts& f, Stack& stack) {
  auto args = torch::jit::last(stack, f.arguments());
  bool strided = args[1].isIntList();
  const auto &dtype = args[strided ? 2 : 1], &layout = args[strided ? 3 : 2], &format = args[5];
  bool plain = args[0].isIntList() && (layout.isNone() || layout.toLayout() == c10::kStrided) &&
               (strided || format.isNone() || format.toMemoryFormat() == c10::MemoryFormat::Contiguous);
  if (!plain) return false;
  auto sizes = args[0].toDimVector(), strides = strided ? args[1].toDimVector() : row_major(sizes);
  if (sizes.size() != strides.size()) return false;
  for (auto size : sizes) if (size < 0) return false;
  auto kind = dtype.isNone() ? c10::get_default_dtype_as_scalartype() : dtype.toScalarType();
  auto cell = c10::make_intrusive<Cell>(this, 0, 0, intern(sizes, strides, 0, kind));
  cell->blank = true;
  const auto& context = at::globalContext();  // where torch fills new memory, it is no longer blank
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) enter(cell);
  replace(stack, f.arguments(), new_handle(*cell->meta, cell));
  return true;
}

// False where Python reads the number. A view's own elements travel, not the whole storage.
bool Recorder::item(Stack& stack) {
  const auto& t = stack.back();
  if (!t.isTensor() || !is_lazy(t.toTensor()) || handle(t.toTensor())->cell->owner != this) return false;
  auto* lazy = handle(t.toTensor());
  if (!lazy->view && lazy->cell->host.defined()) {
    host_item(stack);
    return true;
  }
  if (fetcher == nullptr || lazy->dim() != 0 || lazy->is_neg() || !is_plain(c10::typeMetaToScalarType(lazy->dtype()))) return false;
  Gil gil;
  if (!fetcher->ready()) return false;
  if (lazy->view) {
    const auto before = serial;
    static Facts& clone = facts_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", ""));
    stack.emplace_back();
    record(clone, stack);
    if (serial != before && !fetcher->ready()) return false;
  }
  auto number = fetcher->number(*handle(stack.back().toTensor()));
  if (number) replace(stack, 1, std::move(*number));
  return bool(number);
}

void Recorder::host_item(Stack& stack) {
  auto value = handle(stack.back().toTensor())->cell->host;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  replace(stack, 1, value.item());
}

bool Recorder::put_all(Words& key, const Facts& f, c10::ArrayRef<c10::IValue> args, uint32_t& view_at) {
  key.put(word(OP, f.id));
  size_t given = given_positional(f, args);
  for (size_t i = 0; i < args.size(); ++i) {
    if (int(i) == f.viewed) view_at = uint32_t(key.size());
    bool left_out = i < f.positional
                        ? i >= given
                        : f.defaults[i] != nullptr && equals_default(args[i], *f.defaults[i]);
    if (left_out) {
      key.put(word(DEFAULT, 0));
    } else if (!put(key, f, args[i], f.hoist[i])) {
      return false;
    }
  }
  return true;
}

bool Recorder::ordinary(Facts& f, Stack& stack) {
  auto args = torch::jit::last(stack, f.arguments());
  try {
    Words key;
    Moved moved;
    uint32_t view_at = 0;
    if (!put_all(key, f, args, view_at)) {
      settle();  // Python notes the op's numbers anew
      return false;
    }
    Step* next = step->find(key);
    if (next == nullptr && f.rule != nullptr) next = find_moved(f, args[0].toTensor(), key, moved);
    if (C10_UNLIKELY(next == nullptr || next->make == Make::UNKNOWN)) {
      next = miss(f, args, key, moved.key, view_at);
    }
    step = StepP::reclaim_copy(next);
    marks.push_back(user_mark());
    results(*next, f, stack);
    return true;
  } catch (...) {
    settle();
    throw;
  }
}

// The step that takes the op's position as a number, which is noted then; null: there is none.
Step* Recorder::find_moved(const Facts& f, const at::Tensor& first, const Words& key, Moved& moved) {
  if (is_lazy(first)) f.rule(key, first.sizes(), moved);
  Step* next = moved.key.empty() ? nullptr : step->find(moved.key);
  if (next == nullptr || next->make == Make::UNKNOWN) return nullptr;
  params.insert(params.end(), moved.numbers.begin(), moved.numbers.end());
  return next;
}

Step* Recorder::miss(Facts& f, c10::ArrayRef<c10::IValue> args, const Words& plain, const Words& moved,
                     uint32_t view_at) {
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  auto [positional, named] = python_arguments(f, args);
  auto node = call_method(python, "step_for", py::handle(f.facts), positional, named);
  auto next = step_of(node);
  prepare(*next, f);
  const Words& key = next->moves ? moved : plain;
  TORCH_CHECK(!key.empty(), f.op.schema().name(), ": its position is a number in Python alone");
  for (auto& kind : next->kinds) {
    if (!kind->words.empty()) continue;
    kind->words.assign(key.begin(), key.end());
    kind->at = view_at;
    kind->rule = f.rule;
  }
  step->add(key, next);
  return next.get();  // its TrieNode holds it
}

void Recorder::record_in_python(const Facts& f, Stack& stack) {
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  auto args = torch::jit::last(stack, f.arguments());
  auto [positional, named] = python_arguments(f, args);
  auto result = call_method(python, "record", py::handle(f.func), positional, named);
  torch::jit::drop(stack, f.arguments());
  push_results(f.op, result, stack);
}

// -- results -------------------------------------------------------------------------------------

bool Recorder::shows_written(const Step& next, const Facts& f, c10::ArrayRef<c10::IValue> args) const {
  bool same = true;
  size_t count = 0;
  for (int at : f.writes) {
    each_tensor(args[at], [&](const at::Tensor& t) {
      if (count >= next.written.size()) {
        same = false;
        return;
      }
      same = same && shows(t, next.written[count++]);
    });
  }
  return same && count == next.written.size();
}

void Recorder::results_in_python(const Facts& f, Stack& stack) {
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  auto [positional, named] = python_arguments(f, torch::jit::last(stack, f.arguments()));
  auto result = call_method(python, "results", py::handle(f.facts), positional, named);
  torch::jit::drop(stack, f.arguments());
  push_results(f.op, result, stack);
}

void Recorder::results(Step& next, Facts& f, Stack& stack) {
  const size_t n = f.arguments();
  auto args = torch::jit::last(stack, n);
  bool writes = next.make == Make::ITSELF || next.make == Make::TENSORS;
  if (next.make == Make::PYTHON || (writes && !shows_written(next, f, args))) {
    results_in_python(f, stack);
    return;
  }
  reserve(next);
  if (next.make == Make::ONE) {
    replace(stack, n, show(next.first, next.fresh[0]));
    return;
  }
  if (next.make == Make::ITSELF) {
    at::Tensor t = args[0].toTensor();
    write(t, next.first);
    replace(stack, n, std::move(t));
    return;
  }
  if (next.make == Make::ONE_VIEW) {
    replace(stack, n, show_view(next, *handle(args[f.viewed].toTensor()), 0));
    return;
  }
  if (next.make == Make::VIEWS || next.make == Make::FRESH) {
    c10::List<at::Tensor> list;
    list.reserve(next.fresh.size());
    for (size_t i = 0; i < next.fresh.size(); ++i) {
      list.push_back(next.make == Make::VIEWS
                         ? show_view(next, *handle(args[f.viewed].toTensor()), i)
                         : show(next.first + int32_t(i), next.fresh[i]));
    }
    replace(stack, n, std::move(list));
    return;
  }
  int32_t index = next.first + int32_t(next.fresh.size());
  for (int at : f.writes) each_tensor(args[at], [&](const at::Tensor& t) { write(t, index++); });
  Stack out;
  index = next.first;
  for (size_t i = 0; i < f.outs.size(); ++i) {
    if (f.outs[i] == Out::WRITTEN) {
      out.push_back(args[f.returned[i]]);
      continue;
    }
    const MetaP& meta = next.fresh[index - next.first];
    out.emplace_back(meta ? show(index, meta) : at::Tensor());
    ++index;
  }
  torch::jit::drop(stack, n);
  for (auto& value : out) stack.push_back(std::move(value));
}

at::Tensor Recorder::show(int32_t index, MetaP meta) {
  auto cell = c10::make_intrusive<Cell>(this, serial, index, std::move(meta));
  owners[index] = c10::weak_intrusive_ptr<Cell>(cell);
  const Meta& shown = *cell->meta;
  return new_handle(shown, std::move(cell));
}

at::Tensor Recorder::show_view(Step& next, Handle& source, size_t which) {
  const auto& kind = next.kinds[which];
  auto link = source.view || kind->moves
                  ? c10::make_intrusive<Link>(source.view ? source.view->link : LinkP(), kind,
                                              kind->moves ? last_number() : 0)
                  : next.links[which];
  auto view = c10::make_intrusive<View>(std::move(link), serial, source.cell->index,
                                        next.first + int32_t(which));
  if (source.view) view->params = source.view->params;
  if (kind->moves) view->params.push_back(next.params - 1);
  auto impl = c10::make_intrusive<Handle>(*kind->meta, source.cell, std::move(view));
  impl->shift();
  impl->be_like(source);
  return at::Tensor(std::move(impl));
}

// -- keys ----------------------------------------------------------------------------------------

bool Recorder::put_number(Words& key, const c10::IValue& number) {
  uint64_t kind = number.isInt() ? 1 : number.isDouble() ? 2 : number.isBool() ? 3 : number.isComplexDouble() ? 4 : 0;
  if (kind == 0) return false;
  params.push_back(number);
  key.put(word(PARAM, kind));
  return true;
}

bool Recorder::put_tensor(Words& key, const Facts& f, const at::Tensor& t, uint8_t hoist) {
  if (!t.defined()) {
    key.put(word(UNDEFINED, 0));
    return true;
  }
  auto* impl = t.unsafeGetTensorImpl();
  if (C10_LIKELY(is_lazy(impl))) {
    auto* lazy = static_cast<Handle*>(impl);
    // a number that is computed in the client, as long as no values of workers are met
    if (C10_UNLIKELY(lazy->cell->serial != serial && f.pointwise && lazy->cell->host.defined())) return false;
    key.put(tensor_word(index_of(lazy)));
    return true;
  }
  if (!impl->is_wrapped_number() || hoist != 1 || !t.device().is_cpu()) return false;
  switch (t.scalar_type()) {
    case at::kLong: return put_number(key, *t.const_data_ptr<int64_t>());
    case at::kDouble: return put_number(key, *t.const_data_ptr<double>());
    case at::kBool: return put_number(key, *t.const_data_ptr<bool>());
    case at::kComplexDouble: return put_number(key, *t.const_data_ptr<c10::complex<double>>());
    default: return false;
  }
}

bool Recorder::put(Words& key, const Facts& f, const c10::IValue& value, uint8_t hoist) {
  if (value.isTensor()) return put_tensor(key, f, value.toTensor(), hoist);
  if (value.isNone()) {
    key.put(word(NONE, 0));
    return true;
  }
  if (hoist == 1 && put_number(key, value)) return true;
  if (value.isInt()) {
    key.put_int(value.toInt());
    return true;
  }
  if (value.isBool()) {
    key.put(word(BOOL, value.toBool()));
    return true;
  }
  if (value.isDouble() || value.isComplexDouble()) {
    double parts[2] = {0, 0};
    uint64_t bits[2];
    bool real = value.isDouble();
    if (real) parts[0] = value.toDouble();
    else parts[0] = value.toComplexDouble().real(), parts[1] = value.toComplexDouble().imag();
    std::memcpy(bits, parts, sizeof(bits));
    key.put(word(real ? DOUBLE : COMPLEX, 0));
    key.put(bits[0]);
    if (!real) key.put(bits[1]);
    return true;
  }
  if (value.isList()) {
    auto items = value.toListRef();
    key.put(word(LIST, items.size()));
    for (const c10::IValue& item : items) {
      if (!put(key, f, item, hoist == 2 ? 1 : 0)) return false;
    }
    return true;
  }
  if (value.isString()) {
    const auto& text = value.toStringRef();
    key.put(word(STRING, text.size()));
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t letters = 0;
      std::memcpy(&letters, text.data() + i, std::min<size_t>(8, text.size() - i));
      key.put(letters);
    }
    return true;
  }
  if (value.isDevice()) {
    auto place = value.toDevice();
    key.put(word(DEVICE, uint64_t(place.type()) << 8 | uint8_t(place.index())));
    return true;
  }
  return false;
}
}  // namespace lazygt
