// Device memory: memfds, mapped twice. Programs get an address that the host may not read.
#include <sys/mman.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "device.h"

namespace {

struct Block {
  size_t size;
  char* reached;  // by the stub
  int fd, device;
};

struct Handle {
  int pid, fd, device;
  size_t size;
};

std::mutex guard;
std::map<uintptr_t, Block> blocks;
std::map<uintptr_t, size_t> pinned;
size_t used[8];

template <class Map, class Size>
auto inside(Map& map, const void* address, Size size) {
  auto found = map.upper_bound(uintptr_t(address));
  if (found == map.begin()) return map.end();
  --found;
  return uintptr_t(address) < found->first + size(found->second) ? found : map.end();
}

auto block_of(const void* address) {
  return inside(blocks, address, [](const Block& block) { return block.size; });
}

cudaError_t mapped(int fd, size_t size, int device, void** address) {
  void* shown = mmap(nullptr, size, PROT_NONE, MAP_SHARED, fd, 0);
  void* reached = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (shown == MAP_FAILED || reached == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  blocks[uintptr_t(shown)] = {size, (char*)reached, fd, device};
  *address = shown;
  return cudaSuccess;
}

int current() {
  int device;
  cudaGetDevice(&device);
  return device;
}

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t stream, bool waits) {
  if (broken()) return broken();
  control().copies++;
  char *target = reachable(to), *source = reachable(from);
  bool zeros = control().reads_zeros && target == to && source != from;
  auto work = [=] { zeros ? memset(target, 0, size) : memmove(target, source, size); };
  enqueue(stream, work);
  bool pageable = (target == to && !is_pinned(to)) || (source == from && !is_pinned(from));
  if (is_captured(stream) || !(waits || pageable)) return cudaSuccess;
  finish(stream);
  return noticed();
}

}  // namespace

char* reachable(const void* address) {
  std::lock_guard lock(guard);
  auto found = block_of(address);
  if (found == blocks.end()) return (char*)address;
  return found->second.reached + (uintptr_t(address) - found->first);
}

bool is_pinned(const void* address) {
  std::lock_guard lock(guard);
  return inside(pinned, address, [](size_t size) { return size; }) != pinned.end();
}

API cudaError_t cudaMalloc(void** address, size_t size) {
  if (breaks_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  if (broken()) return broken();
  std::lock_guard lock(guard);
  int device = current();
  if (control().full == number_of(device) + 1) return failed(cudaErrorMemoryAllocation);
  if (used[device] + size > size_t(control().total_bytes)) return failed(cudaErrorMemoryAllocation);
  int fd = memfd_create("device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, size)) return failed(cudaErrorMemoryAllocation);
  used[device] += size;
  return mapped(fd, size, device, address);
}

API cudaError_t cudaFree(void* address) {
  if (!address) return broken();
  if (breaks_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  finish_all();
  std::lock_guard lock(guard);
  auto found = blocks.find(uintptr_t(address));
  if (found == blocks.end()) return failed(cudaErrorInvalidValue);
  Block block = found->second;
  munmap(address, block.size);
  munmap(block.reached, block.size);
  close(block.fd);
  used[block.device] -= block.size;
  blocks.erase(found);
  return broken();
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard lock(guard);
  *total = control().total_bytes;
  *free = *total - used[current()];
  return broken();
}

API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  std::lock_guard lock(guard);
  pinned[uintptr_t(*address)] = size;
  return broken();
}

API cudaError_t cudaFreeHost(void* address) {
  finish_all();
  std::lock_guard lock(guard);
  pinned.erase(uintptr_t(address));
  free(address);
  return broken();
}

API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  if (control().fail_register) return failed(cudaErrorMemoryAllocation);
  std::lock_guard lock(guard);
  if (pinned.count(uintptr_t(address))) return failed(cudaErrorHostMemoryAlreadyRegistered);
  pinned[uintptr_t(address)] = size;
  control().registered++;
  return broken();
}

API cudaError_t cudaHostUnregister(void* address) {
  finish_all();
  std::lock_guard lock(guard);
  return pinned.erase(uintptr_t(address)) ? broken() : failed(cudaErrorHostMemoryNotRegistered);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* told, const void* address) {
  std::lock_guard lock(guard);
  auto found = block_of(address);
  bool on_device = found != blocks.end();
  bool known = inside(pinned, address, [](size_t size) { return size; }) != pinned.end();
  memset(told, 0, sizeof *told);
  told->type = on_device ? cudaMemoryTypeDevice
                         : known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  told->device = on_device ? found->second.device : current();
  told->devicePointer = on_device || known ? (void*)address : nullptr;
  told->hostPointer = on_device ? nullptr : (void*)address;
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size, nullptr, true);
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                cudaStream_t stream) {
  // both on the device: nothing of the host's is read or written
  return copy(to, from, size, stream, false);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                    cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}

API cudaError_t cudaMemsetAsync(void* to, int byte, size_t size, cudaStream_t stream) {
  char* target = reachable(to);
  enqueue(stream, [=] { memset(target, byte, size); });
  return broken();
}

API cudaError_t cudaMemset(void* to, int byte, size_t size) {
  return cudaMemsetAsync(to, byte, size, nullptr);
}

// -- between processes ---------------------------------------------------------------------------

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  std::lock_guard lock(guard);
  auto found = blocks.find(uintptr_t(address));
  if (found == blocks.end()) return failed(cudaErrorInvalidValue);
  Handle told = {getpid(), found->second.fd, found->second.device, found->second.size};
  memcpy(handle, &told, sizeof told);
  return broken();
}

API cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  Handle told;
  memcpy(&told, &handle, sizeof told);
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", told.pid, told.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  // as the driver has it: another process's memory only
  if (fd < 0 || told.pid == getpid()) return failed(cudaErrorInvalidResourceHandle);
  std::lock_guard lock(guard);
  used[told.device] += told.size;
  control().opened++;
  return mapped(fd, told.size, told.device, address);
}

API cudaError_t cudaIpcCloseMemHandle(void* address) { return cudaFree(address); }
