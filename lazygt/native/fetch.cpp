#include "fetch.h"

#include "runs.h"
#include "storage.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <marshal.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace lazygt {
namespace {
constexpr int MARSHAL = 2;  // as runtime.wire has it

void add(py::handle object, PyObject* name, int64_t more) {
  set(object, name, number_object(get_number(object, name) + more));
}

Update update_of(std::optional<IdUpdate> update) {
  if (!update) return {};
  return {update->whole ? Update::WHOLE : Update::PAIRS, std::move(update->numbers)};
}

bool has_complex(const std::vector<c10::IValue>& params) {
  return std::any_of(params.begin(), params.end(), [](const auto& p) { return p.isComplexDouble(); });
}

// The bits of numbers: runtime.wire.bits.
py::object bits_of(const py::tuple& params) {
  if (params.empty()) return checked(PyBytes_FromStringAndSize(nullptr, 0));
  return checked(PyMarshal_WriteObjectToString(params.ptr(), MARSHAL));
}

bool same_bytes(py::handle a, py::handle b) {
  return PyBytes_Check(a.ptr()) && PyBytes_GET_SIZE(a.ptr()) == PyBytes_GET_SIZE(b.ptr()) &&
      std::memcmp(PyBytes_AS_STRING(a.ptr()), PyBytes_AS_STRING(b.ptr()), size_t(PyBytes_GET_SIZE(b.ptr()))) == 0;
}

int64_t size_of(const py::list& frames) {
  int64_t size = 0;
  for (auto frame : frames) size += PyObject_Size(frame.ptr());
  return size;
}
}  // namespace

struct Fetcher::Sent {
  Living living;
  py::object kept, entry;  // planner.CachedPlan and its PlanRecord; null: nothing is run
  const Outputs* outputs = nullptr;
  std::string digest;
  int64_t wanted = 0;  // the id that is fetched; one of the run's own counts from its base
  bool fresh = false;

  StepP step;
  Ids inputs, frees;
  py::tuple params;
  CallSites sites;
  Shown shown;
  int64_t seq = 0, base = 0, values = 0;
};

Fetcher::Fetcher(Recorder& recorder, py::handle submitter, py::handle flush, py::object answers,
                 int64_t run_tag, std::unique_ptr<WorkerLink> link)
    : recorder_(recorder), submitter_(submitter), flush_(flush), answers_(std::move(answers)),
      run_tag_(run_tag), link_(std::move(link)) {
  recorder_.fetcher = this;
}

Fetcher::~Fetcher() { recorder_.fetcher = nullptr; }

bool Fetcher::ready() const {
  if (recorder_.closed || recorder_.python == nullptr || recorder_.marks_taken != 0) return false;
  return get(submitter_, NAME(plain)).ptr() == Py_True;
}

std::optional<c10::IValue> Fetcher::number(Handle& t) {
  CellP cell = t.cell;
  Sent run;
  if (!choose(run, *cell)) return std::nullopt;
  const auto owner = py::reinterpret_borrow<py::object>(submitter_);  // which has this
  end_trace(run);
  auto client = get(submitter_, NAME(_client)), counts = get(client, NAME(counts));
  const RunMessage told = message(run, client);
  keep(run, told, get(client, NAME(recovery)));
  const auto bytes = link_->send(told);
  if (!bytes) {
    py::list frames;
    frames.append(py::bytes(told.packed(run_tag_)));
    note(run);
    show(run);
    return in_python(run, cell, frames, py::none());
  }
  note(run);
  show(run);
  add(counts, NAME(messages_sent), 1);
  add(counts, NAME(bytes_sent), *bytes);
  set(counts, NAME(last_run), number_object(*bytes));
  if (*bytes > get_number(counts, NAME(largest_run))) set(counts, NAME(largest_run), number_object(*bytes));
  py::object frames = link_->answer();
  auto number = frames.is_none() ? std::nullopt : number_in(answers_, frames, uint64_t(run.seq));
  if (!number) return in_python(run, cell, py::none(), frames);
  const auto data = PyBytes_GET_SIZE(PyList_GET_ITEM(frames.ptr(), 1));
  add(counts, NAME(messages_received), 1);
  add(counts, NAME(bytes_received), size_of(frames));
  add(counts, NAME(fetches), 1);
  add(counts, NAME(bytes_fetched), data);
  if (run.entry) call_method(submitter_, "ran", run.entry);
  return number;
}

