// State of the stub that tests read and set: 64-bit numbers in a page that all processes share.
#pragma once

#include <atomic>
#include <cstdint>

// The order is that of `FIELDS` in tests/cuda_host/control.py.
struct Control {
  std::atomic<int64_t> devices;        // GPUs that there are
  std::atomic<int64_t> total_bytes;    // memory of each
  std::atomic<int64_t> busy_us;        // how long each kernel takes
  std::atomic<int64_t> fail_after;     // kernels until one fails for good; 0: none does
  std::atomic<int64_t> refuse_context; // error of a process's first call of a device; 0: none
  std::atomic<int64_t> fail_captures;  // captures that are still to fail
  std::atomic<int64_t> fail_register;  // whether host memory can't be registered
  std::atomic<int64_t> driver;         // CUDA version of the driver, as NVML tells it
  std::atomic<int64_t> reads_zeros;    // whether copies to the host find zeros on the device
  std::atomic<int64_t> full;           // GPU without memory for more, counted from 1; 0: none
  // counted; kernels of modules that a compiler made are `compiled`
  std::atomic<int64_t> kernels, copies, waits, captures, replays, registered, opened, collectives,
      compiled;
};

Control& control();
