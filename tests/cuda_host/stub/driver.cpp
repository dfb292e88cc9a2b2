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

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
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
