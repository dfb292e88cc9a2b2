// NCCL by memory that the ranks share: each collective is a host function in its stream.
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

#include "device.h"

namespace {

const size_t SLOT = 1 << 20;
const int MOST_RANKS = 8;

struct Shared {
  std::atomic<int> opened, arrived, generation;
  std::atomic<int> full[MOST_RANKS][MOST_RANKS];  // a message from one to another lies there
  char slots[MOST_RANKS][SLOT];
  char mail[MOST_RANKS][MOST_RANKS][SLOT];
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclFloat16: case ncclBfloat16: return 2;
    default: return 1;
  }
}

template <class T>
void add(void* to, const void* from, size_t size) {
  for (size_t i = 0; i < size / sizeof(T); ++i) ((T*)to)[i] += ((const T*)from)[i];
}

// Sums; of what has no arithmetic here the first rank's bytes stay.
void add(void* to, const void* from, size_t size, ncclDataType_t type) {
  if (type == ncclFloat32) add<float>(to, from, size);
  if (type == ncclFloat64) add<double>(to, from, size);
  if (type == ncclInt64) add<int64_t>(to, from, size);
  if (type == ncclInt32) add<int32_t>(to, from, size);
}

thread_local int depth = 0;
thread_local std::vector<std::pair<cudaStream_t, Op>> grouped;

}  // namespace

struct ncclComm {
  Shared* shared;
  int rank, ranks;
  std::atomic<bool> aborted{false};

  // Whether the condition came to hold; not if the communicator was given up.
  bool waits(const std::function<bool()>& holds) {
    while (!holds()) {
      if (aborted) return false;
      usleep(50);
    }
    return true;
  }

  bool meet() {
    int generation = shared->generation;
    if (++shared->arrived == ranks) {
      shared->arrived = 0;
      shared->generation++;
      return true;
    }
    return waits([=, this] { return shared->generation != generation; });
  }

  // Has each rank put `bytes` into its slot, in pieces, and `take` read those of all ranks.
  void exchange(const char* source, size_t bytes, const std::function<void(size_t, size_t)>& take) {
    for (size_t at = 0; at < bytes; at += SLOT) {
      size_t size = std::min(SLOT, bytes - at);
      memcpy(shared->slots[rank], source + at, size);
      if (!meet()) return;
      take(at, size);
      if (!meet()) return;
    }
  }

  void sum(char* target, size_t at, size_t size, ncclDataType_t type) {
    memcpy(target + at, shared->slots[0], size);
    for (int other = 1; other < ranks; ++other) add(target + at, shared->slots[other], size, type);
  }

  void send(int peer, const char* source, size_t bytes) {
    for (size_t at = 0; at < bytes; at += SLOT) {
      if (!waits([=, this] { return !shared->full[rank][peer]; })) return;
      memcpy(shared->mail[rank][peer], source + at, std::min(SLOT, bytes - at));
      shared->full[rank][peer] = 1;
    }
  }

  void receive(int peer, char* target, size_t bytes) {
    for (size_t at = 0; at < bytes; at += SLOT) {
      if (!waits([=, this] { return bool(shared->full[peer][rank]); })) return;
      memcpy(target + at, shared->mail[peer][rank], std::min(SLOT, bytes - at));
      shared->full[peer][rank] = 0;
    }
  }
};

namespace {

ncclResult_t run(cudaStream_t stream, Op op) {
  if (broken()) return ncclUnhandledCudaError;
  control().collectives++;
  if (depth)
    grouped.emplace_back(stream, std::move(op));
  else
    enqueue(stream, std::move(op));
  return ncclSuccess;
}

}  // namespace

API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  snprintf(id->internal, sizeof id->internal, "/stub-nccl-%08x%08x", std::random_device{}(), getpid());
  return ncclSuccess;
}

API ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
  int fd = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ranks > MOST_RANKS || ftruncate(fd, sizeof(Shared))) return ncclSystemError;
  auto shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  *made = new ncclComm{shared, rank, ranks};
  if (++shared->opened == ranks) shm_unlink(id.internal);
  (*made)->waits([=] { return shared->opened == ranks; });
  return ncclSuccess;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank,
                                        ncclConfig_t*) {
  return ncclCommInitRank(made, ranks, id, rank);
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclCommAbort(comm); }
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->ranks;
  return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

API ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

API const char* ncclGetErrorString(ncclResult_t) { return "an error of the stub"; }
API const char* ncclGetLastError(ncclComm_t) { return "an error of the stub"; }

API ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

API ncclResult_t ncclGroupEnd() {
  if (--depth == 0) {
    for (auto& [stream, op] : grouped) enqueue(stream, std::move(op));
    grouped.clear();
  }
  return ncclSuccess;
}

API ncclResult_t ncclAllReduce(const void* sent, void* received, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
  char *source = reachable(sent), *target = reachable(received);
  return run(stream, [=] {
    comm->exchange(source, count * size_of(type),
                   [=](size_t at, size_t size) { comm->sum(target, at, size, type); });
  });
}

API ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, int, ncclComm_t comm, cudaStream_t stream) {
  return ncclAllReduce(sent, received, count, type, op, comm, stream);
}

API ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) {
  char *source = reachable(sent), *target = reachable(received);
  size_t bytes = count * size_of(type);
  return run(stream, [=] {
    comm->exchange(source, bytes, [=](size_t at, size_t size) {
      for (int rank = 0; rank < comm->ranks; ++rank)
        memcpy(target + rank * bytes + at, comm->shared->slots[rank], size);
    });
  });
}

API ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t count,
                                   ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                                   cudaStream_t stream) {
  char *source = reachable(sent), *target = reachable(received);
  size_t bytes = count * size_of(type);
  return run(stream, [=] {
    for (int owner = 0; owner < comm->ranks; ++owner)
      comm->exchange(source + owner * bytes, bytes, [=](size_t at, size_t size) {
        if (owner == comm->rank) comm->sum(target, at, size, type);
      });
  });
}

API ncclResult_t ncclBroadcast(const void* sent, void* received, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
  char *source = reachable(sent), *target = reachable(received);
  return run(stream, [=] {
    comm->exchange(source, count * size_of(type), [=](size_t at, size_t size) {
      memmove(target + at, comm->shared->slots[root], size);
    });
  });
}

API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

API ncclResult_t ncclSend(const void* sent, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
  char* source = reachable(sent);
  return run(stream, [=] { comm->send(peer, source, count * size_of(type)); });
}

API ncclResult_t ncclRecv(void* received, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
  char* target = reachable(received);
  return run(stream, [=] { comm->receive(peer, target, count * size_of(type)); });
}
