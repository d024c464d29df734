// 5_registers.cu: the row stays in registers between the passes
// Before : rung 4 reads a row twice, 2 or 4 bytes a load
// Idea   : a thread loads up to 32 values in packs of 16 bytes, exponentiates them against its own
//          largest, and scales them once the block knows largest and sum: one read, one write
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 32768 (float64: 16384), pointers on 16 bytes
// Result : 0.98 of copy, 13.53x rung 1, 1.61x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : VALUES 32 → 8: more threads a row, fewer loads in flight each; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int VALUES = 128 / sizeof(Wide<T>);  // a thread keeps: 32 registers' worth

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

// The special function unit computes 2^x to 2 ulp; exp(float) spends ten instructions more.
__device__ float fast_exp(float x) { return __expf(x); }
__device__ double fast_exp(double x) { return exp(x); }

template <typename W>
__device__ Part<W> join_warp(Part<W> a) {
  for (int d = 16; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.largest, d), __shfl_xor_sync(~0u, a.sum, d)};
    const W largest = fmax(a.largest, b.largest);
    a.sum = a.sum * fast_exp(a.largest - largest) + b.sum * fast_exp(b.largest - largest);
    a.largest = largest;
  }
  return a;
}

template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK) softmax_kernel(const T* x, T* out, int packs) {
  using W = Wide<T>;
  constexpr int PACKS = VALUES<T> / N<T>;  // that a thread keeps; the row has `packs`
  __shared__ Part<W> found[MAX_BLOCK / 32];
  const int t = threadIdx.x, lane = t % 32, warps = blockDim.x / 32;
  const auto* in = reinterpret_cast<const Pack<T>*>(x) + int64_t{blockIdx.x} * packs;
  auto* result = reinterpret_cast<Pack<T>*>(out) + int64_t{blockIdx.x} * packs;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) pack[p] = in[i];
  }
  W value[VALUES<T>];
  Part<W> part = {LOWEST<W>, 0};
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * static_cast<int>(blockDim.x) + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : -INFINITY;
    part.largest = fmax(part.largest, value[k]);
  }
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    value[k] = fast_exp(value[k] - part.largest);
    part.sum += value[k];
  }

  const W own = part.largest;
  part = join_warp(part);
  if (lane == 0) found[t / 32] = part;
  __syncthreads();
  part = join_warp(lane < warps ? found[lane] : Part<W>{LOWEST<W>, 0});
  const W scale = fast_exp(own - part.largest) / part.sum;

#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (i < packs) result[i] = pack[p];
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
  if (bits % 16 != 0 || cols % N<T> != 0 || cols > MAX_BLOCK * VALUES<T> || rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int warps = static_cast<int>((cols + 32 * VALUES<T> - 1) / (32 * VALUES<T>));
  softmax_kernel<<<static_cast<unsigned>(rows), 32 * warps, 0, stream>>>(
      x, out, static_cast<int>(cols / N<T>));
  return cudaGetLastError();
}

extern "C" cudaError_t softmax_launch_f32(const float* x, float* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f64(const double* x, double* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f16(const __half* x, __half* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, int64_t rows,
                                           int64_t cols, cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
