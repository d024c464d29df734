// 1_warp_shuffle.cu: dx = out · (grad − Σ grad · out), one block a row
// Before : the same formula in four PyTorch operators: 9 tensors through memory in place of 3
// Idea   : one sum a row, reduced by shuffles; the row is read once for it and once more for dx
// Cost   : 5·rows·cols·sizeof(T) bytes: four reads, one write
// Legal  : rows < 2^31, any cols
// Result : 0.78 of copy, 1.55x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : BLOCK 256 → 1024; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;  // whole warps
constexpr int WARPS = BLOCK / 32;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__global__ void softmax_backward_kernel(const T* grad, const T* out, T* dx, int64_t cols) {
  using W = Wide<T>;
  __shared__ W found[WARPS];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t{blockIdx.x} * cols;

  W dot = 0;
  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    dot += static_cast<W>(grad[first + c]) * static_cast<W>(out[first + c]);
  }
  for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);
  if (lane == 0) found[threadIdx.x / 32] = dot;
  __syncthreads();
  dot = lane < WARPS ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) dot += __shfl_xor_sync(~0u, dot, d);

  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    const W g = static_cast<W>(grad[first + c]), y = static_cast<W>(out[first + c]);
    dx[first + c] = static_cast<T>(y * (g - dot));
  }
}

template <typename T>
cudaError_t launch(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  if (rows > INT32_MAX) return cudaErrorInvalidValue;  // more blocks than a grid can have
  softmax_backward_kernel<<<static_cast<unsigned>(rows), BLOCK, 0, stream>>>(grad, out, dx, cols);
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
