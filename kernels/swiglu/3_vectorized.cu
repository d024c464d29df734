// 3_vectorized.cu: 16 bytes a load
// Before : rung 2 moves one element an instruction: 2 bytes of it for the 16-bit types
// Idea   : a thread reads and writes packs of 16 bytes: 4 float32 or 8 float16 elements
// Cost   : 3·n·sizeof(T) bytes forward, 5·n backward; bound by memory        Legal: 0 < n < 2^39
// Result : 1.02 of copy, 4.09x rung 1, 1.74x eager  (H200, bfloat16 (16384, 8192), CUDA 13.0)
// Try    : how many of the bytes that the backward pass moves are writes? Do they cost the same?

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

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // aligned to its own size: one load, one store
  T at[N];
};

template <typename A>
__device__ A sigmoid(A g) {
  return A(1) / (A(1) + exp(-g));
}

// silu(g)·u with silu(g) = g·σ(g) (Shazeer, arXiv:2002.05202).
template <typename T, typename A = typename Accumulator<T>::type>
__device__ T swiglu(T gate, T up) {
  const A g = static_cast<A>(gate);
  return static_cast<T>(g * sigmoid(g) * A(up));
}

// The gradients take the places of gate and up.
template <typename T, typename A = typename Accumulator<T>::type>
__device__ void swiglu_gradients(T grad, T& gate, T& up) {
  const A d = static_cast<A>(grad), g = static_cast<A>(gate), s = sigmoid(g);
  gate = static_cast<T>(d * A(up) * s * (A(1) + g * (A(1) - s)));  // σ' = σ·(1 - σ)
  up = static_cast<T>(d * g * s);
}

template <typename T, int N>
__global__ void forward_kernel(const T* gate, const T* up, T* out, int64_t n) {
  using P = Pack<T, N>;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x, packs = n / N;
  if (i < packs) {
    P g = reinterpret_cast<const P*>(gate)[i];
    const P u = reinterpret_cast<const P*>(up)[i];
#pragma unroll
    for (int k = 0; k < N; ++k) g.at[k] = swiglu(g.at[k], u.at[k]);
    reinterpret_cast<P*>(out)[i] = g;
  }
  const int64_t rest = packs * N + i;  // the last n % N elements fill no pack
  if (rest < n) out[rest] = swiglu(gate[rest], up[rest]);
}

template <typename T, int N>
__global__ void backward_kernel(const T* grad, const T* gate, const T* up, T* dgate, T* dup,
                                int64_t n) {
  using P = Pack<T, N>;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x, packs = n / N;
  if (i < packs) {
    const P d = reinterpret_cast<const P*>(grad)[i];
    P g = reinterpret_cast<const P*>(gate)[i], u = reinterpret_cast<const P*>(up)[i];
#pragma unroll
    for (int k = 0; k < N; ++k) swiglu_gradients(d.at[k], g.at[k], u.at[k]);
    reinterpret_cast<P*>(dgate)[i] = g;
    reinterpret_cast<P*>(dup)[i] = u;
  }
  const int64_t rest = packs * N + i;
  if (rest < n) {
    T g = gate[rest], u = up[rest];
    swiglu_gradients(grad[rest], g, u);
    dgate[rest] = g;
    dup[rest] = u;
  }
}

unsigned blocks(int64_t n, int64_t a_thread) {
  return static_cast<unsigned>((n + BLOCK * a_thread - 1) / (BLOCK * a_thread));
}

// Without a 16-byte boundary to start from, packs of one element.
template <typename T, int N>
void start_forward(const T* gate, const T* up, T* out, int64_t n, cudaStream_t stream) {
  forward_kernel<T, N><<<blocks(n, N), BLOCK, 0, stream>>>(gate, up, out, n);
}
template <typename T, int N>
void start_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n,
                    cudaStream_t stream) {
  backward_kernel<T, N><<<blocks(n, N), BLOCK, 0, stream>>>(grad, gate, up, dgate, dup, n);
}

template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return (reinterpret_cast<uintptr_t>(pointers) | ...) % 16 == 0;
}

template <typename T>
cudaError_t forward(const T* gate, const T* up, T* out, int64_t n, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  auto* start = aligned(gate, up, out) ? start_forward<T, N> : start_forward<T, 1>;
  start(gate, up, out, n, stream);
  return cudaGetLastError();
}

template <typename T>
cudaError_t backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n,
                     cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const bool wide = aligned(grad, gate, up, dgate, dup);
  auto* start = wide ? start_backward<T, N> : start_backward<T, 1>;
  start(grad, gate, up, dgate, dup, n, stream);
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
