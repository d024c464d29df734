// 1_thread_row.cu: one thread computes one row
// Before : torch.exp(x) / torch.exp(x).sum(-1, True), which overflows from x = 89 on
// Idea   : a thread walks its row three times: largest value, sum of exponentials, quotients
// Cost   : 2·rows·cols·sizeof(T) bytes at least, so bound by memory
// Legal  : rows ≤ 2^38, any cols
// Result : 0.07 of copy, 0.12x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : BLOCK 128 → 32; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

constexpr int BLOCK = 128;

// Sums of 16-bit values need float: the 257th 1 would not change a sum of 256 in bfloat16.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__global__ void softmax_kernel(const T* x, T* out, int64_t rows, int64_t cols) {
  using W = Wide<T>;
  const int64_t row = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (row >= rows) return;
  x += row * cols;  // neighbouring threads read addresses a whole row apart
  out += row * cols;

  W largest = -std::numeric_limits<W>::infinity();
  for (int64_t c = 0; c < cols; ++c) largest = fmax(largest, static_cast<W>(x[c]));
  W sum = 0;  // exp(x - largest) ≤ 1: nothing overflows, and one term is 1
  for (int64_t c = 0; c < cols; ++c) sum += exp(static_cast<W>(x[c]) - largest);
  for (int64_t c = 0; c < cols; ++c) {
    out[c] = static_cast<T>(exp(static_cast<W>(x[c]) - largest) / sum);
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  const int64_t grid = (rows + BLOCK - 1) / BLOCK;
  softmax_kernel<<<static_cast<unsigned>(grid), BLOCK, 0, stream>>>(x, out, rows, cols);
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
