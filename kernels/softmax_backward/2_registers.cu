// 2_registers.cu: both rows stay in registers between the sum and its use
// Before : rung 1 reads grad and out twice, 2 or 4 bytes a load
// Idea   : a thread loads 16 values of each, in packs of 16 bytes, and keeps them
// Cost   : 3·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 16384 (float64: 8192), pointers on 16 bytes,
//          rows < 2^31
// Result : 1.02 of copy, 1.30x rung 1, 2.02x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : MAX_BLOCK 1024 → 512 and 16 → 32 values; look at the spills; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
constexpr int PACKS = 64 / sizeof(Wide<T>) / N<T>;  // 16 registers' worth of values, a tensor

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK)
    softmax_backward_kernel(const T* grad, const T* out, T* dx, int packs) {
  using W = Wide<T>;
  __shared__ W found[MAX_BLOCK / 32];
  const int t = threadIdx.x, lane = t % 32, warps = blockDim.x / 32;
  const int64_t first = int64_t{blockIdx.x} * packs;
  const auto* g_row = reinterpret_cast<const Pack<T>*>(grad) + first;
  const auto* y_row = reinterpret_cast<const Pack<T>*>(out) + first;
  auto* dx_row = reinterpret_cast<Pack<T>*>(dx) + first;

  Pack<T> g[PACKS<T>], y[PACKS<T>];
#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) {
      g[p] = g_row[i];
      y[p] = y_row[i];
    }
  }
  W dot = 0;
#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    if (p * static_cast<int>(blockDim.x) + t < packs) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) dot += static_cast<W>(g[p].at[k]) * static_cast<W>(y[p].at[k]);
    }
  }
  for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
  if (lane == 0) found[t / 32] = dot;
  __syncthreads();
  dot = lane < warps ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);

#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        const W value = static_cast<W>(y[p].at[k]) * (static_cast<W>(g[p].at[k]) - dot);
        g[p].at[k] = static_cast<T>(value);
      }
      dx_row[i] = g[p];
    }
  }
}

template <typename T>
cudaError_t launch(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(out) |
                    reinterpret_cast<uintptr_t>(dx);
  const int64_t packs = cols / N<T>;
  if (bits % 16 != 0 || cols % N<T> != 0 || packs > MAX_BLOCK * PACKS<T> || rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int warps = static_cast<int>((packs + 32 * PACKS<T> - 1) / (32 * PACKS<T>));
  softmax_backward_kernel<<<static_cast<unsigned>(rows), 32 * warps, 0, stream>>>(
      grad, out, dx, static_cast<int>(packs));
  return cudaGetLastError();
}

extern "C" cudaError_t softmax_backward_launch_f32(const float* grad, const float* out, float* dx,
                                                   int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_f64(const double* grad, const double* out,
                                                   double* dx, int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_f16(const __half* grad, const __half* out,
                                                   __half* dx, int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_bf16(const __nv_bfloat16* grad,
                                                    const __nv_bfloat16* out, __nv_bfloat16* dx,
                                                    int64_t rows, int64_t cols,
                                                    cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
