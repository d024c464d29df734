// The CUDA runtime API, as far as launchers and bindings use it: real names, declared by the real
// header, but these are the definitions inside this library. Nothing of libcudart is needed.
#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "attributes.h"
#include "fault.h"
#include "memory.h"

namespace simt {

namespace {

constexpr int kMultiprocessors = 8;  // few, so that persistent kernels start few blocks
constexpr size_t kSharedPerMultiprocessor = 228 << 10;

struct ErrorText {
  cudaError_t code;
  const char *name, *text;
};

const ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorInvalidClusterSize, "cudaErrorInvalidClusterSize",
     "misconfigured thread block cluster"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

__thread cudaError_t last_error = cudaSuccess;

struct LastMessage {
  std::mutex mutex;
  cudaError_t code = cudaSuccess;
  std::string text;       // what the machine says
  std::string with_name;  // CUDA's text for the code, then ours
  bool interrupted = false;
};

LastMessage& last_message() {
  static auto* message = new LastMessage;
  return *message;
}

const char* text_of(cudaError_t code) {
  for (const ErrorText& e : kErrors) {
    if (e.code == code) return e.text;
  }
  return "an error that the CPU machine has no text for";
}

struct Attributes {
  std::mutex mutex;
  std::map<const void*, int> dynamic_shared;
  std::map<const void*, bool> big_clusters;
};

Attributes& attributes() {
  static auto* a = new Attributes;
  return *a;
}

double now_in_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

}  // namespace

void set_last_error(cudaError_t code, const std::string& message) {
  last_error = code;
  LastMessage& last = last_message();
  std::lock_guard<std::mutex> guard(last.mutex);
  last.code = code;
  last.text = message;
  last.with_name = std::string(text_of(code)) + "\n" + message;
}

void forget_last_message() {
  LastMessage& last = last_message();
  std::lock_guard<std::mutex> guard(last.mutex);
  last.code = cudaSuccess;
  last.text.clear();
  last.interrupted = false;
}

void set_interrupted() { last_message().interrupted = true; }

size_t dynamic_shared_limit(const void* kernel) {
  std::lock_guard<std::mutex> guard(attributes().mutex);
  auto found = attributes().dynamic_shared.find(kernel);
  return kernel == nullptr || found == attributes().dynamic_shared.end()
             ? 0
             : static_cast<size_t>(found->second);
}

unsigned largest_cluster(const void* kernel) {
  std::lock_guard<std::mutex> guard(attributes().mutex);
  return kernel != nullptr && attributes().big_clusters[kernel] ? 16 : 8;
}

}  // namespace simt

using simt::last_error;

extern "C" {

// ---- for Python, which reaches the library it has loaded through ctypes ----

__attribute__((visibility("default"))) void simt_call_starts() {
  last_error = cudaSuccess;
  simt::forget_last_message();
}

// The fault of the last launch, or null: also when the binding has not looked at the error.
__attribute__((visibility("default"))) const char* simt_fault() {
  const auto& last = simt::last_message();
  return last.code == cudaSuccess ? nullptr : last.text.c_str();
}

__attribute__((visibility("default"))) int simt_interrupted() {
  return simt::last_message().interrupted;
}

// ---- errors ----

cudaError_t cudaGetLastError() {
  const cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t code) {
  for (const simt::ErrorText& e : simt::kErrors) {
    if (e.code == code) return e.name;
  }
  return "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t code) {
  const auto& last = simt::last_message();
  if (code != cudaSuccess && code == last.code) return last.with_name.c_str();
  return simt::text_of(code);
}

// ---- devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : last_error = cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return last_error = cudaErrorInvalidDevice;
  memset(static_cast<void*>(p), 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "the CPU machine");
  p->major = 9;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = simt::kDynamicSharedDefault;
  p->sharedMemPerBlockOptin = simt::kDynamicSharedMax;
  p->sharedMemPerMultiprocessor = simt::kSharedPerMultiprocessor;
  p->reservedSharedMemPerBlock = simt::kSharedReserved;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->multiProcessorCount = simt::kMultiprocessors;
  p->l2CacheSize = 50 << 20;
  p->totalGlobalMem = size_t{8} << 30;
  p->totalConstMem = 64 << 10;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaGetDeviceProperties(&p, device) != cudaSuccess) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = simt::kDynamicSharedDefault; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = simt::kDynamicSharedMax; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = simt::kSharedPerMultiprocessor;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = simt::kSharedReserved; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClusterLaunch: *value = 1; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    default: return last_error = cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

// ---- memory ----

cudaError_t cudaMalloc(void** p, size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes ? bytes : 1)) {
    return last_error = cudaErrorMemoryAllocation;
  }
  memset(memory, 0xFF, bytes);  // not a number in every floating-point type
  simt::memory_appeared(memory, bytes, "cudaMalloc");
  *p = memory;
  return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
  simt::memory_vanished(p);
  free(p);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMallocManaged(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind) {
  for (size_t row = 0; row < height; row++) {
    memmove(static_cast<char*>(to) + row * to_pitch,
            static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}

cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  memset(p, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(p, value, bytes);
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                               cudaMemcpyKind) {
  memcpy(static_cast<char*>(const_cast<void*>(symbol)) + offset, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t bytes,
                                    size_t offset, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}

cudaError_t cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                                 cudaMemcpyKind) {
  memcpy(to, static_cast<const char*>(symbol) + offset, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  *p = const_cast<void*>(symbol);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  *available = *total = size_t{8} << 30;
  return cudaSuccess;
}

// ---- streams and events: everything has happened by the time a call returns ----

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(new double(0));
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = simt::now_in_ms();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = static_cast<float>(*reinterpret_cast<double*>(to) - *reinterpret_cast<double*>(from));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return cudaSuccess;
}

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  auto& a = simt::attributes();
  std::lock_guard<std::mutex> guard(a.mutex);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || static_cast<size_t>(value) > simt::kDynamicSharedMax) {
      return last_error = cudaErrorInvalidValue;
    }
    a.dynamic_shared[kernel] = value;
  } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    a.big_clusters[kernel] = value != 0;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  memset(static_cast<void*>(attributes), 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(std::max(simt::kDynamicSharedDefault, simt::dynamic_shared_limit(kernel)));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          size_t dynamic_shared) {
  // Registers are not known here, and static shared memory is not counted.
  if (threads <= 0 || threads > 1024) return last_error = cudaErrorInvalidValue;
  const int by_threads = std::min(32, 2048 / ((threads + 31) / 32 * 32));
  const auto by_shared =
      static_cast<int>(simt::kSharedPerMultiprocessor / (dynamic_shared + simt::kSharedReserved));
  *blocks = std::min(by_threads, by_shared);
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel,
                                                                   int threads, size_t shared,
                                                                   unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  const dim3 c = simt::cluster_of(*config), b = config->blockDim;
  const unsigned size = c.x * c.y * c.z;
  if (size == 0 || size > simt::largest_cluster(kernel)) {
    return last_error = cudaErrorInvalidClusterSize;
  }
  int blocks = 0;
  const auto threads = static_cast<int>(b.x * b.y * b.z);
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads,
                                                                          config->dynamicSmemBytes);
  *clusters = simt::kMultiprocessors * blocks / static_cast<int>(size);
  return error;
}

cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, const void* kernel,
                                                 const cudaLaunchConfig_t*) {
  *size = static_cast<int>(simt::largest_cluster(kernel));
  return cudaSuccess;
}

}  // extern "C"
