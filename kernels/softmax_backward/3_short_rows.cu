// 3_short_rows.cu: several short rows a warp
// Before : rung 2 gives a row of 64 values a block of its own, and half of its lanes no value
// Idea   : as many lanes as the row has packs of 16 bytes, up to a warp, share a row, and add up by
//          shuffles among themselves: no shared memory, no barrier. A row of any length and
//          alignment is up to 15 single values, packs, and up to 15 singles again
// Cost   : 3·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) ≤ 1024, any alignment
// Result : not measured yet
// Try    : BLOCK 256 → 32; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;
constexpr int SHORT = 1, LONG = 2;  // packs of each tensor that a thread keeps

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

// A block is blockDim.x lanes along a row, a power of two up to 32, times blockDim.y rows.
template <typename T, int PACKS>
__global__ void __launch_bounds__(BLOCK)
    softmax_backward_kernel(const T* grad, const T* out, T* dx, int64_t rows, int cols) {
  using W = Wide<T>;
  const int t = threadIdx.x, lanes = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int length = row < rows ? cols : 0;  // past the end: join, do no more
  grad += row * cols;
  out += row * cols;
  dx += row * cols;
  // A row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const auto place = reinterpret_cast<uintptr_t>(grad) % 16;
  const int before = (16 - place) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;
  const bool alike = reinterpret_cast<uintptr_t>(out) % 16 == place &&
                     reinterpret_cast<uintptr_t>(dx) % 16 == place;

  Pack<T> g[PACKS] = {}, y[PACKS] = {};  // zeros past the row's end
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * lanes + t;
    if (i >= packs) continue;
    g[p] = reinterpret_cast<const Pack<T>*>(grad + head)[i];
    if (alike) {
      y[p] = reinterpret_cast<const Pack<T>*>(out + head)[i];
    } else {  // the three tensors lie differently between the boundaries
#pragma unroll
      for (int k = 0; k < N<T>; ++k) y[p].at[k] = out[head + i * N<T> + k];
    }
  }
  const W g_rest = t < singles ? static_cast<W>(grad[single]) : 0;
  const W y_rest = t < singles ? static_cast<W>(out[single]) : 0;
  W dot = g_rest * y_rest;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int k = 0; k < N<T>; ++k) dot += static_cast<W>(g[p].at[k]) * static_cast<W>(y[p].at[k]);
  }
  for (int d = lanes / 2; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);

  if (t < singles) dx[single] = static_cast<T>(y_rest * (g_rest - dot));
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * lanes + t;
    if (i >= packs) continue;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) {
      const W value = static_cast<W>(y[p].at[k]) * (static_cast<W>(g[p].at[k]) - dot);
      g[p].at[k] = static_cast<T>(value);
    }
    if (alike) {
      reinterpret_cast<Pack<T>*>(dx + head)[i] = g[p];
    } else {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) dx[head + i * N<T> + k] = g[p].at[k];
    }
  }
}

template <typename T>
cudaError_t launch(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  if (cols > 32 * LONG * N<T>) return cudaErrorInvalidValue;
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(grad) % 16 != 0;
  int lanes = odd ? 2 * N<T> : 1;  // enough for the singles of head and tail
  while (lanes < 32 && lanes * SHORT * N<T> < cols) lanes *= 2;
  const dim3 block(lanes, BLOCK / lanes);
  const int64_t grid = (rows + block.y - 1) / block.y;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  const bool is_short = cols <= 32 * SHORT * N<T>;
  const auto kernel =
      is_short ? softmax_backward_kernel<T, SHORT> : softmax_backward_kernel<T, LONG>;
  kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(grad, out, dx, rows,
                                                            static_cast<int>(cols));
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
