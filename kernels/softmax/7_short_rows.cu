// 7_short_rows.cu: several short rows a warp
// Before : rung 5 gives a row of 64 values a block of its own, and half of its lanes no value
// Idea   : as many lanes as the row has packs of 16 bytes, up to a warp, share a row; they join by
//          shuffles among themselves, with no shared memory and no barrier. A row of any length
//          and alignment is up to 15 single values, packs, and up to 15 singles again
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols ≤ 512 (float64: 256), any alignment
// Result : not measured yet
// Try    : SHORT 8 → 16 for rows of 256 values; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;
constexpr int SHORT = 8, LONG = 16;  // registers that hold values of the row, a thread

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

// e^x to 22 bits; __expf takes three instructions more, to be right for denormals as well.
#ifdef __SIMT_CPU__
__device__ float fast_exp(float x) { return expf(x); }
#else
__device__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
#endif
__device__ double fast_exp(double x) { return exp(x); }

// A block is blockDim.x lanes along a row, a power of two up to 32, times blockDim.y rows.
template <typename T, int REGISTERS>
__global__ void __launch_bounds__(BLOCK)
    softmax_kernel(const T* x, T* out, int64_t rows, int cols) {
  using W = Wide<T>;
  constexpr int VALUES = REGISTERS * 4 / sizeof(W), PACKS = VALUES / N<T>;
  const int t = threadIdx.x, lanes = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int length = row < rows ? cols : 0;  // past the end: join, do no more
  x += row * cols;
  out += row * cols;
  // The row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * lanes + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x + head)[i];
  }
  W rest = -INFINITY, value[VALUES];
  if (t < singles) rest = static_cast<W>(x[single]);
  W largest = rest;  // of nothing but -inf, the row becomes NaN, as in PyTorch
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * lanes + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : -INFINITY;
    largest = fmax(largest, value[k]);
  }
  for (int d = lanes / 2; d > 0; d /= 2) {
    largest = fmax(largest, __shfl_xor_sync(~0u, largest, d));
  }
  W sum = rest = fast_exp(rest - largest);
#pragma unroll
  for (int k = 0; k < VALUES; ++k) sum += value[k] = fast_exp(value[k] - largest);
  for (int d = lanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  const W scale = 1 / sum;

  if (t < singles) out[single] = static_cast<T>(rest * scale);
  const bool aligned = reinterpret_cast<uintptr_t>(out + head) % 16 == 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * lanes + t;
    if (i >= packs) continue;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (aligned) {
      reinterpret_cast<Pack<T>*>(out + head)[i] = pack[p];
    } else {  // x and out lie differently between the boundaries
#pragma unroll
      for (int k = 0; k < N<T>; ++k) out[head + i * N<T> + k] = pack[p].at[k];
    }
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(Wide<T>);
  if (cols > 32 * LONG * 4 / static_cast<int>(sizeof(Wide<T>))) return cudaErrorInvalidValue;
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0;
  int lanes = odd ? 2 * N<T> : 1;  // enough for the singles of head and tail
  while (lanes < 32 && lanes * SHORT_VALUES < cols) lanes *= 2;
  const dim3 block(lanes, BLOCK / lanes);
  const int64_t grid = (rows + block.y - 1) / block.y;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  const bool is_short = cols <= 32 * SHORT_VALUES;
  const auto kernel = is_short ? softmax_kernel<T, SHORT> : softmax_kernel<T, LONG>;
  kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, out, rows, static_cast<int>(cols));
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
