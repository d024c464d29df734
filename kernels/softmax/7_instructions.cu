// 7_instructions.cu: the row in registers again, with half the instructions a value
// Before : rung 5 spends 25 instructions on a 16-bit value; a long row waits for them, not for memory
// Idea   : 2^x without the detour for denormals; 16-bit values are widened and rounded two at a time;
//          what lies past the row's end is -inf from the start, so nothing tests for it later; the
//          warp joins its largest values first, and then has one exponential to correct, not five
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 16384 (float64: 8192), pointers on 16 bytes
// Result : not measured yet
// Try    : fast_exp → __expf; count the instructions, predict the time

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

constexpr int MAX_BLOCK = 512;  // two blocks an SM: one loads while the other one computes

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int VALUES = 128 / sizeof(Wide<T>);  // a thread keeps: 32 registers' worth

template <typename T>
constexpr int N = 16 / sizeof(T);  // values in a pack of 16 bytes

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

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

// What is in 16 bytes. The high half of a float is a bfloat16: a shift or a mask, no conversion.
template <typename T, typename W>
__device__ void unpack(int4 pack, W* value) {
  if constexpr (sizeof(T) > 2) {
    memcpy(value, &pack, 16);
  } else {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        value[2 * k] = __uint_as_float(bits[k] << 16);
        value[2 * k + 1] = __uint_as_float(bits[k] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&bits[k]));
        value[2 * k] = pair.x;
        value[2 * k + 1] = pair.y;
      }
    }
  }
}

// The other way: two values are rounded by one instruction.
template <typename T, typename W>
__device__ int4 pack(const W* value) {
  int4 pack;
  if constexpr (sizeof(T) > 2) {
    memcpy(&pack, value, 16);
  } else {
    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (std::is_same_v<T, __half>) {
        pair[k] = __floats2half2_rn(value[2 * k], value[2 * k + 1]);
      } else {
        pair[k] = __floats2bfloat162_rn(value[2 * k], value[2 * k + 1]);
      }
    }
    memcpy(&pack, pair, 16);
  }
  return pack;
}

template <typename W>
__device__ W largest_of_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value = fmax(value, __shfl_xor_sync(~0u, value, d));
  return value;
}

template <typename W>
__device__ W sum_of_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK, 2) softmax_kernel(const T* x, T* out, int packs) {
  using W = Wide<T>;
  constexpr int PACKS = VALUES<T> / N<T>;  // that a thread keeps; the row has `packs`
  __shared__ Part<W> found[MAX_BLOCK / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  // A warp takes PACKS · 32 packs side by side, a thread every 32nd: the distances are constants.
  const int first = warp * PACKS * 32 + lane, left = packs - first;
  const auto* in = reinterpret_cast<const int4*>(x) + int64_t{blockIdx.x} * packs + first;
  auto* result = reinterpret_cast<int4*>(out) + int64_t{blockIdx.x} * packs + first;

  W outside[N<T>];
#pragma unroll
  for (int k = 0; k < N<T>; ++k) outside[k] = -INFINITY;
  int4 bits[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    bits[p] = pack<T>(outside);
    if (p * 32 < left) bits[p] = __ldcg(in + p * 32);
  }
  W value[VALUES<T>];
  Part<W> part = {LOWEST<W>, 0};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) unpack<T>(bits[p], value + p * N<T>);
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) part.largest = fmax(part.largest, value[k]);
  const W own = part.largest = largest_of_warp(part.largest);
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) part.sum += value[k] = fast_exp(value[k] - own);
  part.sum = sum_of_warp(part.sum);

  if (lane == 0) found[warp] = part;
  __syncthreads();
  part = lane < warps ? found[lane] : Part<W>{LOWEST<W>, 0};
  const W largest = largest_of_warp(part.largest);
  const W sum = sum_of_warp(part.sum * fast_exp(part.largest - largest));
  const W scale = fast_exp(own - largest) / sum;

#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) value[k] *= scale;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (p * 32 < left) result[p * 32] = pack<T>(value + p * N<T>);
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
