// The lock of a session: recursive, and never waited for with the GIL in hand. So whoever holds it
// may take the GIL, and nobody waits in a circle.
#pragma once
#include <Python.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace lazygt {
class Lock {
 public:
  void acquire() {
    auto self = std::this_thread::get_id();
    if (owner_.load(std::memory_order_relaxed) == self) {
      ++depth_;
      return;
    }
    if (!mutex_.try_lock()) wait();
    owner_.store(self, std::memory_order_relaxed);
    depth_ = 1;
  }
  void release() {
    if (--depth_ > 0) return;
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    mutex_.unlock();
  }
  bool owned() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

 private:
  void wait() {
    if (!PyGILState_Check()) {
      mutex_.lock();
      return;
    }
    PyThreadState* state = PyEval_SaveThread();
    mutex_.lock();
    PyEval_RestoreThread(state);
  }
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};

class Hold {
 public:
  explicit Hold(Lock& lock) : lock_(lock) { lock_.acquire(); }
  ~Hold() { lock_.release(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  Lock& lock_;
};
}  // namespace lazygt
