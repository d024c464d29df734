// 4_warp_shuffle.cu: registers instead of shared memory
// Before : rung 3 goes through shared memory and a barrier for each of its 8 steps
// Idea   : the 32 threads of a warp hand each other their registers: 5 shuffles, then one barrier
// Cost   : n·sizeof(T) bytes read, so bound by memory      Legal: the whole tensor, 0 < n < 2^39
// Result : 0.13 of read, 244.10x rung 1, 0.13x eager  (H200, float32 (268435456,) contiguous dim=None)
// Note   : as fast as rung 3, for the same reason
// Try    : BLOCK 256 → 1024; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int BLOCK = 256;

template <typename T>
struct Accumulator {
  using type = float;  // 16-bit types are stored, never added up in
};
template <>
struct Accumulator<double> {
  using type = double;
};

// The sum of v over the block, in thread 0. Within a warp, registers are exchanged directly.
template <typename A>
__device__ A block_sum(A v) {
  __shared__ A warps[BLOCK / 32];
  for (int step = 16; step > 0; step /= 2) v += __shfl_down_sync(0xffffffff, v, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < BLOCK / 32; ++w) v += warps[w];
  }
  return v;
}

template <typename T>
__global__ void sum_kernel(const T* x, double* total, int64_t n) {
  using A = typename Accumulator<T>::type;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  const A sum = block_sum(i < n ? static_cast<A>(x[i]) : A(0));
  if (threadIdx.x == 0) atomicAdd(total, static_cast<double>(sum));
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
