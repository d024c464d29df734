// 3_warp_row.cu: a warp a row, and the row stays in its registers
// Before : rung 2 gives a row of 128 values 256 threads and a barrier, and reads it twice
// Idea   : a warp holds up to 1024 values, 32 a lane; no shared memory, no barrier, one read, and
//          the mean can come before the distances again, at no cost
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4): no more than must be
// Legal  : cols ≤ 1024, any alignment
// Result : 0.87 of copy, 1.41x rung 1, 1.38x eager  (H200, float32 (65536, 1024), CUDA 13.0)
// Try    : BLOCK 256 → 32; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

constexpr int BLOCK = 256;
constexpr int WARPS = BLOCK / 32;

template <typename W>
__device__ W sum_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// VALUES · 32 ≥ cols: lane l keeps the values l, l + 32, l + 64, …
template <int VALUES, typename T, typename W>
__global__ void layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias,
                                  T* sum, T* out, W* mean_out, W* rstd_out, int64_t rows, int cols,
                                  W eps) {
  const int64_t row = int64_t{blockIdx.x} * WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;  // a whole warp leaves: the shuffles below miss nobody
  const int64_t first = row * cols;
  W value[VALUES], mean = 0, variance = 0;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const int c = k * 32 + lane;
    value[k] = c < cols ? static_cast<W>(x[first + c]) : 0;
    if (residual != nullptr && c < cols) {
      const T total = static_cast<T>(value[k] + static_cast<W>(residual[first + c]));
      sum[first + c] = total;
      value[k] = static_cast<W>(total);
    }
    mean += value[k];
  }
  mean = sum_warp(mean) / cols;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    if (k * 32 + lane < cols) variance += (value[k] - mean) * (value[k] - mean);
  }
  const W rstd = 1 / sqrt(sum_warp(variance) / cols + eps);
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const int c = k * 32 + lane;
    if (c < cols) {
      const W normal = (value[k] - mean) * rstd;
      out[first + c] = static_cast<T>(normal * static_cast<W>(weight[c]) + static_cast<W>(bias[c]));
    }
  }
  if (lane == 0) {  // the gradient needs both
    mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  const int64_t grid = (rows + WARPS - 1) / WARPS;
  if (cols > 1024 || grid > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = cols <= 128 ? layer_norm_kernel<4, T, W> : layer_norm_kernel<32, T, W>;
  kernel<<<static_cast<unsigned>(grid), BLOCK, 0, stream>>>(
      x, residual, weight, bias, sum, out, mean, rstd, rows, static_cast<int>(cols),
      static_cast<W>(eps));
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
