// 3_vectorized.cu: 16 bytes a load, several loads in flight
// Before : rung 2 moves 4 bytes an instruction and waits for them before it asks for more
// Idea   : read and write packs of 16 bytes, UNROLL of them per thread before the first is used
// Cost   : 3·n·sizeof(T) bytes moved, n additions, so bound by memory        Legal: 0 < n < 2^40
// Result : 1.02 of copy, 1.25x rung 1, 1.00x eager  (H200, float32 (268435456,), CUDA 13.0)
// Try    : UNROLL 2 → 1, then 8; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int BLOCK = 256;
constexpr int UNROLL = 2;

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // aligned to its own size: one load, one store
  T at[N];
};

// Thread i owns the packs i, i + BLOCK, … of its block: neighbours read neighbouring addresses.
template <typename T, int N>
__global__ void vector_add_kernel(const T* a, const T* b, T* out, int64_t n) {
  using P = Pack<T, N>;
  const int64_t packs = n / N;
  const int64_t first = int64_t{blockIdx.x} * (BLOCK * UNROLL) + threadIdx.x;
  P x[UNROLL], y[UNROLL];  // registers: nvcc unrolls loops with constant bounds

  for (int u = 0; u < UNROLL; ++u) {  // all loads first: none waits for another
    const int64_t i = first + u * BLOCK;
    if (i < packs) {
      x[u] = reinterpret_cast<const P*>(a)[i];
      y[u] = reinterpret_cast<const P*>(b)[i];
    }
  }
  for (int u = 0; u < UNROLL; ++u) {
    const int64_t i = first + u * BLOCK;
    if (i < packs) {
      for (int k = 0; k < N; ++k) x[u].at[k] = x[u].at[k] + y[u].at[k];
      reinterpret_cast<P*>(out)[i] = x[u];
    }
  }
  // The last n % N elements fill no pack: the first threads of the grid add one each.
  const int64_t rest = packs * N + first;
  if (blockIdx.x == 0 && rest < n) out[rest] = a[rest] + b[rest];
}

template <typename T>
cudaError_t launch(const T* a, const T* b, T* out, int64_t n, cudaStream_t stream) {
  constexpr int FULL = 16 / sizeof(T);
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                    reinterpret_cast<uintptr_t>(out);
  // A slice like x[1:] starts between two 16-byte boundaries, where a wide load would fault.
  const bool aligned = bits % 16 == 0;
  const auto kernel = aligned ? vector_add_kernel<T, FULL> : vector_add_kernel<T, 1>;
  const int64_t per_block = int64_t{BLOCK} * UNROLL * (aligned ? FULL : 1);
  const auto grid = static_cast<unsigned>((n + per_block - 1) / per_block);
  kernel<<<grid, BLOCK, 0, stream>>>(a, b, out, n);
  return cudaGetLastError();
}

extern "C" cudaError_t vector_add_launch_f32(const float* a, const float* b, float* out, int64_t n,
                                             cudaStream_t stream) {
  return launch(a, b, out, n, stream);
}
extern "C" cudaError_t vector_add_launch_f64(const double* a, const double* b, double* out,
                                             int64_t n, cudaStream_t stream) {
  return launch(a, b, out, n, stream);
}
extern "C" cudaError_t vector_add_launch_f16(const __half* a, const __half* b, __half* out,
                                             int64_t n, cudaStream_t stream) {
  return launch(a, b, out, n, stream);
}
extern "C" cudaError_t vector_add_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                              __nv_bfloat16* out, int64_t n, cudaStream_t stream) {
  return launch(a, b, out, n, stream);
}