// -- what is run -----------------------------------------------------------------------------------

// Finds the plan, and what of its outputs or of earlier ones is wanted.
bool Fetcher::choose(Sent& run, const Cell& cell) const {
  auto& r = recorder_;
  run.fresh = cell.serial == r.serial && cell.index >= 0;
  if (!run.fresh) {
    if (!cell.remote || cell.remote->sharding != 0 || cell.remote->rest) return false;
    run.wanted = cell.remote->id;
  }
  if (r.step->ops == 0) return !run.fresh && r.step.get() == r.root.get() && link_->takes(run.digest);
  if (has_complex(r.params)) return false;
  run.living = living(r);
  auto plans = get(py::handle(r.step->node), NAME(plans));
  PyObject* kept = PyDict_GetItemWithError(plans.ptr(), numbers(run.living).ptr());
  if (kept == nullptr) {
    if (PyErr_Occurred()) throw_python();
    return false;
  }
  run.kept = py::reinterpret_borrow<py::object>(kept);
  run.entry = get(run.kept, NAME(entry));
  run.outputs = &py::cast<const Outputs&>(get(run.kept, NAME(shown)));
  run.digest = py::cast<std::string>(py::list(get(run.entry, NAME(names)))[0]);
  const auto& all = run.outputs->numbers;
  run.values = get_number(run.entry, NAME(outputs));
  if (size_t(run.values) != all.size() || get(run.entry, NAME(sent)).ptr() != Py_True) return false;
  for (uint32_t sharding : run.outputs->shardings) if (sharding != 0) return false;
  if (run.fresh) run.wanted = std::lower_bound(all.begin(), all.end(), cell.index) - all.begin();
  return link_->takes(run.digest);
}

void Fetcher::end_trace(Sent& run) {
  auto& r = recorder_;
  run.step = r.step;
  run.inputs = take_inputs(r);
  run.params = take_params(r);
  run.sites = take_sites(r);
  run.shown = take_shown(r);
  add(py::handle(r.python), NAME(shipped_ops), run.step->ops);
  r.renew();
}

// The run as the worker is told of it: runtime.client.client.Client.run.
RunMessage Fetcher::message(Sent& run, py::handle client) {
  RunMessage told;
  told.base = run.base = get_number(client, NAME(_next_id));
  told.seq = run.seq = get_number(client, NAME(_seq)) + 1;
  if (run.values != 0) set(client, NAME(_next_id), number_object(run.base + run.values));
  set(client, NAME(_seq), number_object(run.seq));
  told.fetches = {run.fresh ? run.base + run.wanted : run.wanted};
  run.frees = py::cast<Freed&>(get(client, NAME(_freed))).take();
  if (!run.entry) {
    if (!run.frees.list.empty()) told.frees = {Update::WHOLE, run.frees.list};
    return told;
  }
  told.digest = run.digest;
  told.inputs = update_of(py::cast<DeltaCodec&>(get(run.entry, NAME(inputs))).encode(run.inputs.list, run.base));
  told.frees = update_of(py::cast<DeltaCodec&>(get(run.entry, NAME(frees))).encode(run.frees.list, run.base));
  auto bits = bits_of(run.params);
  if (!same_bytes(get(run.entry, NAME(numbers)), bits)) told.params = run.params;
  set(run.entry, NAME(numbers), bits);
  add(run.entry, NAME(runs), 1);
  return told;
}

// For a recovery, if there may be one.
void Fetcher::keep(const Sent& run, const RunMessage& told, py::handle recovery) {
  if (recovery.is_none()) return;
  py::list frames, messages;
  frames.append(py::bytes(told.packed(run_tag_)));
  messages.append(frames);
  auto noted = py::make_tuple(run.seq, run.entry ? run.entry : py::none(), messages);
  py::list(get(get(recovery, NAME(journal)), NAME(entries))).append(noted);
}

// -- what is remembered of it ----------------------------------------------------------------------

