// 4_online.cu: largest value and sum in one pass
// Before : rung 3 reads every row three times
// Idea   : keep a sum relative to the largest value so far, and rescale it when a larger one comes
//          (Milakov and Gimelshein, 2018); pairs (largest, sum) are joined the same way
// Cost   : 3·rows·cols·sizeof(T) bytes: two reads, one write
// Legal  : rows < 2^31, any cols
// Result : 0.72 of copy, 9.91x rung 1, 1.18x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Note   : slower than rung 3, whose later reads come from the L2; this one computes more
// Try    : replace the loop's two exponentials by one and a branch; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

constexpr int BLOCK = 256;  // whole warps
constexpr int WARPS = BLOCK / 32;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

// Finite, not -inf: exp(-inf - LOWEST) is 0 where exp(-inf - -inf) would be NaN.
template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

template <typename W>
__device__ Part<W> join(Part<W> a, Part<W> b) {
  const W largest = fmax(a.largest, b.largest);
  return {largest, a.sum * exp(a.largest - largest) + b.sum * exp(b.largest - largest)};
}

template <typename W>
__device__ Part<W> join_warp(Part<W> part) {
  for (int d = 16; d > 0; d /= 2) {
    part = join(part,
                Part<W>{__shfl_xor_sync(~0u, part.largest, d), __shfl_xor_sync(~0u, part.sum, d)});
  }
  return part;
}

template <typename T>
__global__ void softmax_kernel(const T* x, T* out, int64_t cols) {
  using W = Wide<T>;
  __shared__ W largest[WARPS], sum[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x += int64_t{blockIdx.x} * cols;
  out += int64_t{blockIdx.x} * cols;

  Part<W> part = {LOWEST<W>, 0};
  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    const W value = static_cast<W>(x[c]), before = part.largest;
    part.largest = fmax(before, value);
    part.sum = part.sum * exp(before - part.largest) + exp(value - part.largest);
  }
  part = join_warp(part);
  if (lane == 0) {
    largest[warp] = part.largest;
    sum[warp] = part.sum;
  }
  __syncthreads();
  part = lane < WARPS ? Part<W>{largest[lane], sum[lane]} : Part<W>{LOWEST<W>, 0};
  part = join_warp(part);

  for (int64_t c = threadIdx.x; c < cols; c += BLOCK) {
    out[c] = static_cast<T>(exp(static_cast<W>(x[c]) - part.largest) / part.sum);
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  if (rows > INT32_MAX) return cudaErrorInvalidValue;  // more blocks than a grid can have
  softmax_kernel<<<static_cast<unsigned>(rows), BLOCK, 0, stream>>>(x, out, cols);
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
