// 1_composed.cu: one kernel a step, as eager PyTorch does it
// Before : silu(gate) * up, two calls in Python
// Idea   : SiLU, then the product; silu(gate) makes a round trip through device memory in between
// Cost   : moves 5·n·sizeof(T) bytes forward, 11·n backward; 3·n and 5·n are needed
// Legal  : 0 < n < 2^39
// Result : 0.25 of copy, 0.43x eager  (H200, bfloat16 (16384, 8192), CUDA 13.0)
// Try    : write down what each of the four backward kernels reads and writes; which can be joined?

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

template <typename A>
__device__ A sigmoid(A g) {
  return A(1) / (A(1) + exp(-g));
}

template <typename T>
__global__ void silu(const T* gate, T* out, int64_t n) {
  using A = typename Accumulator<T>::type;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i >= n) return;
  const A g = static_cast<A>(gate[i]);
  out[i] = static_cast<T>(g * sigmoid(g));
}

template <typename T>
__global__ void multiply(const T* a, const T* b, T* out, int64_t n) {
  using A = typename Accumulator<T>::type;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i < n) out[i] = static_cast<T>(A(a[i]) * A(b[i]));
}

// out *= silu'(gate), where silu(g) = g·σ(g) and σ' = σ·(1 - σ).
template <typename T>
__global__ void multiply_by_slope(const T* gate, T* out, int64_t n) {
  using A = typename Accumulator<T>::type;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i >= n) return;
  const A g = static_cast<A>(gate[i]), s = sigmoid(g);
  out[i] = static_cast<T>(A(out[i]) * s * (A(1) + g * (A(1) - s)));
}

unsigned blocks(int64_t n) { return static_cast<unsigned>((n + BLOCK - 1) / BLOCK); }

template <typename T>
cudaError_t forward(const T* gate, const T* up, T* out, int64_t n, cudaStream_t stream) {
  silu<<<blocks(n), BLOCK, 0, stream>>>(gate, out, n);
  multiply<<<blocks(n), BLOCK, 0, stream>>>(out, up, out, n);
  return cudaGetLastError();
}

template <typename T>
cudaError_t backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n,
                     cudaStream_t stream) {
  silu<<<blocks(n), BLOCK, 0, stream>>>(gate, dup, n);
  multiply<<<blocks(n), BLOCK, 0, stream>>>(dup, grad, dup, n);
  multiply<<<blocks(n), BLOCK, 0, stream>>>(grad, up, dgate, n);
  multiply_by_slope<<<blocks(n), BLOCK, 0, stream>>>(gate, dgate, n);
  return cudaGetLastError();
}

#define LAUNCHERS(SUFFIX, T)                                                                       \
  extern "C" cudaError_t swiglu_launch_##SUFFIX(const T* gate, const T* up, T* out, int64_t n,     \
                                                cudaStream_t stream) {                             \
    return forward(gate, up, out, n, stream);                                                      \
  }                                                                                                \
  extern "C" cudaError_t swiglu_backward_launch_##SUFFIX(const T* grad, const T* gate,             \
                                                         const T* up, T* dgate, T* dup, int64_t n, \
                                                         cudaStream_t stream) {                    \
    return backward(grad, gate, up, dgate, dup, n, stream);                                        \
  }
LAUNCHERS(f32, float)
LAUNCHERS(f64, double)
LAUNCHERS(f16, __half)
LAUNCHERS(bf16, __nv_bfloat16)
