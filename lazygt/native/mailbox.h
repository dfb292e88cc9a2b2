// A mailbox, for whoever puts messages there or takes them: see `net/mailbox.py`.
#pragma once
#include "python.h"

#include <atomic>
#include <string_view>
#include <vector>

namespace lazygt {
// One direction, of which a process is either the reader or the writer. Needs the GIL, but to look.
class Mailbox {
 public:
  // `begin`: of its words; the slots are `first` bytes later.
  Mailbox(py::handle memory, size_t begin, size_t first, size_t slot, size_t slots);
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;

  bool open() const { return words_ != nullptr; }
  bool filled() const {
    return words_ && words_[WRITTEN].load(std::memory_order_acquire) != words_[READ].load(std::memory_order_relaxed);
  }
  // Leaves a message that comes after `before` ones of the socket; false if there is no room.
  bool put(const std::vector<std::string_view>& frames, uint64_t before);
  // The frames of the next message; None: there is none, or one of the socket's comes first.
  py::object take(uint64_t received);
  // Looks so often whether something has come.
  bool spin(int looks) const;
  void close();

 private:
  static constexpr size_t WRITTEN = 0, READ = 8;  // as 64-bit words
  void check_open() const;

  Py_buffer view_;
  std::atomic<uint64_t>* words_ = nullptr;
  char* room_ = nullptr;
  size_t slot_, slots_;
};
}  // namespace lazygt
