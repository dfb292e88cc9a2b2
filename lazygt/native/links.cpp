// The ways of a run to the only worker, and of its answer: in this process, and through mailboxes.
#include "fetch.h"
#include "mailbox.h"
#include "runs.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

namespace lazygt {
namespace {
constexpr double SPINS = 60e-6;   // seconds: the GIL is held
constexpr double TELLS = 0.02;    // seconds between two signs of life that Python is told of
constexpr int LOOKS = 200;        // between two looks at the clock
constexpr long ASLEEP = 2000000;  // nanoseconds: Python's wait sees what else may happen

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// -- in this process -------------------------------------------------------------------------------

class Inline final : public WorkerLink {
 public:
  Inline(py::object runs, py::object finished) : runs_(std::move(runs)), finished_(std::move(finished)) {}

  bool takes(const std::string& digest) const override { return digest.empty() || knows(runs_, digest); }

  std::optional<int64_t> send(const RunMessage& message) override {
    py::object told;
    {
      // as outside any other op: graph.ops.undispatched
      c10::impl::ForceDispatchKeyGuard outside(c10::default_included_set, c10::default_excluded_set);
      told = act(runs_, message);
    }
    if (told.is_none()) return std::nullopt;
    if (!PyList_Check(told.ptr())) told = checked(PyObject_CallOneArg(finished_.ptr(), told.ptr()));
    answer_ = std::move(told);
    return 0;
  }

  py::object answer() override { return std::move(answer_); }

 private:
  py::object runs_, finished_, answer_;
};

// -- through mailboxes -----------------------------------------------------------------------------

class Mailed final : public WorkerLink {
 public:
  Mailed(py::object boxes, py::object cores, py::object heard, int64_t run_tag)
      : boxes_(std::move(boxes)), cores_(std::move(cores)), heard_(std::move(heard)), run_tag_(run_tag),
        in_object_(get(boxes_, NAME(incoming))), out_object_(get(boxes_, NAME(_out))),
        in_(py::cast<Mailbox&>(in_object_)), out_(py::cast<Mailbox&>(out_object_)),
        wakes_(int(get_number(boxes_, NAME(wakes)))), wakes_other_(int(get_number(boxes_, NAME(_wakes_other)))) {}

  bool takes(const std::string&) const override { return in_.open() && out_.open() && !in_.filled(); }

  std::optional<int64_t> send(const RunMessage& message) override {
    const auto packed = message.packed(run_tag_);
    if (!out_.put({packed}, uint64_t(get_number(boxes_, NAME(sent))))) return std::nullopt;
    eventfd_write(wakes_other_, 1);
    return int64_t(packed.size());
  }

  py::object answer() override {
    if (!(enough_cores() && spin()) && !sleep()) return py::none();
    py::object frames = py::none();
    try {
      frames = in_.take(uint64_t(get_number(boxes_, NAME(received))));
    } catch (const py::value_error&) {  // Python meets it again, and says whose fault it is
    }
    if (!frames.is_none() && now() >= tells_at_) {
      tells_at_ = now() + TELLS;
      checked(PyObject_CallOneArg(heard_.ptr(), number_object(0).ptr()));
    }
    return frames;
  }

 private:
  // net.mailbox.Cores, which judges anew now and then.
  bool enough_cores() const {
    if (PyFloat_AsDouble(get(cores_, NAME(_judge_at)).ptr()) > now()) {
      return get(cores_, NAME(_enough)).ptr() == Py_True;
    }
    return get(cores_, NAME(enough)).ptr() == Py_True;
  }

  bool spin() const {
    const double until = now() + SPINS;
    do {
      if (in_.spin(LOOKS)) return true;
    } while (now() < until);
    return false;
  }

  // False, too, when a signal has come: Python's handlers run in Python.
  bool sleep() const {
    while (true) {
      pollfd ready{wakes_, POLLIN, 0};
      timespec longest{0, ASLEEP};
      int count;
      Py_BEGIN_ALLOW_THREADS;
      count = ppoll(&ready, 1, &longest, nullptr);
      Py_END_ALLOW_THREADS;
      if (count != 1 || ready.revents != POLLIN || !in_.open()) return false;
      eventfd_t times;
      eventfd_read(wakes_, &times);  // of earlier answers, too, that were there before they were waited for
      if (in_.filled()) return true;
    }
  }

  py::object boxes_, cores_, heard_;
  int64_t run_tag_;
  py::object in_object_, out_object_;
  Mailbox &in_, &out_;
  int wakes_, wakes_other_;
  double tells_at_ = 0;
};
}  // namespace

std::unique_ptr<WorkerLink> inline_link(py::object runs, py::object finished) {
  return std::make_unique<Inline>(std::move(runs), std::move(finished));
}

std::unique_ptr<WorkerLink> mailbox_link(py::object boxes, py::object cores, py::object heard, int64_t run_tag) {
  return std::make_unique<Mailed>(std::move(boxes), std::move(cores), std::move(heard), run_tag);
}
}  // namespace lazygt
