// 4_in_flight.cu: several packs in flight, and cheaper arithmetic
// Before : a thread of rung 3 has two loads in flight; expf and a true division for each element
//          keep the 16-bit types from memory's speed
// Idea   : UNROLL packs of each input are loaded before the first is used; 16-bit types get e^x and
//          1/x from the special-function units, still 500 times more precise than they are
// Cost   : 3·n·sizeof(T) bytes forward, 5·n backward; bound by memory        Legal: 0 < n < 2^39
// Result : 1.01 of copy, 4.05x rung 1, 1.72x eager  (H200, bfloat16 (16384, 8192), CUDA 13.0)
// Note   : no gain, rung 3 had it all
// Try    : UNROLL 2 → 1, then 4; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifndef UNROLL
#define UNROLL 2  // packs of each input that a thread has in flight, forward
#endif
#ifndef BACK_UNROLL
#define BACK_UNROLL 1  // backward, with three inputs
#endif
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

// T is what the result is stored as.
template <typename T, typename A>
__device__ A sigmoid(A g) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(1.0f, 1.0f + __expf(-g));
  } else {
    return A(1) / (A(1) + exp(-g));
  }
}

// silu(g)·u with silu(g) = g·σ(g) (Shazeer, arXiv:2002.05202).
template <typename T, typename A = typename Accumulator<T>::type>
__device__ T swiglu(T gate, T up) {
  const A g = static_cast<A>(gate);
  return static_cast<T>(g * sigmoid<T>(g) * A(up));
}

// The gradients take the places of gate and up.
template <typename T, typename A = typename Accumulator<T>::type>
__device__ void swiglu_gradients(T grad, T& gate, T& up) {
  const A d = static_cast<A>(grad), g = static_cast<A>(gate), s = sigmoid<T>(g);
  gate = static_cast<T>(d * A(up) * s * (A(1) + g * (A(1) - s)));  // σ' = σ·(1 - σ)
  up = static_cast<T>(d * g * s);
}

// Thread t owns the packs t, t + BLOCK, … of its block.
template <typename T, int N>
__global__ void __launch_bounds__(BLOCK)
    forward_kernel(const T* gate, const T* up, T* out, int64_t n) {
  using P = Pack<T, N>;
  const int64_t packs = n / N, first = int64_t{blockIdx.x} * (BLOCK * UNROLL) + threadIdx.x;
  P g[UNROLL], u[UNROLL];
#pragma unroll
  for (int j = 0; j < UNROLL; ++j) {
    if (first + j * BLOCK < packs) {
      g[j] = reinterpret_cast<const P*>(gate)[first + j * BLOCK];
      u[j] = reinterpret_cast<const P*>(up)[first + j * BLOCK];
    }
  }
#pragma unroll
  for (int j = 0; j < UNROLL; ++j) {
    if (first + j * BLOCK < packs) {
#pragma unroll
      for (int k = 0; k < N; ++k) g[j].at[k] = swiglu(g[j].at[k], u[j].at[k]);
      reinterpret_cast<P*>(out)[first + j * BLOCK] = g[j];
    }
  }
  const int64_t rest = packs * N + first;  // the last n % N elements fill no pack
  if (rest < n) out[rest] = swiglu(gate[rest], up[rest]);
}

template <typename T, int N>
__global__ void __launch_bounds__(BLOCK)
    backward_kernel(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n) {
  using P = Pack<T, N>;
  const int64_t packs = n / N, first = int64_t{blockIdx.x} * (BLOCK * BACK_UNROLL) + threadIdx.x;
  P d[BACK_UNROLL], g[BACK_UNROLL], u[BACK_UNROLL];
#pragma unroll
  for (int j = 0; j < BACK_UNROLL; ++j) {
    if (first + j * BLOCK < packs) {
      d[j] = reinterpret_cast<const P*>(grad)[first + j * BLOCK];
      g[j] = reinterpret_cast<const P*>(gate)[first + j * BLOCK];
      u[j] = reinterpret_cast<const P*>(up)[first + j * BLOCK];
    }
  }
#pragma unroll
  for (int j = 0; j < BACK_UNROLL; ++j) {
    if (first + j * BLOCK < packs) {
#pragma unroll
      for (int k = 0; k < N; ++k) swiglu_gradients(d[j].at[k], g[j].at[k], u[j].at[k]);
      reinterpret_cast<P*>(dgate)[first + j * BLOCK] = g[j];
      reinterpret_cast<P*>(dup)[first + j * BLOCK] = u[j];
    }
  }
  const int64_t rest = packs * N + first;
  if (rest < n) {
    T g_rest = gate[rest], u_rest = up[rest];
    swiglu_gradients(grad[rest], g_rest, u_rest);
    dgate[rest] = g_rest;
    dup[rest] = u_rest;
  }
}

unsigned blocks(int64_t n, int64_t a_thread) {
  return static_cast<unsigned>((n + BLOCK * a_thread - 1) / (BLOCK * a_thread));
}

// Without a 16-byte boundary to start from, packs of one element.
template <typename T, int N>
void start_forward(const T* gate, const T* up, T* out, int64_t n, cudaStream_t stream) {
  forward_kernel<T, N><<<blocks(n, N * UNROLL), BLOCK, 0, stream>>>(gate, up, out, n);
}
template <typename T, int N>
void start_backward(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t n,
                    cudaStream_t stream) {
  backward_kernel<T, N>
      <<<blocks(n, N * BACK_UNROLL), BLOCK, 0, stream>>>(grad, gate, up, dgate, dup, n);
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
