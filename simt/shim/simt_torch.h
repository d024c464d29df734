// What a binding sees of torch's CUDA side when it is compiled for the CPU machine. The headers in
// this folder have the names of torch's own (c10/cuda/CUDAGuard.h, ...) and all lead here, so the
// source of a binding is the same for both. There is one device, and one stream.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

// A tensor is "on the device" when it is where the CPU machine can reach it. The headers that
// define these words have all been read by now.
#define is_cuda is_cpu
#define kCUDA kCPU

namespace c10::cuda {

inline DeviceIndex current_device() { return 0; }
inline DeviceIndex device_count() { return 1; }
inline void set_device(DeviceIndex) {}
inline void device_synchronize() {}

class CUDAStream {
 public:
  operator cudaStream_t() const { return nullptr; }
  cudaStream_t stream() const { return nullptr; }
  void synchronize() const {}
  bool query() const { return true; }
  DeviceIndex device_index() const { return 0; }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex = -1) { return {}; }
inline CUDAStream getDefaultCUDAStream(DeviceIndex = -1) { return {}; }
inline CUDAStream getStreamFromPool(bool = false, DeviceIndex = -1) { return {}; }

struct CUDAGuard {
  explicit CUDAGuard(Device) {}
  explicit CUDAGuard(DeviceIndex) {}
};

struct OptionalCUDAGuard {
  OptionalCUDAGuard() = default;
  explicit OptionalCUDAGuard(std::optional<Device>) {}
  explicit OptionalCUDAGuard(std::optional<DeviceIndex>) {}
};

struct CUDAStreamGuard {
  explicit CUDAStreamGuard(CUDAStream) {}
};

}  // namespace c10::cuda

namespace at::cuda {

using namespace c10::cuda;

inline cudaDeviceProp* getDeviceProperties(DeviceIndex = 0) {
  static cudaDeviceProp properties = [] {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    return p;
  }();
  return &properties;
}
inline cudaDeviceProp* getCurrentDeviceProperties() { return getDeviceProperties(); }
inline bool is_available() { return true; }
inline int warp_size() { return 32; }

}  // namespace at::cuda

#define C10_CUDA_CHECK(call)                                                                \
  do {                                                                                      \
    const cudaError_t simt_error = (call);                                                  \
    TORCH_CHECK(simt_error == cudaSuccess, "CUDA error: ", cudaGetErrorString(simt_error)); \
  } while (0)
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
