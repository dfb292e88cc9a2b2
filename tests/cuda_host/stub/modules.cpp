// Compiled kernels: modules have every function, and a launch is a kernel like others.
#include <cuda.h>

#include "device.h"

namespace {
int something;  // of which handles are the address
}

API CUresult cuModuleLoad(CUmodule* module, const char*) {
  *module = (CUmodule)&something;
  return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule* module, const void*) { return cuModuleLoad(module, nullptr); }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = (CUfunction)&something;
  return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

API CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = (CUcontext)&something;
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, CUstream stream, void**, void**) {
  if (broken()) return CUDA_ERROR_ASSERT;
  control().compiled++;
  launched(stream);
  return CUDA_SUCCESS;
}
