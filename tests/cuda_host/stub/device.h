// What the parts of the stub runtime share: memory, streams as threads, errors.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "control.h"

#define API extern "C" __attribute__((visibility("default")))

// A point in a stream's work that others wait for.
struct Point {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  int64_t time = 0;
  void reach();
  void wait();
  bool is_reached();
};

using Op = std::function<void()>;

struct CUgraph_st {
  std::vector<Op> ops;
  size_t kernels = 0;
  bool invalid = false;
};

// Work of a stream is done in order by a thread of its own, or noted while it is captured.
struct CUstream_st;
CUstream_st* stream_of(cudaStream_t stream);
void enqueue(cudaStream_t stream, Op op);
std::shared_ptr<Point> mark(cudaStream_t stream);
void finish(cudaStream_t stream);
bool is_captured(cudaStream_t stream);
// Note a call that no capture of this thread may contain; whether there is one.
bool breaks_capture();
void finish_all();

// A device's memory as the host may reach it: the address that programs have is not readable.
char* reachable(const void* address);
bool is_pinned(const void* address);

// The number of a device of this process among all GPUs.
int number_of(int device);

cudaError_t failed(cudaError_t error);
// The error that ended this process's use of the device, if kernels are known to have failed.
cudaError_t broken();
// The same, with all that has run meanwhile.
cudaError_t noticed();
void launched(cudaStream_t stream);
