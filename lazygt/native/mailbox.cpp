// What mailboxes do for each message: see `net/mailbox.py`, which says how they lie in
// memory and does the same where there is no extension.
#include "mailbox.h"

#include "module.h"

#include <chrono>
#include <cstring>

namespace lazygt {
namespace {
constexpr size_t HEAD = 10;   // a number of 8 bytes and one of 2
constexpr int LOOKS = 2000;   // between two looks elsewhere: some 10 us

uint16_t half_word(const char* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

[[noreturn]] void refuse() {
  throw py::value_error("a message in a mailbox contradicts its own lengths");
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
  std::string_view all() const { return {static_cast<const char*>(view_.buf), size_t(view_.len)}; }

 private:
  Py_buffer view_;
};

bool put_objects(Mailbox& box, const py::sequence& frames, uint64_t before) {
  std::vector<Bytes> parts;
  std::vector<std::string_view> all;
  for (auto frame : frames) parts.emplace_back(frame);
  for (const auto& part : parts) all.push_back(part.all());
  return box.put(all, before);
}

// Looks for a moment whether something comes in, or happens elsewhere.
void spin(const py::sequence& boxes, const py::object& elsewhere, double seconds) {
  std::vector<const Mailbox*> looks;
  for (auto box : boxes) looks.push_back(&box.cast<const Mailbox&>());
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (true) {
    for (int look = 0; look < LOOKS / int(looks.size() + 1); ++look) {
      for (const auto* box : looks) {
        if (box->spin(1)) return;
      }
    }
    auto happened = elsewhere();
    if (PyObject_IsTrue(happened.ptr()) || Clock::now() >= until) return;
  }
}
}  // namespace

Mailbox::Mailbox(py::handle memory, size_t begin, size_t first, size_t slot, size_t slots)
    : slot_(slot), slots_(slots) {
  if (PyObject_GetBuffer(memory.ptr(), &view_, PyBUF_WRITABLE) < 0) throw_python();
  TORCH_CHECK(begin + first + slot * slots <= size_t(view_.len), "no room for a mailbox");
  words_ = reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(view_.buf) + begin);
  room_ = static_cast<char*>(view_.buf) + begin + first;
}

bool Mailbox::put(const std::vector<std::string_view>& frames, uint64_t before) {
  check_open();
  size_t size = 0;
  for (auto frame : frames) size += 2 + frame.size();
  const uint64_t written = words_[WRITTEN].load(std::memory_order_relaxed);
  const uint64_t waiting = written - words_[READ].load(std::memory_order_acquire);
  if (size > slot_ - HEAD || waiting >= slots_) return false;
  char* at = room_ + written % slots_ * slot_;
  const auto count = uint16_t(frames.size());
  std::memcpy(at, &before, 8);
  std::memcpy(at + 8, &count, 2);
  at += HEAD;
  for (auto frame : frames) {
    const auto length = uint16_t(frame.size());
    std::memcpy(at, &length, 2);
    at += 2;
  }
  for (auto frame : frames) {
    std::memcpy(at, frame.data(), frame.size());
    at += frame.size();
  }
  words_[WRITTEN].store(written + 1, std::memory_order_release);
  return true;
}

py::object Mailbox::take(uint64_t received) {
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

bool Mailbox::spin(int looks) const {
  for (; looks > 0; --looks) {
    if (filled()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

void Mailbox::close() {
  if (words_ == nullptr) return;
  words_ = nullptr;
  PyBuffer_Release(&view_);
}

void Mailbox::check_open() const {
  if (words_ == nullptr) throw py::value_error("the mailbox is closed");
}

void bind_mailboxes(py::module_& module) {
  py::class_<Mailbox>(module, "Mailbox")
      .def(py::init<py::handle, size_t, size_t, size_t, size_t>())
      .def("filled", &Mailbox::filled)
      .def("put", &put_objects)
      .def("take", &Mailbox::take)
      .def("close", &Mailbox::close);
  module.def("spin", &spin);
}
}  // namespace lazygt
