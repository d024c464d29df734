// 6_clusters.cu: long rows over a cluster of blocks, and no block waits for the others' sums
// Before : a row must fit into one block of rung 5
// Idea   : a cluster of blocks shares a row, and every warp sends its sums to all of them through
//          distributed shared memory. To wait for them at once would stop all warps of an SM for
//          every row. So a block sums up the next row before it needs the sums of this one
// Cost   : 3·rows·cols·sizeof(T) bytes, and 8 bytes a column and cluster for the sums
// Legal  : cols ≤ 131072 (float64: 65536), if this GPU grants a cluster of as many blocks
// Result : 0.90 of copy, 30.93x rung 1, 2.11x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : SLOTS 3 → 2: a row is asked for only when the one before it is summed up

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int THREADS_PER_SM = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int WARPS = 8;  // of the blocks that add up the blocks' sums

constexpr int SLOTS = 3;  // for rows: one to finish, one to sum up, one on its way

template <typename W>
constexpr int VALUES = 64 / sizeof(W);  // columns that a thread owns

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
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  __shared__ Sums<W> found[3][MAX_CLUSTER * MAX_BLOCK / 32];  // of all warps of the cluster
  const auto cluster = cooperative_groups::this_cluster();
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  const int packs = cols / N, t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;

  // No thread looks into another's queue: no barrier is needed for it.
  extern __shared__ uint4 queues[];
  const auto place = [&](int slot, int tensor, int p) {
    const int before = (slot * 2 + tensor) * PACKS + p;
    return reinterpret_cast<P*>(queues) + before * blockDim.x + threadIdx.x;
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
    for (int slot = 0; slot < SLOTS && i >= packs; ++slot) {
      *place(slot, 0, p) = *place(slot, 1, p) = P();  // past the row's end: zeros change no sum
    }
  }
  const int64_t step = gridDim.x / size, begin = blockIdx.x / size;
  for (int slot = 0; slot < SLOTS - 1; ++slot) request(begin + slot * step, slot);
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const W per_column = W(1) / cols;
  W last_m = 0, last_r = 0, m = mean[begin], r = rstd[begin];
  int slot = 0, last = SLOTS - 1, turn = 0, last_turn = 2;
#pragma unroll 1
  for (int64_t row = begin; row < rows + step; row += step) {
    const int64_t next = min(row + step, rows - 1);
    const W next_m = mean[next], next_r = rstd[next];
    Sums<W> sums = {0, 0};
    if (row < rows) {
      __pipeline_wait_prior(SLOTS - 2);
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        W dy[N], v[N], ws[N];
        widen(*place(slot, 0, p), dy);
        widen(*place(slot, 1, p), v);
        widen(w[p], ws);
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W g = dy[q] * ws[q], n = (v[q] - m) * r;
          sums.g += g;
          sums.gn += g * n;
          dw[p * N + q] += dy[q] * n;
          db[p * N + q] += dy[q];
        }
      }
      sums = sum_warp(sums);
    }
    // The sums of the row before have come by now. The new ones go where nobody reads any more: a
    // slow block may still be reading those of two rows ago.
    cluster.barrier_wait();
    if (row < rows) {
      Sums<W>* const mine = &found[turn][rank * warps + threadIdx.x / 32];
      if (lane < size) *cluster.map_shared_rank(mine, lane) = sums;
      cluster.barrier_arrive();
    }
    if (row > begin) {
      sums = {0, 0};
#pragma unroll 1
      for (int i = lane; i < size * warps; i += 32) {
        sums.g += found[last_turn][i].g;
        sums.gn += found[last_turn][i].gn;
      }
      sums = sum_warp(sums);
      const W constant = -last_r * sums.g * per_column, slope = -last_r * sums.gn * per_column;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        const int i = p * threads + t;
        if (i < packs) {
          const int64_t at = (row - step) * packs + i;
          W dy[N], v[N], ws[N];
          widen(*place(last, 0, p), dy);
          widen(*place(last, 1, p), v);
          widen(w[p], ws);
#pragma unroll
          for (int q = 0; q < N; ++q) {
            const W n = (v[q] - last_m) * last_r;
            v[q] = dy[q] * ws[q] * last_r + (n * slope + constant);
          }
          if (grad_sum != nullptr) {
            W past[N];
            widen(reinterpret_cast<const P*>(grad_sum)[at], past);
#pragma unroll
            for (int q = 0; q < N; ++q) v[q] += past[q];
          }
          P out;
#pragma unroll
          for (int q = 0; q < N; ++q) out.at[q] = static_cast<T>(v[q]);
          reinterpret_cast<P*>(dx)[at] = out;
        }
      }
    }
    request(row + (SLOTS - 1) * step, last);
    last = slot;
    slot = (slot + 1) % SLOTS;
    last_turn = turn;
    turn = (turn + 1) % 3;
    last_m = m;
    last_r = r;
    m = next_m;
    r = next_r;
  }
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    const int i = k / N * threads + t, c = i * N + k % N;
    if (i < packs) {
      partial[2 * begin * cols + c] = dw[k];
      partial[(2 * begin + 1) * cols + c] = db[k];
    }
  }
