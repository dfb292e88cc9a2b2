// Values of the trace: inputs that enter, storages that show values, views that are taken again.
#include "recorder.h"
#include "storage.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>

namespace lazygt {
namespace {
std::atomic<Recorder*> active{nullptr};
PyObject* closed_owner = nullptr;

py::object wrapped(const at::Tensor& t) { return checked(THPVariable_Wrap(t)); }

// Cuts a list of the trace in Python off; what is left of it. No Python runs that Ctrl-C could end.
size_t cut(py::handle trace, const char* name, int32_t length) {
  auto list = attribute(trace, name);
  if (PyList_SetSlice(list.ptr(), length, PY_SSIZE_T_MAX, nullptr) < 0) throw_python();
  return size_t(PyList_GET_SIZE(list.ptr()));
}

py::object number(int64_t value) { return checked(PyLong_FromLongLong(value)); }
}  // namespace

Recorder* active_recorder() { return active.load(std::memory_order_acquire); }
void set_active_recorder(Recorder* recorder) { active.store(recorder, std::memory_order_release); }

py::object owner_of(const Cell& cell) {
  PyObject* python = cell.owner->python;
  return py::reinterpret_borrow<py::object>(python ? python : closed_owner);
}

void set_closed_owner(py::object stand_in) { closed_owner = stand_in.release().ptr(); }

uint64_t new_serial() {
  static std::atomic<uint64_t> last{0};  // 0 is of no trace
  return ++last;
}

void Recorder::renew() { begin(new_serial(), root, trace); }

void Recorder::begin(uint64_t number, StepP first, py::handle new_trace) {
  serial = number;
  step = root = std::move(first);
  owners.clear();
  params.clear();
  inputs.clear();
  entrants.clear();
  marks.clear();
  marks_taken = 0;
  trace = new_trace.ptr();
}

void Recorder::settle() {
  {
    Gil gil;
    size_t taken = cut(trace, "_params", step->params);
    params.resize(std::min(params.size(), size_t(step->params) - taken));
  }
  inputs.resize(std::min(inputs.size(), size_t(step->inputs)));
  entrants.erase(entrants.begin() + std::min(entrants.size(), size_t(step->inputs)), entrants.end());
  while (marks_taken + marks.size() < size_t(step->ops)) marks.push_back(user_mark());
  reserve(*step);
}

void Recorder::reserve(const Step& of) {
  while (owners.size() < size_t(of.values)) {
    owners.emplace_back(c10::intrusive_ptr<Cell>());
  }
}

void Recorder::advance(StepP next) {
  step = std::move(next);
  marks.push_back(user_mark());
  reserve(*step);
}

void Recorder::own(const CellP& cell, int32_t index) {
  TORCH_CHECK(index >= 0 && size_t(index) < owners.size(), "the trace has no value ", index);
  owners[index] = c10::weak_intrusive_ptr<Cell>(cell);
  cell->set_recorded(serial, index);
}

void Recorder::enter(const CellP& cell) {
  if (cell->owner != this || closed || cell->host.defined() || (!cell->remote && !cell->blank)) {
    Gil gil;
    c10::impl::ExcludeDispatchKeyGuard below(above_python());
    call_method(trace, "enter", storage_of(cell));  // raises, or uploads and comes back
    return;
  }
  if (cell->blank) {
    write_blank(cell);
    return;
  }
  Words key;
  const uint32_t sharding = cell->remote->sharding;
  key.put(word(INPUT, sharding));
  key.put(meta_word(cell->meta));
  Step* next = step->find(key);
  if (next == nullptr) {
    Gil gil;
    auto made = step_of(call_method(trace, "input_step", tensor_meta(*cell->meta), sharding_of(sharding)));
    step->add(key, made);
    next = made.get();
  }
  inputs.push_back(cell->remote);
  entrants.emplace_back(cell);
  step = StepP::reclaim_copy(next);
  cell->index = ~(step->inputs - 1);
  cell->serial = cell->entered = serial;
}

void Recorder::write_blank(const CellP& cell) {
  Words key;
  key.put(word(BLANK, 0));
  key.put(meta_word(cell->meta));
  if (Step* next = step->find(key)) {
    advance(StepP::reclaim_copy(next));
    own(cell, step->first);
    return;
  }
  Gil gil;
  auto before = step;
  call_method(trace, "write_blank", storage_of(cell));
  before->add(key, step);
}

void Recorder::replay(View& view, const CellP& cell) {
  int32_t index = cell->index;
  MetaP meta = cell->meta;
  LinkP last = view.link, again;  // the chain, and once there are positions what it is from now on
  std::vector<int32_t> numbers;
  auto links = chain(last);
  bool may_move = std::none_of(links.begin(), links.end(), [](Link* l) { return l->kind->beginning_matters; });
  for (Link* link : links) {
    take_again(view, *link, index, *meta, may_move);
    const auto& kind = step->kinds[link->kind->which];
    if (C10_UNLIKELY(step->moves || again)) {
      if (!again) again = link->before;
      again = c10::make_intrusive<Link>(again, kind, step->moves ? last_number() : 0);
      if (step->moves) numbers.push_back(step->params - 1);
    }
    index = step->first + kind->which;
    meta = kind->meta;
  }
  if (again) view.take(std::move(again), std::move(numbers));
  view.index = index;
  view.base = cell->index;
  view.serial = serial;
}

// Advances by an op of a chain that is taken of value `index`.
void Recorder::take_again(View& view, Link& link, int32_t index, const Meta& meta, bool may_move) {
  ViewKind& kind = *link.kind;
  if (kind.words.empty()) return take_in_python(view, link, index, meta);
  Words key;
  Moved moved;
  key.append(kind.words.begin(), kind.words.end());
  key[kind.at] = tensor_word(index);
  Step* next = step->find(key);
  if (next != nullptr) {
    if (kind.moves) params.emplace_back(link.position);
    return advance(StepP::reclaim_copy(next));
  }
  if (may_move && !kind.moves && kind.rule != nullptr) kind.rule(key, meta.sizes, moved);
  if (!moved.key.empty()) next = step->find(moved.key);
  if (next != nullptr) {
    params.insert(params.end(), moved.numbers.begin(), moved.numbers.end());
    return advance(StepP::reclaim_copy(next));
  }
  auto before = step;
  take_in_python(view, link, index, meta);
  const Words& known = step->moves && !kind.moves ? moved.key : key;
  before->add(known, step);
  for (auto& made : step->kinds) {
    if (!made->words.empty()) continue;
    made->words.assign(known.begin(), known.end());
    made->at = kind.at;
    made->rule = kind.rule;
  }
}

void Recorder::take_in_python(View& view, Link& link, int32_t index, const Meta& meta) {
  Gil gil;
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  auto shown = py::cast(ViewP::reclaim_copy(&view));
  call_method(trace, "view_again", shown, py::handle(link.kind->op->object), number(link.position),
              number(index), tensor_meta(meta));
  kinds_of(*step);
}

int64_t Recorder::last_number() {
  if (!params.empty()) return params.back().toInt();
  Gil gil;  // Python has taken them over
  return py::cast<int64_t>(attribute(trace, "last_number"));
}

void Recorder::write(const at::Tensor& t, int32_t index) {
  auto* lazy = handle(t);
  if (!lazy->view) {
    own(lazy->cell, index);
    return;
  }
  Words key;
  key.put(word(WRITE_BACK, 0));
  key.put(tensor_word(lazy->cell->index));
  key.put(tensor_word(index));
  bool known = true;
  for (Link* link : chain(lazy->view->link)) {
    key.put(link->kind->id);
    known = known && !link->kind->words.empty();
  }
  for (int32_t param : lazy->view->params) key.put(word(PARAM, uint32_t(param)));
  Step* next = known ? step->find(key) : nullptr;
  if (next == nullptr) {
    Gil gil;
    c10::impl::ExcludeDispatchKeyGuard below(above_python());
    auto before = step;
    call_method(trace, "write_back", wrapped(t), number(index));
    if (known) before->add(key, step);
    return;
  }
  advance(StepP::reclaim_copy(next));
  own(lazy->cell, step->first);
  View& view = *lazy->view;
  view.index = index;
  view.base = lazy->cell->index;
  view.serial = serial;
}
}  // namespace lazygt
