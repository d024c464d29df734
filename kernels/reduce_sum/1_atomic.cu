// 1_atomic.cu: every thread adds its element to one total
// Before : a loop over all elements, on one thread
// Idea   : as many threads as elements; an atomic addition lets no two of them collide
// Cost   : n·sizeof(T) bytes read, so bound by memory      Legal: the whole tensor, 0 < n < 2^39
// Result : 0.00 of read, 0.00x eager  (H200, float32 (268435456,) contiguous dim=None, CUDA 13.0)
// Try    : run it twice on the same float32 input: are the totals the same to the last bit?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int BLOCK = 256;

// All additions go to one address, so they happen one after another, in an order that nobody knows.
template <typename T>
__global__ void sum_kernel(const T* x, double* total, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i < n) atomicAdd(total, static_cast<double>(x[i]));
}

template <typename T>
__global__ void finish_kernel(const double* total, T* out) {
  *out = static_cast<T>(*total);
}

// Bytes of workspace: here one total, which starts at 0. It is a double: a float total stands still
// after 2^24 additions of about the same size, because 16777216.0f + 1.0f is 16777216.0f.
extern "C" int64_t reduce_sum_workspace(int64_t, int64_t, int64_t) { return sizeof(double); }

// x has the shape (outer, n, inner), and n is summed over.
template <typename T>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t outer, int64_t n, int64_t inner,
                   cudaStream_t stream) {
  if (outer != 1 || inner != 1) return cudaErrorNotSupported;
  auto* total = static_cast<double*>(workspace);
  const cudaError_t error = cudaMemsetAsync(total, 0, sizeof(*total), stream);
  if (error != cudaSuccess) return error;
  const auto grid = static_cast<unsigned>((n + BLOCK - 1) / BLOCK);
  sum_kernel<<<grid, BLOCK, 0, stream>>>(x, total, n);
  finish_kernel<<<1, 1, 0, stream>>>(total, out);
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T)                                                                  \
  extern "C" cudaError_t reduce_sum_launch_##SUFFIX(const T* x, T* out, void* workspace,     \
                                                    int64_t outer, int64_t n, int64_t inner, \
                                                    cudaStream_t stream) {                   \
    return launch(x, out, workspace, outer, n, inner, stream);                               \
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
