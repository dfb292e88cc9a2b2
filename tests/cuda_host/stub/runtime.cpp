// Devices, errors and kernels that do nothing.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sstream>
#include <string>

#include "device.h"

namespace {

const size_t PAGE = 4096;
const int MAJOR = 9, MINOR = 0;

Control* mapped() {
  const char* path = getenv("CUDA_HOST_CONTROL");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  auto page = (Control*)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (fd >= 0) return page;
  page->devices = 2;
  page->total_bytes = int64_t(4) << 30;
  page->driver = CUDART_VERSION;
  return page;
}

thread_local int device = 0;
thread_local cudaError_t last = cudaSuccess;
std::atomic<int> lost{0};     // the error of a kernel that failed, for good
std::atomic<bool> known{false};  // whether a call has said so
std::atomic<bool> context{false};

// The numbers of the GPUs that CUDA_VISIBLE_DEVICES names, up to the first that there is not; of all
// without it.
const std::vector<int>& listed() {
  static std::vector<int> numbers = [] {
    int all = control().devices;
    std::vector<int> numbers;
    const char* given = getenv("CUDA_VISIBLE_DEVICES");
    for (int number = 0; !given && number < all; number++) numbers.push_back(number);
    std::stringstream names(given ? given : "");
    for (std::string name; std::getline(names, name, ',');) {
      bool is_uuid = name.rfind("GPU-", 0) == 0;
      if (!is_uuid && (name.empty() || !isdigit(name[0]) || atoi(name.c_str()) >= all)) break;
      numbers.push_back(is_uuid ? int(numbers.size()) : atoi(name.c_str()));
    }
    return numbers;
  }();
  return numbers;
}

int visible() { return int(listed().size()); }

}  // namespace

Control& control() {
  static Control* page = mapped();
  return *page;
}

cudaError_t failed(cudaError_t error) {
  if (error == cudaSuccess) return error;
  last = error;
  if (getenv("CUDA_HOST_LOG")) fprintf(stderr, "stub: error %d\n", int(error));
  return error;
}

cudaError_t broken() { return known ? failed(cudaError_t(lost.load())) : cudaSuccess; }

cudaError_t noticed() {
  if (lost) known = true;
  return broken();
}

// -- errors --------------------------------------------------------------------------------------

API cudaError_t cudaGetLastError() {
  if (last && getenv("CUDA_HOST_LOG")) fprintf(stderr, "stub: cleared %d\n", int(last));
  cudaError_t error = known ? cudaError_t(lost.load()) : last;
  last = cudaSuccess;
  return error;
}

API cudaError_t cudaPeekAtLastError() { return known ? cudaError_t(lost.load()) : last; }

API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorAssert ? "cudaErrorAssert" : "cudaError";
}

API const char* cudaGetErrorString(cudaError_t error) {
  switch (int(error)) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "an error of the stub";
  }
}

int number_of(int device) { return listed().at(device); }

// A function of the library that the stub does not have.
extern "C" __attribute__((visibility("default"))) int stub_missing(const char* name) {
  if (getenv("CUDA_HOST_LOG")) fprintf(stderr, "stub: %s is missing\n", name);
  return failed(cudaErrorNotSupported);
}

API char* stub_reachable(const void* address) { return reachable(address); }
API void stub_enqueue(cudaStream_t stream, void (*op)(void*), void* data) {
  enqueue(stream, [=] { op(data); });
}
API Control* stub_control() { return &control(); }

// -- devices -------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = visible();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* given) {
  *given = device;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int given) {
  if (given < 0 || given >= visible()) return failed(cudaErrorInvalidDevice);
  if (!context && control().refuse_context) return failed(cudaError_t(control().refuse_context.load()));
  context = true;
  device = given;
  return cudaSuccess;  // a failed kernel is not told here: torch's guards call this at their ends
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* told, int) {
  memset(told, 0, sizeof *told);
  strcpy(told->name, "Stub GPU");
  told->totalGlobalMem = control().total_bytes;
  told->sharedMemPerBlock = 48 << 10;
  told->sharedMemPerBlockOptin = told->sharedMemPerMultiprocessor = 227 << 10;
  told->regsPerBlock = told->regsPerMultiprocessor = 65536;
  told->warpSize = 32;
  told->maxThreadsPerBlock = told->maxThreadsDim[0] = told->maxThreadsDim[1] = 1024;
  told->maxThreadsDim[2] = 64;
  told->maxGridSize[0] = 2147483647;
  told->maxGridSize[1] = told->maxGridSize[2] = 65535;
  told->major = MAJOR;
  told->minor = MINOR;
  told->multiProcessorCount = 132;
  told->maxThreadsPerMultiProcessor = 2048;
  told->maxBlocksPerMultiProcessor = 32;
  told->l2CacheSize = 50 << 20;
  told->textureAlignment = 512;
  told->unifiedAddressing = told->concurrentKernels = 1;
  return broken();
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = MINOR; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return broken();
}

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return broken();
}

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return broken(); }

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return broken();
}

API cudaError_t cudaDeviceGetPCIBusId(char* told, int size, int given) {
  snprintf(told, size, "00000000:%02d:00.0", given + 1);
  return broken();
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// CUDA_ERROR_NOT_SUPPORTED, of a function of the driver that the stub does not have.
static int unsupported() { return 801; }

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function) *function = (void*)unsupported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- kernels -------------------------------------------------------------------------------------

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration pushed;

cudaError_t launch(cudaStream_t stream) {
  if (broken()) return broken();
  control().kernels++;
  if (control().fail_after > 0 && --control().fail_after == 0) lost = cudaErrorAssert;
  launched(stream);
  return cudaSuccess;
}

}  // namespace

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                                void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(cudaStream_t*)stream = pushed.stream;
  return cudaSuccess;
}

API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

API cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return __cudaGetKernel(kernel, function);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}

API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launch(config->stream);
}

// For the other libraries: a product of cuBLAS is a kernel like others.
API int stub_launch(cudaStream_t stream) { return launch(stream); }

API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return broken(); }

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* told, const void*) {
  memset(told, 0, sizeof *told);
  told->maxThreadsPerBlock = 1024;
  told->numRegs = 32;
  told->ptxVersion = told->binaryVersion = 10 * MAJOR + MINOR;
  told->maxDynamicSharedSizeBytes = 227 << 10;
  return broken();
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                       size_t, unsigned) {
  *blocks = 2;
  return broken();
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return broken();
}

API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return broken();
}
