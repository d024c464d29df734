// 1_two_pass.cu: mean first, then variance, one block a row
// Before : (x - mean) / sqrt(var + eps) * weight + bias in PyTorch operators: 14 trips to memory
// Idea   : the threads of a block share a row and walk it three times: the mean, the mean squared
//          distance from it, the result. x + residual is formed on the way, if there is a residual
// Cost   : 2·rows·cols·sizeof(T) bytes at least (with a residual 4), so bound by memory
// Legal  : rows < 2^31, any cols
// Result : 0.86 of copy, 1.19x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : variance as mean(x²) − mean(x)², one pass less; then add 1000 to every x and look again

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;  // whole warps
constexpr int WARPS = BLOCK / 32;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename W>
__device__ W sum_block(W value) {
  __shared__ W found[WARPS];
  const int lane = threadIdx.x % 32;
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  __syncthreads();  // whoever still reads `found` from the sum before is done
  if (lane == 0) found[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < WARPS ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename T, typename W>
__global__ void layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias,
                                  T* sum, T* out, W* mean_out, W* rstd_out, int64_t cols, W eps) {
  const int64_t first = int64_t{blockIdx.x} * cols;
  if (residual != nullptr) {  // what is normalised is x + residual, rounded to T as it is stored
    for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
      sum[first + c] =
          static_cast<T>(static_cast<W>(x[first + c]) + static_cast<W>(residual[first + c]));
    }
    x = sum;  // each thread reads below what it wrote here itself: no barrier needed
  }
  W mean = 0;
  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) mean += static_cast<W>(x[first + c]);
  mean = sum_block(mean) / cols;
  W variance = 0;
  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    const W distance = static_cast<W>(x[first + c]) - mean;
    variance += distance * distance;
  }
  variance = sum_block(variance) / cols;
  const W rstd = 1 / sqrt(variance + eps);

  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    const W normal = (static_cast<W>(x[first + c]) - mean) * rstd;
    out[first + c] = static_cast<T>(normal * static_cast<W>(weight[c]) + static_cast<W>(bias[c]));
  }
  if (threadIdx.x == 0) {  // the gradient needs both
    mean_out[blockIdx.x] = mean;
    rstd_out[blockIdx.x] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  if (rows > INT32_MAX) return cudaErrorInvalidValue;  // more blocks than a grid can have
  layer_norm_kernel<<<static_cast<unsigned>(rows), BLOCK, 0, stream>>>(
      x, residual, weight, bias, sum, out, mean, rstd, cols, static_cast<W>(eps));
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
