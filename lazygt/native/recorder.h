// Recorder: what has been recorded since the last flush, and how an op is added to it.
//
// A hit runs no Python: the key is found below the step reached before, cells and handles are made,
// the user's frame is marked. Anything else goes to the Python recorder, which works on the same
// cells, views and steps through record.bridge.
#pragma once
#include "lock.h"
#include "marks.h"
#include "trie.h"

namespace lazygt {
using Stack = std::vector<c10::IValue>;

class Fetcher;

// The number of a trace that begins: no other session's is the same.
uint64_t new_serial();

struct Recorder {
  Lock lock;
  std::atomic<bool> closed{false};
  bool anchored = false;  // traces that are too long end where one did before:
  int anchor = 0;         // the `lasti` of that op's mark
  std::atomic<bool> draws{false};  // the workers have the state of the random stream
  PyObject* python;           // record.bridge.NativeRecorder, which is there while ops are recorded
  PyObject* trace = nullptr;  // its NativeTrace
  Fetcher* fetcher = nullptr;  // gets numbers without Python

  // -- the trace ---------------------------------------------------------------------------------
  uint64_t serial = 0;
  StepP step, root;
  std::vector<c10::weak_intrusive_ptr<Cell>> owners;  // of each value
  std::vector<RemoteP> inputs;
  std::vector<c10::weak_intrusive_ptr<Cell>> entrants;  // of each input
  // the numbers that its run gets, and the user's frame of each op: those that Python has not taken
  std::vector<c10::IValue> params;
  std::vector<Mark> marks;
  size_t marks_taken = 0;

  explicit Recorder(py::handle python) : python(python.ptr()) {}

  // Adds one op; its arguments on the stack become its results.
  void record(Facts& f, Stack& stack);
  // So, by the Python recorder.
  void record_in_python(const Facts& f, Stack& stack);

  // -- what storages and handles ask for -----------------------------------------------------------
  int32_t index_of(Handle* t) {
    Cell* cell = t->cell.get();
    if (C10_UNLIKELY(cell->serial != serial)) enter(t->cell);
    if (C10_LIKELY(!t->view)) return cell->index;
    View& view = *t->view;
    if (C10_UNLIKELY(view.serial != serial || view.base != cell->index)) replay(view, t->cell);
    return view.index;
  }
  void enter(const CellP& cell);
  void own(const CellP& cell, int32_t index);
  at::Tensor show(int32_t index, MetaP meta);
  at::Tensor show_view(Step& step, Handle& source, size_t which);
  int64_t last_number();  // of the trace, a position
  Step* find_moved(const Facts& f, const at::Tensor& first, const Words& key, Moved& moved);
  void write(const at::Tensor& t, int32_t index);
  void advance(StepP next);  // by an op; marks it
  void reserve(const Step& of);
  void settle();
  void begin(uint64_t serial, StepP first, py::handle trace);
  void renew();  // begins the next one in the place of a trace that Python has added nothing to
  void overflow_if_full();

  // -- keys: false where Python has to look at the argument ----------------------------------------
  bool put(Words& key, const Facts& f, const c10::IValue& value, uint8_t hoist);
  bool put_tensor(Words& key, const Facts& f, const at::Tensor& t, uint8_t hoist);
  bool put_number(Words& key, const c10::IValue& number);

 private:
  bool ordinary(Facts& f, Stack& stack);
  bool put_all(Words& key, const Facts& f, c10::ArrayRef<c10::IValue> args, uint32_t& view_at);
  Step* miss(Facts& f, c10::ArrayRef<c10::IValue> args, const Words& key, const Words& moved, uint32_t view_at);
  void results(Step& step, Facts& f, Stack& stack);
  void results_in_python(const Facts& f, Stack& stack);
  bool shows_written(const Step& step, const Facts& f, c10::ArrayRef<c10::IValue> args) const;
  void write_blank(const CellP& cell);
  void replay(View& view, const CellP& cell);
  void take_again(View& view, Link& link, int32_t index, const Meta& meta, bool may_move);
  void take_in_python(View& view, Link& link, int32_t index, const Meta& meta);
  bool item(Stack& stack);
  void host_item(Stack& stack);
  bool blank(const Facts& f, Stack& stack);
};

// Whether a handle looks as a step's result that it is written with.
bool shows(const at::Tensor& t, const MetaP& written);
// The recorder of the innermost open session; null: none is open.
Recorder* active_recorder();
void set_active_recorder(Recorder* recorder);
Recorder* recorder_of(py::handle owner);   // of a NativeRecorder; needs the GIL
py::object owner_of(const Cell& cell);     // needs the GIL
void set_closed_owner(py::object stand_in);  // of cells whose recorder is gone
// Runs as in __torch_dispatch__: all that stands above Python in torch's dispatcher is off.
c10::DispatchKeySet above_python();
}  // namespace lazygt