// In the history: submit.Submitter._submit.
void Fetcher::note(const Sent& run) {
  auto history = get(submitter_, NAME(_history)), flushes = get(history, NAME(flushes));
  PyObject* before = PyDict_GetItem(flushes.ptr(), NAME(item));
  auto times = number_object(1 + (before == nullptr ? 0 : number_of(before)));
  if (PyDict_SetItem(flushes.ptr(), NAME(item), times.ptr()) < 0) throw_python();
  py::object digest = py::none(), site = py::none();
  if (run.kept) {
    add(history, NAME(plan_hits), 1);
    set(history, NAME(last_plan), get(run.entry, NAME(plan)));
    digest = py::bytes(run.digest);
    auto touch = get(get(py::handle(recorder_.python), NAME(trie)), NAME(touch));
    auto name = checked(PyLong_FromVoidPtr(run.kept.ptr()));
    checked(PyObject_CallOneArg(touch.ptr(), name.ptr()));
  }
  if (get(submitter_, NAME(names_lines)).ptr() == Py_True) {
    site = call_site(user_mark());
    if (site.is_none()) site = get(py::handle(recorder_.python), NAME(_backward_call_site));
  }
  auto fields = py::make_tuple(py::handle(NAME(item)), site, run.step->ops, digest, bool(run.kept), run.seq);
  auto given = checked(PyTuple_Pack(1, fields.ptr()));
  auto flush = checked(PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(flush_.ptr()), given.ptr(), nullptr));
  auto recent = get(history, NAME(recent));
  checked(PyObject_CallMethodOneArg(recent.ptr(), NAME(append), flush.ptr()));
}

// In the handles.
void Fetcher::show(Sent& run) {
  if (!run.kept) return;
  auto freed = py::cast<FreedP>(get(get(submitter_, NAME(_client)), NAME(_freed)));
  Values values(run.base, size_t(run.values), std::move(freed));
  rebind(*run.outputs, run.living, values, run.sites, get(py::handle(recorder_.python), NAME(_backward_call_site)));
  run.living.cells.clear();
}

// Where there is more to it, or it takes a while.
c10::IValue Fetcher::in_python(Sent& run, const CellP& cell, py::object unsent, py::object told) {
  auto kept = run.kept ? run.kept : py::none();
  auto node = py::reinterpret_borrow<py::object>(run.step->node);
  auto recorded = py::make_tuple(number_object(run.seq), number_object(run.base), kept, node,
                                 py::cast(run.sites), run.params, py::cast(run.inputs), py::cast(run.frees),
                                 py::cast(std::move(run.shown)));
  auto value = call_method(submitter_, "go_on", recorded, storage_of(cell), unsent, told);
  if (PyFloat_Check(value.ptr())) return PyFloat_AS_DOUBLE(value.ptr());
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  if (PyLong_Check(value.ptr())) return number_of(value.ptr());
  TORCH_CHECK(THPVariable_Check(value.ptr()), "a number came as a ", Py_TYPE(value.ptr())->tp_name);
  c10::impl::ExcludeDispatchKeyGuard below(above_python());
  return THPVariable_Unpack(value.ptr()).item();
}

// -- with Python -----------------------------------------------------------------------------------

namespace {
using Made = std::unique_ptr<Fetcher>;
}  // namespace

void bind_fetcher(py::module_& m) {
  py::class_<Fetcher>(m, "Fetcher")
      .def_static("inline", [](Recorder& recorder, py::handle submitter, py::handle flush, py::object answers,
                               int64_t run_tag, py::object runs, py::object finished) {
        return Made(new Fetcher(recorder, submitter, flush, std::move(answers), run_tag,
                                inline_link(std::move(runs), std::move(finished))));
      })
      .def_static("by_mailbox", [](Recorder& recorder, py::handle submitter, py::handle flush, py::object answers,
                                   int64_t run_tag, py::object boxes, py::object cores, py::object heard) {
        return Made(new Fetcher(recorder, submitter, flush, std::move(answers), run_tag,
                                mailbox_link(std::move(boxes), std::move(cores), std::move(heard), run_tag)));
      });
}
}  // namespace lazygt
