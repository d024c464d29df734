// 5_in_flight.cu: the next rows are on their way while a block works on this one
// Before : a block of rung 3 asks for a row, waits for it, and only then has work
// Idea   : every thread keeps a queue in shared memory, and asynchronous copies fill it with its
//          values of the next rows. They go past the registers, and nobody waits for a row that was
//          asked for two rows ago. Rows of any length and alignment are cut into packs that fit
// Cost   : 3·rows·cols·sizeof(T) bytes, and 8 bytes a column and block for the sums
// Legal  : cols ≤ 8192 (float64: 4096)
// Result : 0.96 of copy, 32.89x rung 1, 2.24x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : AHEAD 2 → 1 for the 16-bit types; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;
constexpr int THREADS_PER_SM = 1024;
constexpr int WARPS = 8;  // of the blocks that add up the blocks' sums

template <typename T>
constexpr int AHEAD = sizeof(T) == 2 ? 2 : 1;  // rows on their way: 64 KB an SM

template <typename W>
constexpr int VALUES = 32 / sizeof(W);  // columns that a thread owns

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // one load, one store
  T at[N];
};

// The 16 bits of a bfloat16 are the high half of a float: one shift or mask a value, where the cast
// takes two instructions.
template <typename W, typename T, int N>
__device__ void widen(Pack<T, N> pack, W (&value)[N]) {
  if constexpr (N == 8 && std::is_same_v<T, __nv_bfloat16>) {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      value[k] = __uint_as_float(k % 2 == 0 ? bits[k / 2] << 16 : bits[k / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) value[k] = static_cast<W>(pack.at[k]);
  }
}

template <typename P>
__device__ void start_copy(P* to, const P* from) {
  if constexpr (sizeof(P) >= 4) {
    __pipeline_memcpy_async(to, from, sizeof(P));
  } else {
    *to = *from;  // no asynchronous copy is that small
  }
}

template <typename W>
struct Sums {  // over a row
  W g, gn;
};

template <typename W>
__device__ Sums<W> sum_warp(Sums<W> sums) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    sums.g += __shfl_xor_sync(~0u, sums.g, d);
    sums.gn += __shfl_xor_sync(~0u, sums.gn, d);
  }
  return sums;
}

// grad_sum is the gradient that reaches x past the norm, or null.
template <typename T, typename W, int N>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                const W* rstd, T* dx, W* partial, int64_t rows, int cols) {
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  __shared__ Sums<W> found[2][32];
  const int packs = cols / N, t = threadIdx.x, threads = blockDim.x;
  const int lane = t % 32, warps = threads / 32;

  // No thread looks into another's queue: no barrier is needed for it.
  extern __shared__ uint4 queues[];
  const auto place = [&](int slot, int tensor, int p) {
    const int before = (slot * 2 + tensor) * PACKS + p;
    return reinterpret_cast<P*>(queues) + before * threads + t;
  };
  const auto request = [&](int64_t row, int slot) {
    for (int p = 0; p < PACKS && row < rows; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        start_copy(place(slot, 0, p), reinterpret_cast<const P*>(grad) + row * packs + i);
        start_copy(place(slot, 1, p), reinterpret_cast<const P*>(x) + row * packs + i);
      }
    }
    __pipeline_commit();
  };

  P w[PACKS];
  W dw[VALUES<W>] = {}, db[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    w[p] = i < packs ? reinterpret_cast<const P*>(weight)[i] : P();
    for (int slot = 0; slot < AHEAD<T> && i >= packs; ++slot) {
      *place(slot, 0, p) = *place(slot, 1, p) = P();  // past the row's end: zeros change no sum
    }
  }
  const int64_t step = gridDim.x;
  int64_t row = blockIdx.x;
  for (int slot = 0; slot < AHEAD<T>; ++slot) request(row + slot * step, slot);
  W next_mean = mean[row], next_rstd = rstd[row];
  const W per_column = W(1) / cols;
  int turn = 0, slot = 0;
#pragma unroll 1
  for (; row < rows; row += step) {
    const W m = next_mean, r = next_rstd;
    next_mean = mean[min(row + step, rows - 1)];
    next_rstd = rstd[min(row + step, rows - 1)];
    __pipeline_wait_prior(AHEAD<T> - 1);
    W g[PACKS][N], n[PACKS][N];
    Sums<W> sums = {0, 0};
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      W dy[N], v[N], ws[N];
      widen(*place(slot, 0, p), dy);
      widen(*place(slot, 1, p), v);
      widen(w[p], ws);
#pragma unroll
      for (int q = 0; q < N; ++q) {
        g[p][q] = dy[q] * ws[q];
        n[p][q] = (v[q] - m) * r;
        sums.g += g[p][q];
        sums.gn += g[p][q] * n[p][q];
        dw[p * N + q] += dy[q] * n[p][q];
        db[p * N + q] += dy[q];
      }
    }
    request(row + AHEAD<T> * step, slot);
    slot = (slot + 1) % AHEAD<T>;

    sums = sum_warp(sums);
    // `found` is not the one of the row before, which another warp may still be reading.
    if (lane == 0) found[turn][t / 32] = sums;
    __syncthreads();
    sums = lane < warps ? found[turn][lane] : Sums<W>{0, 0};
    sums = sum_warp(sums);
    turn ^= 1;

    const W constant = -r * sums.g * per_column, slope = -r * sums.gn * per_column;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        P out;
