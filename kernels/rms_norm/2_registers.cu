// 2_registers.cu: 16 bytes a load, and the row stays in registers
// Before : rung 1 reads a row twice, 2 or 4 bytes an instruction
// Idea   : a thread has four packs of 16 bytes, and a row as many warps as that takes
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, up to 65536; pointers on 16 bytes
// Result : 0.97 of copy, 1.12x rung 1, 1.38x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : PACKS 4 → 8 with MAX_BLOCK 1024 → 512; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;
constexpr int PACKS = 4;  // of a row, a thread

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {
  T at[N<T>];
};

// The 16 bits of a bfloat16 are the high half of a float: one shift or mask a value, where the cast
// takes two instructions.
template <typename T, typename W>
__device__ void widen(Pack<T> pack, W (&value)[N<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
    for (int k = 0; k < 8; ++k) {
      value[k] = __uint_as_float(k % 2 == 0 ? bits[k / 2] << 16 : bits[k / 2] & 0xffff0000u);
    }
  } else {
    for (int k = 0; k < N<T>; ++k) value[k] = static_cast<W>(pack.at[k]);
  }
}

template <typename T, typename W>
__device__ void add_up_squares(Pack<T> pack, W& sum) {
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += value[k] * value[k];
}

template <typename T, typename W>
__device__ Pack<T> normalize(Pack<T> pack, W rstd, Pack<T> weight) {
  W value[N<T>], w[N<T>];
  widen(pack, value);
  widen(weight, w);
  for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k] * rstd * w[k]);
  return pack;
}

template <typename W>
__device__ W sum_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rms_norm_kernel(const T* x, const T* weight, T* out, W* rstd_out, int cols, W eps) {
  __shared__ W found[MAX_BLOCK / 32];
  const int t = threadIdx.x, threads = blockDim.x, lane = t % 32, packs = cols / N<T>;
  const int64_t first = int64_t{blockIdx.x} * cols;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x + first)[i];
  }
  W sum = 0;
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t < packs) add_up_squares(pack[p], sum);
  }
  sum = sum_warp(sum);
  if (lane == 0) found[t / 32] = sum;
  __syncthreads();
  sum = sum_warp(lane < threads / 32 ? found[lane] : 0);
  const W rstd = rsqrt(sum / cols + eps);

  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i >= packs) continue;
    const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[i];
    reinterpret_cast<Pack<T>*>(out + first)[i] = normalize(pack[p], rstd, w);
  }
  if (t == 0) rstd_out[blockIdx.x] = rstd;  // the gradient needs it
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double eps, cudaStream_t stream) {
  const auto bits = static_cast<uintptr_t>(cols % N<T> * sizeof(T)) |
                    reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) |
                    reinterpret_cast<uintptr_t>(out);
  if (bits % 16 != 0 || cols > MAX_BLOCK * PACKS * N<T> || rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int warps = static_cast<int>((cols + 32 * PACKS * N<T> - 1) / (32 * PACKS * N<T>));
  rms_norm_kernel<<<static_cast<unsigned>(rows), 32 * warps, 0, stream>>>(
      x, weight, out, rstd, static_cast<int>(cols), static_cast<W>(eps));
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                  \
  extern "C" cudaError_t rms_norm_launch_##SUFFIX(const T* x, const T* weight, T* out, W* rstd, \
                                                  int64_t rows, int64_t cols, double eps,       \
                                                  cudaStream_t stream) {                        \
    return launch(x, weight, out, rstd, rows, cols, eps, stream);                               \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
