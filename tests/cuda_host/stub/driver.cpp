// libcuda: what torch asks of the driver itself, beside the runtime.
#include <cuda.h>

#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

API CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

// Any pointer that is not null: torch asks whether the device has a context.
API CUresult cuCtxGetCurrent(CUcontext* context) {
  static int one;
  *context = (CUcontext)&one;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stub driver";
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr) {
  memset(data, 0, sizeof(unsigned));
  return CUDA_SUCCESS;
}

// Of modules.cpp, in the library that is loaded before this one.
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                              void** extra) {
  return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, config->hStream, arguments, extra);
}
