// 4_vectorized.cu: a block a row, 16 bytes a load, the row in registers
// Before : rung 3 ends at 1024 values, and moves 2 or 4 bytes an instruction
// Idea   : as many warps as the row needs, each thread with up to 32 values in packs of 16 bytes; a
//          thread's own mean and distances come from registers, and one exchange joins the block
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4): no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 16384 (float64: 8192), pointers on 16 bytes
// Result : 0.96 of copy, 1.17x rung 1, 1.32x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : keep x in shared memory in place of registers; predict first

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
constexpr int VALUES = 128 / sizeof(Wide<T>);  // a thread keeps: 32 registers' worth

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

template <typename W>
struct Part {         // of a row
  W count, mean, m2;  // m2 = Σ (x − mean)²
};

template <typename W>
__device__ Part<W> join_warp(Part<W> a) {
  for (int d = 16; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.count, d), __shfl_xor_sync(~0u, a.mean, d),
                       __shfl_xor_sync(~0u, a.m2, d)};
    const W count = a.count + b.count, distance = b.mean - a.mean;
    const W share = count > 0 ? b.count / count : 0;
    a = {count, a.mean + distance * share, a.m2 + b.m2 + distance * distance * a.count * share};
  }
  return a;
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int cols, W eps) {
  constexpr int PACKS = VALUES<T> / N<T>;  // that a thread keeps; the row has `packs`
  __shared__ Part<W> found[MAX_BLOCK / 32];
  const int packs = cols / N<T>, t = threadIdx.x, lane = t % 32, warps = blockDim.x / 32;
  const int64_t first = int64_t{blockIdx.x} * packs;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x)[first + i];
  }
  if (residual != nullptr) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * blockDim.x + t;
      if (i < packs) {
        const Pack<T> more = reinterpret_cast<const Pack<T>*>(residual)[first + i];
#pragma unroll
        for (int k = 0; k < N<T>; ++k) {
          pack[p].at[k] =
              static_cast<T>(static_cast<W>(pack[p].at[k]) + static_cast<W>(more.at[k]));
        }
        reinterpret_cast<Pack<T>*>(sum)[first + i] = pack[p];
      }
    }
  }
  W value[VALUES<T>];
  Part<W> part = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * static_cast<int>(blockDim.x) + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : 0;
    part.count += inside;
    part.mean += value[k];
  }
  if (part.count > 0) part.mean /= part.count;
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * static_cast<int>(blockDim.x) + t < packs;
    if (inside) part.m2 += (value[k] - part.mean) * (value[k] - part.mean);
  }
  part = join_warp(part);
  if (lane == 0) found[t / 32] = part;
  __syncthreads();
  part = join_warp(lane < warps ? found[lane] : Part<W>{0, 0, 0});
  const W rstd = 1 / sqrt(part.m2 / cols + eps);

#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) {
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[i];
      const Pack<T> b = reinterpret_cast<const Pack<T>*>(bias)[i];
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        const W normal = (value[p * N<T> + k] - part.mean) * rstd;
        pack[p].at[k] = static_cast<T>(normal * static_cast<W>(w.at[k]) + static_cast<W>(b.at[k]));
      }
      reinterpret_cast<Pack<T>*>(out)[first + i] = pack[p];
    }
  }
  if (t == 0) {  // the gradient needs both
    mean_out[blockIdx.x] = part.mean;
    rstd_out[blockIdx.x] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  uintptr_t bits = 0;
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  if (bits % 16 != 0 || cols % N<T> != 0 || cols > MAX_BLOCK * VALUES<T> || rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int warps = static_cast<int>((cols + 32 * VALUES<T> - 1) / (32 * VALUES<T>));
  layer_norm_kernel<<<static_cast<unsigned>(rows), 32 * warps, 0, stream>>>(
      x, residual, weight, bias, sum, out, mean, rstd, static_cast<int>(cols), static_cast<W>(eps));
  return cudaGetLastError();
}

extern "C" cudaError_t layer_norm_launch_f32(const float* x, const float* residual,
                                             const float* weight, const float* bias, float* sum,
                                             float* out, float* mean, float* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_f64(const double* x, const double* residual,
                                             const double* weight, const double* bias, double* sum,
                                             double* out, double* mean, double* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_f16(const __half* x, const __half* residual,
                                             const __half* weight, const __half* bias, __half* sum,
                                             __half* out, float* mean, float* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* residual,
                                              const __nv_bfloat16* weight,
                                              const __nv_bfloat16* bias, __nv_bfloat16* sum,
                                              __nv_bfloat16* out, float* mean, float* rstd,
                                              int64_t rows, int64_t cols, double eps,
                                              cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}