#endif
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

struct Plan {
  int size, threads;  // blocks a row, threads a block
  int64_t parts;      // rows at a time, each with its own sums of columns
};

Plan plan_of(int64_t rows, int64_t cols, int values) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  Plan plan = {1, 0, 1};
  while (cols > int64_t{plan.size} * MAX_BLOCK * values) plan.size *= 2;
  const int64_t per_warp = int64_t{plan.size} * 32 * values;
  plan.threads = static_cast<int>(32 * ((cols + per_warp - 1) / per_warp));
  const int64_t resident = sms * (THREADS_PER_SM / plan.threads) / plan.size;
  plan.parts = std::min(rows, std::max<int64_t>(1, resident));
  return plan;
}

// How many values the launcher wants in `partial`. It does not know the type: the larger answer.
extern "C" int64_t layer_norm_backward_workspace(int64_t rows, int64_t cols) {
  return 2 * cols *
         std::max(plan_of(rows, cols, VALUES<double>).parts,
                  plan_of(rows, cols, VALUES<float>).parts);
}

template <typename T, typename W>
cudaError_t launch(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                   const W* rstd, T* dx, T* dweight, T* dbias, W* partial, int64_t rows,
                   int64_t cols, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  Plan plan = plan_of(rows, cols, VALUES<W>);
  if (plan.size > MAX_CLUSTER) return cudaErrorNotSupported;
  uintptr_t bits = cols % N * sizeof(T);
  for (const T* pointer : {grad, grad_sum, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  auto kernel = bits % 16 == 0 ? rows_kernel<T, W, N> : rows_kernel<T, W, 1>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(plan.parts * plan.size);
  config.blockDim = static_cast<unsigned>(plan.threads);
  config.dynamicSmemBytes = sizeof(T) * 2 * SLOTS * VALUES<W> * plan.threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(config.dynamicSmemBytes));
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  int fitting = 0;  // how many clusters fit depends on how the SMs are grouped
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
  if (error == cudaSuccess && fitting == 0) error = cudaErrorNotSupported;
  if (error != cudaSuccess) {  // this GPU is too small for a row
    cudaGetLastError();        // which is no error of the kernel that will do it
    return cudaErrorNotSupported;
  }
  plan.parts = std::min<int64_t>(plan.parts, fitting);
  config.gridDim = static_cast<unsigned>(plan.parts * plan.size);
  error = cudaLaunchKernelEx(&config, kernel, grad, grad_sum, x, weight, mean, rstd, dx, partial,
                             rows, static_cast<int>(cols));
  if (error != cudaSuccess) return error;
  const int length = static_cast<int>(cols), parts = static_cast<int>(plan.parts);
  finish_kernel<<<(length + 31) / 32, dim3(32, WARPS), 0, stream>>>(partial, dweight, dbias, parts,
                                                                    length);
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
