// 2_registers.cu: 16 bytes a load, and the row stays in registers
// Before : rung 1 reads a row twice, 2 or 4 bytes an instruction
// Idea   : as many warps as the row needs, each thread with up to 32 values in packs of 16 bytes
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 16384 (float64: 8192), pointers on 16 bytes
// Result : 0.97 of copy, 1.14x rung 1, 1.37x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : 32 values a thread → 8; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 512;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
constexpr int PACKS = 128 / sizeof(Wide<T>) / N<T>;  // a thread keeps: 32 registers' worth

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rms_norm_kernel(const T* x, const T* weight, T* out, W* rstd_out, int cols, W eps) {
  __shared__ W found[MAX_BLOCK / 32];
  const int packs = cols / N<T>, t = threadIdx.x, lane = t % 32, warps = blockDim.x / 32;
  const int64_t first = int64_t{blockIdx.x} * packs;

  Pack<T> pack[PACKS<T>];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x)[first + i];
  }
  W sum = 0;
#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    if (p * static_cast<int>(blockDim.x) + t < packs) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        sum += static_cast<W>(pack[p].at[k]) * static_cast<W>(pack[p].at[k]);
      }
    }
  }
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) found[t / 32] = sum;
  __syncthreads();
  sum = lane < warps ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  const W rstd = 1 / sqrt(sum / cols + eps);

#pragma unroll
  for (int p = 0; p < PACKS<T>; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) {
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[i];
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        pack[p].at[k] =
            static_cast<T>(static_cast<W>(pack[p].at[k]) * rstd * static_cast<W>(w.at[k]));
      }
      reinterpret_cast<Pack<T>*>(out)[first + i] = pack[p];
    }
  }
  if (t == 0) rstd_out[blockIdx.x] = rstd;  // the gradient needs it
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double eps, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) |
                    reinterpret_cast<uintptr_t>(out);
  const int64_t packs = cols / N<T>;
  if (bits % 16 != 0 || cols % N<T> != 0 || packs > MAX_BLOCK * PACKS<T> || rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int warps = static_cast<int>((packs + 32 * PACKS<T> - 1) / (32 * PACKS<T>));
  rms_norm_kernel<<<static_cast<unsigned>(rows), 32 * warps, 0, stream>>>(
      x, weight, out, rstd, static_cast<int>(cols), static_cast<W>(eps));
  return cudaGetLastError();
}

extern "C" cudaError_t rms_norm_launch_f32(const float* x, const float* weight, float* out,
                                           float* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_f64(const double* x, const double* weight, double* out,
                                           double* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_f16(const __half* x, const __half* weight, __half* out,
                                           float* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                            __nv_bfloat16* out, float* rstd, int64_t rows,
                                            int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}
