// 1_composed.cu: one kernel a step, as eager PyTorch does it
// Before : gelu(x + bias) written as two calls in Python
// Idea   : add, then GELU; x + bias makes a round trip through device memory in between
// Cost   : moves 4·n·sizeof(T) bytes, and the result needs only 2·n      Legal: 0 < n < 2^39
// Result : 0.15 of copy, 0.61x eager  (H200, bfloat16 (8192, 8192) contiguous none, CUDA 13.0)
// Try    : count the bytes of the backward pass (6·n); which of its three kernels could go?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int BLOCK = 256;

template <typename T>
struct Accumulator {
  using type = float;  // 16-bit types are stored, never computed in
};
template <>
struct Accumulator<double> {
  using type = double;
};

// GELU(h) = h·Φ(h), Φ the distribution function of the normal distribution (Hendrycks and Gimpel,
// arXiv:1606.08415): Φ(h) = (1 + erf(h/√2)) / 2, or in the tanh form
// Φ(h) ≈ (1 + tanh(√(2/π)·(h + 0.044715·h³))) / 2.
template <typename A>
__device__ A gelu(A h, bool tanh_form) {
  if (!tanh_form) return h * A(0.5) * (A(1) + erf(h * A(0.70710678118654752)));
  return h * A(0.5) * (A(1) + tanh(A(0.79788456080286536) * (h + A(0.044715) * h * h * h)));
}

// Product rule: Φ(h) + h·Φ'(h).
template <typename A>
__device__ A gelu_slope(A h, bool tanh_form) {
  if (!tanh_form) {
    const A density = A(0.39894228040143268) * exp(A(-0.5) * h * h);  // of the normal distribution
    return A(0.5) * (A(1) + erf(h * A(0.70710678118654752))) + h * density;
  }
  const A t = tanh(A(0.79788456080286536) * (h + A(0.044715) * h * h * h));
  const A inner = A(0.79788456080286536) * (A(1) + A(0.134145) * h * h);
  return A(0.5) * (A(1) + t) + A(0.5) * h * (A(1) - t * t) * inner;
}

template <typename T>
__global__ void add_bias(const T* x, const T* bias, T* out, int64_t n, int64_t cols) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  using A = typename Accumulator<T>::type;
  if (i < n) out[i] = static_cast<T>(A(x[i]) + A(bias[i % cols]));
}

template <typename T>
__global__ void apply_gelu(T* out, int64_t n, bool tanh_form) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  using A = typename Accumulator<T>::type;
  if (i < n) out[i] = static_cast<T>(gelu(A(out[i]), tanh_form));
}

// dx holds h = x + bias when this starts, and the gradient when it ends.
template <typename T>
__global__ void apply_slope(const T* grad, T* dx, int64_t n, bool tanh_form) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  using A = typename Accumulator<T>::type;
  if (i < n) dx[i] = static_cast<T>(A(grad[i]) * gelu_slope(A(dx[i]), tanh_form));
}

// Every row used bias[c], so its gradient is the sum of column c: one thread walks down it.
template <typename T>
__global__ void sum_columns(const T* dx, T* dbias, int64_t rows, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (c >= cols) return;
  typename Accumulator<T>::type sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum += static_cast<decltype(sum)>(dx[r * cols + c]);
  dbias[c] = static_cast<T>(sum);
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + BLOCK - 1) / BLOCK); }

template <typename T>
cudaError_t forward(const T* x, const T* bias, T* out, int64_t rows, int64_t cols, bool tanh_form,
                    cudaStream_t stream) {
  const int64_t n = rows * cols;
  add_bias<<<blocks(n), BLOCK, 0, stream>>>(x, bias, out, n, cols);
  apply_gelu<<<blocks(n), BLOCK, 0, stream>>>(out, n, tanh_form);
  return cudaGetLastError();
}

template <typename T>
cudaError_t backward(const T* grad, const T* x, const T* bias, T* dx, T* dbias, int64_t rows,
                     int64_t cols, bool tanh_form, cudaStream_t stream) {
  const int64_t n = rows * cols;
  add_bias<<<blocks(n), BLOCK, 0, stream>>>(x, bias, dx, n, cols);
  apply_slope<<<blocks(n), BLOCK, 0, stream>>>(grad, dx, n, tanh_form);
  sum_columns<<<blocks(cols), BLOCK, 0, stream>>>(dx, dbias, rows, cols);
  return cudaGetLastError();
}

// Rows of the workspace (parts × cols accumulators) that the backward pass wants: none here.
extern "C" int64_t bias_gelu_backward_parts(int64_t, int64_t) { return 0; }

#define LAUNCHERS(SUFFIX, T, A)                                                                  \
  extern "C" cudaError_t bias_gelu_launch_##SUFFIX(const T* x, const T* bias, T* out,            \
                                                   int64_t rows, int64_t cols, bool tanh_form,   \
                                                   cudaStream_t stream) {                        \
    return forward(x, bias, out, rows, cols, tanh_form, stream);                                 \
  }                                                                                              \
  extern "C" cudaError_t bias_gelu_backward_launch_##SUFFIX(                                     \
      const T* grad, const T* x, const T* bias, T* dx, T* dbias, A*, int64_t rows, int64_t cols, \
      bool tanh_form, cudaStream_t stream) {                                                     \
    return backward(grad, x, bias, dx, dbias, rows, cols, tanh_form, stream);                    \
  }
LAUNCHERS(f32, float, float)
LAUNCHERS(f64, double, double)
LAUNCHERS(f16, __half, float)
LAUNCHERS(bf16, __nv_bfloat16, float)
