// The C++ side of the runtime API: the overloads that nvcc's own header adds to the C functions.
#pragma once
#include <cuda_runtime_api.h>

#include "launch.h"

template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return ::cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
template <class T>
cudaError_t cudaMallocAsync(T** p, size_t bytes, cudaStream_t stream) {
  return ::cudaMallocAsync(reinterpret_cast<void**>(p), bytes, stream);
}
template <class T>
cudaError_t cudaMallocHost(T** p, size_t bytes, unsigned = 0) {
  return ::cudaMallocHost(reinterpret_cast<void**>(p), bytes);
}
template <class T>
cudaError_t cudaMallocManaged(T** p, size_t bytes, unsigned flags = cudaMemAttachGlobal) {
  return ::cudaMallocManaged(reinterpret_cast<void**>(p), bytes, flags);
}

template <class T>
cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
  return ::cudaMemcpyToSymbol(static_cast<const void*>(&symbol), from, bytes, offset, kind);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t bytes,
                                    size_t offset = 0, cudaMemcpyKind kind = cudaMemcpyHostToDevice,
                                    cudaStream_t stream = nullptr) {
  return ::cudaMemcpyToSymbolAsync(static_cast<const void*>(&symbol), from, bytes, offset, kind,
                                   stream);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
  return ::cudaMemcpyFromSymbol(to, static_cast<const void*>(&symbol), bytes, offset, kind);
}
template <class T>
cudaError_t cudaGetSymbolAddress(void** p, const T& symbol) {
  return ::cudaGetSymbolAddress(p, static_cast<const void*>(&symbol));
}

template <class Result, class... P>
cudaError_t cudaFuncSetAttribute(Result (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  return ::cudaFuncSetAttribute(simt::address_of(kernel), attribute, value);
}
template <class Result, class... P>
cudaError_t cudaFuncSetCacheConfig(Result (*)(P...), cudaFuncCache) {
  return cudaSuccess;
}
template <class Result, class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Result (*kernel)(P...)) {
  return ::cudaFuncGetAttributes(attributes, simt::address_of(kernel));
}
template <class Result, class... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Result (*kernel)(P...),
                                                          int threads, size_t dynamic_shared) {
  return ::cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, simt::address_of(kernel), threads,
                                                         dynamic_shared);
}
template <class Result, class... P>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int* grid, int* block, Result (*)(P...), size_t = 0,
                                               int limit = 0) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  *block = limit > 0 && limit < 1024 ? limit : 1024;
  *grid = p.multiProcessorCount * (2048 / *block);
  return cudaSuccess;
}
template <class Result, class... P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Result (*kernel)(P...),
                                           const cudaLaunchConfig_t* config) {
  return ::cudaOccupancyMaxActiveClusters(clusters, simt::address_of(kernel), config);
}
template <class Result, class... P>
cudaError_t cudaOccupancyMaxPotentialClusterSize(int* size, Result (*kernel)(P...),
                                                 const cudaLaunchConfig_t* config) {
  return ::cudaOccupancyMaxPotentialClusterSize(size, simt::address_of(kernel), config);
}

namespace simt {

// cudaLaunchKernelEx(&config, kernel, arguments...): the rewriter adds the site of the call.
struct LaunchKernelEx {
  Site site;
  explicit LaunchKernelEx(const Site& at) : site(at) {}

  template <class... Parameters, class... Arguments>
  cudaError_t operator()(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                         Arguments&&... arguments) const {
    Request request;
    request.site = site;
    request.grid = config->gridDim;
    request.block = config->blockDim;
    request.dynamic_shared = config->dynamicSmemBytes;
    request.kernel = address_of(kernel);
    request.cluster = cluster_of(*config);
    launch_with(request, kernel, static_cast<Parameters>(arguments)...);
    return cudaPeekAtLastError();
  }
};

}  // namespace simt
