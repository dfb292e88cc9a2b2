#include "marks.h"

#include <c10/util/flat_hash_map.h>
#include <frameobject.h>
#include <pthread.h>

#include <array>
#include <shared_mutex>

// CPython 3.11 and 3.12 keep frames in a list that a thread may read of itself without the GIL.
// Others are asked by the public API, which costs the GIL.
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
#define LAZYGT_READS_FRAMES 1
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace lazygt {
namespace {
PyObject* library_test = nullptr;
std::shared_mutex lock;
// while another thread has it nobody forks: it would stay locked in the child
[[maybe_unused]] const int held_over_forks =
    pthread_atfork([] { lock.lock(); }, [] { lock.unlock(); }, [] { new (&lock) std::shared_mutex(); });

ska::flat_hash_map<PyCodeObject*, bool>& known() {
  static auto* codes = new ska::flat_hash_map<PyCodeObject*, bool>();
  return *codes;
}

// Needs the GIL. The code object is kept, so that its address stays its own.
bool learn(PyCodeObject* code) {
  auto told = checked(PyObject_CallFunctionObjArgs(library_test, code->co_filename, nullptr));
  bool library = told.ptr() == Py_True;
  std::unique_lock<std::shared_mutex> guard(lock);
  if (known().emplace(code, library).second) Py_INCREF(code);
  return library;
}

// -1: not known yet.
int looked_up(PyCodeObject* code) {
  // a call of a layer has as many frames of libraries as fit in here
  struct Answer {
    PyCodeObject* code = nullptr;
    int library = -1;
  };
  thread_local std::array<Answer, 64> last;
  Answer& answer = last[(reinterpret_cast<uintptr_t>(code) >> 4) % last.size()];
  if (code == answer.code) return answer.library;
  std::shared_lock<std::shared_mutex> guard(lock);
  auto place = known().find(code);
  if (place == known().end()) return -1;
  answer = {code, place->second};
  return answer.library;
}
}  // namespace

#ifdef LAZYGT_READS_FRAMES
Mark user_mark() {
  PyThreadState* state = PyGILState_GetThisThreadState();
  if (state == nullptr) return {nullptr, 0};
  for (_PyInterpreterFrame* frame = state->cframe->current_frame; frame; frame = frame->previous) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == FRAME_OWNED_BY_CSTACK) continue;
#endif
    if (_PyFrame_IsIncomplete(frame)) continue;
    int library = looked_up(frame->f_code);
    if (library < 0) {
      Gil gil;
      library = learn(frame->f_code);
    }
    if (!library) {
      return {frame->f_code, int(_PyInterpreterFrame_LASTI(frame) * sizeof(_Py_CODEUNIT))};
    }
  }
  return {nullptr, 0};
}
#else
Mark user_mark() {
  if (PyGILState_GetThisThreadState() == nullptr) return {nullptr, 0};
  Gil gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none()) {
    auto* shown = reinterpret_cast<PyFrameObject*>(frame.ptr());
    auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(shown)));
    auto* pointer = reinterpret_cast<PyCodeObject*>(code.ptr());
    int library = looked_up(pointer);
    if (library < 0) library = learn(pointer);
    if (!library) return {pointer, PyFrame_GetLasti(shown)};
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(shown)));
  }
  return {nullptr, 0};
}
#endif

py::object call_site(const Mark& mark) {
  if (mark.code == nullptr) return py::none();
  auto code = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(mark.code));
  return py::make_tuple(code, mark.lasti);
}

Mark mark_of(py::handle call_site) {
  if (call_site.is_none()) return {nullptr, 0};
  auto [code, lasti] = py::cast<std::pair<py::object, int>>(call_site);
  TORCH_CHECK(PyCode_Check(code.ptr()), "a call site begins with a code object");
  auto* pointer = reinterpret_cast<PyCodeObject*>(code.ptr());
  if (looked_up(pointer) < 0) learn(pointer);
  return {pointer, lasti};
}

void set_library_test(py::object is_library) { library_test = is_library.release().ptr(); }
}  // namespace lazygt
