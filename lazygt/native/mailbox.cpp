// What mailboxes do for each message: see `runtime/launch/mailbox.py`, which says how they lie in
// memory and does the same where there is no extension.
#include "module.h"
#include "python.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

namespace lazygt {
namespace {
constexpr size_t WRITTEN = 0, READ = 8;  // as 64-bit words
constexpr size_t HEAD = 10;              // a number of 8 bytes and one of 2
constexpr int LOOKS = 2000;              // between two looks elsewhere: some 10 us

uint16_t half_word(const char* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

// A look at the bytes of a Python object.
class Bytes {
 public:
  explicit Bytes(py::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) < 0) throw_python();
  }
  Bytes(Bytes&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Bytes(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  size_t size() const { return size_t(view_.len); }
  const char* begin() const { return static_cast<const char*>(view_.buf); }

 private:
  Py_buffer view_;
};

// One direction, of which a process is either the reader or the writer.
class Mailbox {
 public:
  // `begin`: of its words; the slots are `first` bytes later.
  Mailbox(py::handle memory, size_t begin, size_t first, size_t slot, size_t slots)
      : slot_(slot), slots_(slots) {
    if (PyObject_GetBuffer(memory.ptr(), &view_, PyBUF_WRITABLE) < 0) throw_python();
    TORCH_CHECK(begin + first + slot * slots <= size_t(view_.len), "no room for a mailbox");
    words_ = reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(view_.buf) + begin);
    room_ = static_cast<char*>(view_.buf) + begin + first;
  }
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;

  bool filled() const {
    return words_ && words_[WRITTEN].load(std::memory_order_acquire) != words_[READ].load(std::memory_order_relaxed);
  }

  bool put(const py::sequence& frames, uint64_t before) {
    check_open();
    std::vector<Bytes> parts;
    size_t size = 0;
    for (auto frame : frames) {
      parts.emplace_back(frame);
      size += 2 + parts.back().size();
    }
    const uint64_t written = words_[WRITTEN].load(std::memory_order_relaxed);
    const uint64_t waiting = written - words_[READ].load(std::memory_order_acquire);
    if (size > slot_ - HEAD || waiting >= slots_) return false;
    char* at = room_ + written % slots_ * slot_;
    const auto count = uint16_t(parts.size());
    std::memcpy(at, &before, 8);
    std::memcpy(at + 8, &count, 2);
    at += HEAD;
    for (const auto& part : parts) {
      const auto length = uint16_t(part.size());
      std::memcpy(at, &length, 2);
      at += 2;
    }
    for (const auto& part : parts) {
      std::memcpy(at, part.begin(), part.size());
      at += part.size();
    }
    words_[WRITTEN].store(written + 1, std::memory_order_release);
    return true;
  }

  // The frames of the next message, unless there is none or one of the socket's comes first.
  py::object take(uint64_t received) {
    check_open();
    const uint64_t read = words_[READ].load(std::memory_order_relaxed);
    const uint64_t written = words_[WRITTEN].load(std::memory_order_acquire);
    if (written == read) return py::none();
    const char* head = room_ + read % slots_ * slot_;
    uint64_t before;
    std::memcpy(&before, head, 8);
    if (before > received) return py::none();
    const size_t count = half_word(head + 8), room = slot_ - HEAD;
    if (written - read > slots_ || 2 * count > room) refuse();
    const char *sizes = head + HEAD, *at = sizes + 2 * count;
    py::list frames(count);
    for (size_t i = 0; i < count; ++i) {
      const size_t size = half_word(sizes + 2 * i);
      if (size > size_t(sizes + room - at)) refuse();
      PyList_SET_ITEM(frames.ptr(), Py_ssize_t(i), checked(PyBytes_FromStringAndSize(at, Py_ssize_t(size))).release().ptr());
      at += size;
    }
    words_[READ].store(read + 1, std::memory_order_release);
    return std::move(frames);
  }

  void close() {
    if (words_ == nullptr) return;
    words_ = nullptr;
    PyBuffer_Release(&view_);
  }

 private:
  void check_open() const {
    if (words_ == nullptr) throw py::value_error("the mailbox is closed");
  }
  [[noreturn]] static void refuse() {
    throw py::value_error("a message in a mailbox contradicts its own lengths");
  }

  Py_buffer view_;
  std::atomic<uint64_t>* words_ = nullptr;
  char* room_ = nullptr;
  size_t slot_, slots_;
};

// Looks for a moment whether something comes in, or happens elsewhere.
void spin(const py::sequence& boxes, const py::object& elsewhere, double seconds) {
  std::vector<const Mailbox*> looks;
  for (auto box : boxes) looks.push_back(&box.cast<const Mailbox&>());
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    for (int look = 0; look < LOOKS / int(looks.size() + 1); ++look) {
      for (const auto* box : looks) {
        if (box->filled()) return;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    auto happened = elsewhere();
    if (PyObject_IsTrue(happened.ptr()) || Clock::now() >= until) return;
  }
}
}  // namespace

void bind_mailboxes(py::module_& module) {
  py::class_<Mailbox>(module, "Mailbox")
      .def(py::init<py::handle, size_t, size_t, size_t, size_t>())
      .def("filled", &Mailbox::filled)
      .def("put", &Mailbox::put)
      .def("take", &Mailbox::take)
      .def("close", &Mailbox::close);
  module.def("spin", &spin);
}
}  // namespace lazygt
