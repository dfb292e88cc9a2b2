// Streams, events and CUDA graphs.
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <set>
#include <thread>

#include "device.h"

struct CUevent_st {
  std::shared_ptr<Point> point;
  CUgraph_st* graph = nullptr;  // the one that it was recorded in
};

struct CUgraphExec_st {
  std::vector<Op> ops;
  size_t kernels;
};

struct CUstream_st {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Op> ops;
  bool works = false, started = false;
  int priority = 0;
  CUgraph_st* graph = nullptr;  // that its work is noted in
  bool origin = false;

  void push(Op op) {
    std::lock_guard lock(mutex);
    ops.push_back(std::move(op));
    if (!started) std::thread([this] { work(); }).detach();
    started = true;
    changed.notify_all();
  }

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !ops.empty(); });
      Op op = std::move(ops.front());
      ops.pop_front();
      works = true;
      lock.unlock();
      op();
      lock.lock();
      works = false;
      changed.notify_all();
    }
  }

  bool idle() {
    std::lock_guard lock(mutex);
    return ops.empty() && !works;
  }
};

namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local CUgraph_st* capturing = nullptr;
std::mutex guard;
std::set<CUstream_st*> streams;
unsigned long long captures = 0;

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

CUstream_st* made() {
  auto stream = new CUstream_st;
  std::lock_guard lock(guard);
  streams.insert(stream);
  return stream;
}

}  // namespace

void Point::reach() {
  std::lock_guard lock(mutex);
  reached = true;
  time = now();
  changed.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [this] { return reached; });
}

bool Point::is_reached() {
  std::lock_guard lock(mutex);
  return reached;
}

CUstream_st* stream_of(cudaStream_t stream) {
  // each device has a default stream; 1 and 2 are other names of it
  static CUstream_st* defaults[8];
  if (uintptr_t(stream) > 2) return stream;
  int device;
  cudaGetDevice(&device);
  static std::mutex once;
  std::lock_guard lock(once);
  if (!defaults[device]) defaults[device] = made();
  return defaults[device];
}

void enqueue(cudaStream_t handle, Op op) {
  CUstream_st* stream = stream_of(handle);
  if (stream->graph)
    stream->graph->ops.push_back(std::move(op));
  else
    stream->push(std::move(op));
}

std::shared_ptr<Point> mark(cudaStream_t stream) {
  auto point = std::make_shared<Point>();
  if (stream_of(stream)->idle())
    point->reach();
  else
    stream_of(stream)->push([point] { point->reach(); });
  return point;
}

void finish(cudaStream_t stream) {
  auto point = mark(stream);
  if (!point->is_reached()) control().waits++;
  point->wait();
}

void finish_all() {
  std::vector<CUstream_st*> all;
  {
    std::lock_guard lock(guard);
    all.assign(streams.begin(), streams.end());
  }
  for (auto stream : all) finish(stream);
}

bool is_captured(cudaStream_t stream) { return stream_of(stream)->graph; }

bool breaks_capture() {
  if (!capturing || mode == cudaStreamCaptureModeRelaxed) return false;
  capturing->invalid = true;
  return true;
}

void launched(cudaStream_t stream) {
  CUstream_st* ours = stream_of(stream);
  int64_t busy = control().busy_us;
  if (ours->graph) ours->graph->kernels++;
  if (busy && !ours->graph) enqueue(stream, [=] { usleep(busy); });
}

// -- streams -------------------------------------------------------------------------------------

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = made();
  (*stream)->priority = priority;
  return broken();
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

// Its thread waits for work for ever.
API cudaError_t cudaStreamDestroy(cudaStream_t) { return broken(); }

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return broken();
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (CUgraph_st* graph = stream_of(stream)->graph) {
    graph->invalid = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  finish(stream);
  return noticed();
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (CUgraph_st* graph = stream_of(stream)->graph) {
    graph->invalid = true;
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  if (!stream_of(stream)->idle()) return failed(cudaErrorNotReady);
  return noticed();
}

API cudaError_t cudaDeviceSynchronize() {
  if (breaks_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  finish_all();
  return noticed();
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CUstream_st* ours = stream_of(stream);
  if (event->graph && event->graph != ours->graph) ours->graph = event->graph;  // joins the capture
  if (!ours->graph && event->point && !event->point->is_reached())
    ours->push([point = event->point] { point->wait(); });
  return broken();
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  enqueue(stream, [=] { function(data); });
  return broken();
}

API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* data, unsigned) {
  enqueue(stream, [=] { function(stream, broken(), data); });
  return broken();
}

// -- events --------------------------------------------------------------------------------------

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return broken();
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return broken();
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->graph = stream_of(stream)->graph;
  if (!event->graph) event->point = mark(stream);
  return broken();
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (breaks_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (event->point && !event->point->is_reached()) return failed(cudaErrorNotReady);
  return noticed();
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->point && !event->point->is_reached()) {
    control().waits++;
    event->point->wait();
  }
  return noticed();
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!begin->point || !end->point) return failed(cudaErrorInvalidResourceHandle);
  if (!end->point->is_reached()) return failed(cudaErrorNotReady);
  *ms = (end->point->time - begin->point->time) / 1e6f;
  return broken();
}

// Another process waits for nothing: whoever exports an event has waited for it.
API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  cudaError_t error = cudaEventSynchronize(event);
  memset(handle, 0, sizeof *handle);
  return error;
}

API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t) {
  return cudaEventCreate(event);
}

// -- graphs --------------------------------------------------------------------------------------

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* given) {
  std::swap(mode, *given);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (uintptr_t(stream) <= 2 || stream->graph) return failed(cudaErrorStreamCaptureUnsupported);
  capturing = stream->graph = new CUgraph_st;
  stream->origin = true;
  captures++;
  control().captures++;
  return broken();
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!stream->origin) return failed(cudaErrorIllegalState);
  CUgraph_st* done = stream->graph;
  stream->origin = false;
  capturing = nullptr;
  {
    std::lock_guard lock(guard);
    for (auto other : streams)
      if (other->graph == done) other->graph = nullptr;
  }
  if (control().fail_captures > 0) {
    control().fail_captures--;
    done->invalid = true;
  }
  if (done->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = done;
  return broken();
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  // the default stream is part of no capture, and none may be under way that it would break
  CUgraph_st* graph = stream_of(stream)->graph;
  *status = !graph ? cudaStreamCaptureStatusNone
                   : graph->invalid ? cudaStreamCaptureStatusInvalidated
                                    : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                         unsigned long long* id, cudaGraph_t* graph,
                                         const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = captures;
  if (graph) *graph = stream_of(stream)->graph;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return broken();
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->ops.size() + graph->kernels;
  return broken();
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                              unsigned long long) {
  *made = new CUgraphExec_st{graph->ops, graph->kernels};
  return broken();
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (broken()) return broken();
  control().replays++;
  for (const Op& op : graph->ops) enqueue(stream, op);
  if (graph->kernels) launched(stream);
  return cudaSuccess;
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return broken();
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return broken();
}
