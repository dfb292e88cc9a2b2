// A number that somebody asks for: from the end of the trace to its value, where the plan is known
// and nothing is out of the ordinary. submit.Submitter does the same for all else.
#pragma once
#include "ship.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>

namespace lazygt {
struct RunMessage;

// The way to the only worker.
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;
  // Whether a run of this plan (empty: of none) may go there.
  virtual bool takes(const std::string& digest) const = 0;
  // Hands a run over; how many bytes it took. Nothing: Python has to send it.
  virtual std::optional<int64_t> send(const RunMessage& message) = 0;
  // The frames of the answer; None where they are not there in a moment.
  virtual py::object answer() = 0;
};
std::unique_ptr<WorkerLink> inline_link(py::object runs, py::object finished);
// `boxes`: a net.mailbox.Mailboxes. `cores`: its Cores. `heard`: notes a sign of life.
std::unique_ptr<WorkerLink> mailbox_link(py::object boxes, py::object cores, py::object heard, int64_t run_tag);

// Of a submitter, which owns it and what it speaks to.
class Fetcher {
 public:
  Fetcher(Recorder& recorder, py::handle submitter, py::handle flush, py::object answers, int64_t run_tag,
          std::unique_ptr<WorkerLink> link);
  ~Fetcher();
  Fetcher(const Fetcher&) = delete;

  // Whether nothing is out of the ordinary by now. Needs the GIL, as what follows.
  bool ready() const;
  // The number that a handle without a view shows, if it is ready; nothing where Python has to
  // fetch it: then nothing has changed.
  std::optional<c10::IValue> number(Handle& t);

 private:
  struct Sent;  // a run
  bool choose(Sent& run, const Cell& cell) const;
  void end_trace(Sent& run);
  RunMessage message(Sent& run, py::handle counts);
  void keep(const Sent& run, const RunMessage& told, py::handle recovery);
  void note(const Sent& run);
  void show(Sent& run);
  c10::IValue in_python(Sent& run, const CellP& cell, py::object unsent, py::object told);

  Recorder& recorder_;
  py::handle submitter_, flush_;
  py::object answers_;
  int64_t run_tag_;
  std::unique_ptr<WorkerLink> link_;
};

void bind_fetcher(py::module_& m);
}  // namespace lazygt