#pragma unroll
        for (int q = 0; q < N; ++q) g[p][q] = g[p][q] * r + (n[p][q] * slope + constant);
        if (grad_sum != nullptr) {
          W past[N];
          widen(reinterpret_cast<const P*>(grad_sum)[row * packs + i], past);
#pragma unroll
          for (int q = 0; q < N; ++q) g[p][q] += past[q];
        }
#pragma unroll
        for (int q = 0; q < N; ++q) out.at[q] = static_cast<T>(g[p][q]);
        reinterpret_cast<P*>(dx)[row * packs + i] = out;
      }
    }
  }
  const int64_t part = blockIdx.x;
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    const int i = k / N * threads + t, c = i * N + k % N;
    if (i < packs) {
      partial[2 * part * cols + c] = dw[k];
      partial[(2 * part + 1) * cols + c] = db[k];
    }
  }
}

// dweight[c] is the sum of the even rows of `partial`, dbias[c] that of the odd ones.
template <typename T, typename W>
__global__ void finish_kernel(const W* partial, T* dweight, T* dbias, int parts, int cols) {
  __shared__ W found[2][WARPS][32];
  const int c = blockIdx.x * 32 + threadIdx.x;
  for (int which = 0; which < 2; ++which) {
    W sum = 0;
    for (int part = threadIdx.y; part < parts && c < cols; part += WARPS) {
      sum += partial[(int64_t{2} * part + which) * cols + c];
    }
    found[which][threadIdx.y][threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.y >= 2 || c >= cols) return;
  W total = 0;
  for (int w = 0; w < WARPS; ++w) total += found[threadIdx.y][w][threadIdx.x];
  (threadIdx.y == 0 ? dweight : dbias)[c] = static_cast<T>(total);
}

int threads_of(int64_t cols, int values) {
  return static_cast<int>((cols + 32 * values - 1) / (32 * values) * 32);
}

// As many as the GPU can hold.
int64_t blocks_of(int64_t rows, int64_t cols, int values) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t per_sm = std::max(1, THREADS_PER_SM / threads_of(cols, values));
  return std::min(rows, sms * per_sm);
}

// How many values the launcher wants in `partial`. It does not know the type: the larger answer.
extern "C" int64_t layer_norm_backward_workspace(int64_t rows, int64_t cols) {
  return 2 * cols *
         std::max(blocks_of(rows, cols, VALUES<double>), blocks_of(rows, cols, VALUES<float>));
}

template <typename T, typename W>
cudaError_t launch(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                   const W* rstd, T* dx, T* dweight, T* dbias, W* partial, int64_t rows,
                   int64_t cols, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  if (cols > MAX_BLOCK * VALUES<W>) return cudaErrorInvalidValue;
  uintptr_t bits = cols % N * sizeof(T);
  for (const T* pointer : {grad, grad_sum, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  auto kernel = bits % 16 == 0 ? rows_kernel<T, W, N> : rows_kernel<T, W, 1>;
  const int threads = threads_of(cols, VALUES<W>), length = static_cast<int>(cols);
  const auto blocks = static_cast<unsigned>(blocks_of(rows, cols, VALUES<W>));
  const int queues = threads * VALUES<W> * 2 * AHEAD<T> * static_cast<int>(sizeof(T));
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, queues);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the launch of another rung would find it
    return cudaErrorNotSupported;
  }
  kernel<<<blocks, threads, queues, stream>>>(grad, grad_sum, x, weight, mean, rstd, dx, partial,
                                              rows, length);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  finish_kernel<<<(length + 31) / 32, dim3(32, WARPS), 0, stream>>>(
      partial, dweight, dbias, static_cast<int>(blocks), length);
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                     \
  extern "C" cudaError_t layer_norm_backward_launch_##SUFFIX(                                      \
      const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean, const W* rstd, \
      T* dx, T* dweight, T* dbias, W* partial, int64_t rows, int64_t cols, cudaStream_t stream) {  \
    return launch(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial, rows, cols,  \
                  stream);                                                                         \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
