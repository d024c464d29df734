// 1_block_row.cu: out = x / sqrt(mean(x²) + eps) · weight, one block a row
// Before : the formula in PyTorch operators, five trips to memory
// Idea   : one sum a row, reduced by shuffles; the row is read for it, and once more for the result
// Cost   : 3·rows·cols·sizeof(T) bytes: two reads, one write
// Legal  : rows < 2^31, any cols
// Result : 0.87 of copy, 1.23x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : BLOCK 256 → 1024; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

constexpr int BLOCK = 256;  // whole warps
constexpr int WARPS = BLOCK / 32;

template <typename T, typename W>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* out, W* rstd_out, int64_t cols,
                                W eps) {
  __shared__ W found[WARPS];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * cols;
  W sum = 0;
  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    const W value = static_cast<W>(x[first + c]);
    sum += value * value;
  }
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) found[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = lane < WARPS ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  const W rstd = 1 / sqrt(sum / cols + eps);

  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    out[first + c] =
        static_cast<T>(static_cast<W>(x[first + c]) * rstd * static_cast<W>(weight[c]));
  }
  if (threadIdx.x == 0) rstd_out[blockIdx.x] = rstd;  // the gradient needs it
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double eps, cudaStream_t stream) {
  if (rows > INT32_MAX) return cudaErrorInvalidValue;  // more blocks than a grid can have
  rms_norm_kernel<<<static_cast<unsigned>(rows), BLOCK, 0, stream>>>(x, weight, out, rstd, cols,
                                                                     static_cast<W>(eps));
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
