// libnvidia-ml: the GPUs of this host, whatever CUDA_VISIBLE_DEVICES says.
#include <dlfcn.h>

#include <cstring>

#include "control.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

const int SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3;

// That of the runtime's stub, if this process has it.
Control* shared() {
  static auto told = (Control * (*)()) dlsym(RTLD_DEFAULT, "stub_control");
  return told ? told() : nullptr;
}

}  // namespace

API int nvmlInit_v2() { return SUCCESS; }
API int nvmlInitWithFlags(unsigned) { return SUCCESS; }
API int nvmlShutdown() { return SUCCESS; }
API const char* nvmlErrorString(int) { return "an error of the stub"; }

API int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = shared() ? shared()->devices.load() : 0;
  return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = (void*)(uintptr_t)(index + 1);
  return shared() && index < shared()->devices.load() ? SUCCESS : INVALID_ARGUMENT;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** handle) {
  *handle = (void*)1;
  return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}

API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NOT_SUPPORTED; }

API int nvmlDeviceGetName(void*, char* name, unsigned size) {
  strncpy(name, "Stub GPU", size);
  return SUCCESS;
}

API int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = shared() ? shared()->driver.load() : 0;
  return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return SUCCESS;
}

API int nvmlDeviceGetUUID(void* handle, char* uuid, unsigned size) {
  strncpy(uuid, handle == (void*)1 ? "GPU-a1" : "GPU-b2", size);
  return SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(void*, unsigned*) { return NOT_SUPPORTED; }
