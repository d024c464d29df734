// 2_in_flight.cu: dx and dweight from one read, the next rows on their way
// Before : rung 1 reads grad and x three times
// Idea   : a persistent grid whose threads own the same columns in every row and keep their part of
//          dweight in registers. Asynchronous copies bring the next rows to a queue in shared memory;
//          a long row is shared out over a cluster of blocks
// Cost   : 3·rows·cols·sizeof(T) bytes, and 4 bytes a column and cluster for the sums
// Legal  : cols ≤ 131072 (float64: 65536), if this GPU grants a cluster of as many blocks
// Result : not measured yet
// Try    : AHEAD 2 → 1 for the 16-bit types; predict first

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

template <typename T>
constexpr int AHEAD = sizeof(T) == 2 ? 2 : 1;  // rows on their way: 64 KB an SM

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
__device__ W sum_warp(W value) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// The blocks of a cluster share a row; without CLUSTER, a block has it alone.
template <typename T, typename W, int N, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* x, const T* weight, const W* rstd, T* dx, W* partial,
                int64_t rows, int cols) {
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  __shared__ W found[2][MAX_CLUSTER * MAX_BLOCK / 32];  // of all warps of the cluster
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    size = cluster.num_blocks();
    rank = cluster.block_rank();
    cluster.sync();  // all run: before that, nobody may write into another's shared memory
  }
#endif
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
  W dw[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    w[p] = i < packs ? reinterpret_cast<const P*>(weight)[i] : P();
    for (int slot = 0; slot < AHEAD<T> && i >= packs; ++slot) {
      *place(slot, 0, p) = *place(slot, 1, p) = P();  // past the row's end: zeros change no sum
    }
  }
  const int64_t step = gridDim.x / size;
  int64_t row = blockIdx.x / size;
  for (int slot = 0; slot < AHEAD<T>; ++slot) request(row + slot * step, slot);
  W next_rstd = rstd[row];
  const W per_column = W(1) / cols;
  int turn = 0, slot = 0;
#pragma unroll 1
  for (; row < rows; row += step) {
    const W r = next_rstd;
    next_rstd = rstd[min(row + step, rows - 1)];
    __pipeline_wait_prior(AHEAD<T> - 1);
    W g[PACKS][N], n[PACKS][N];
    W sum = 0;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      W dy[N], v[N], ws[N];
      widen(*place(slot, 0, p), dy);
      widen(*place(slot, 1, p), v);
      widen(w[p], ws);
#pragma unroll
      for (int q = 0; q < N; ++q) {
        g[p][q] = dy[q] * ws[q];
        n[p][q] = v[q] * r;
        sum += g[p][q] * n[p][q];
        dw[p * N + q] += dy[q] * n[p][q];
      }
    }
    request(row + AHEAD<T> * step, slot);
    slot = (slot + 1) % AHEAD<T>;

    sum = sum_warp(sum);
    // `found` is not the one of the row before, which another warp may still be reading.
    W* const mine = &found[turn][rank * warps + threadIdx.x / 32];
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
      if (lane < size) *cluster.map_shared_rank(mine, lane) = sum;
      cluster.sync();  // all have written to all
    }
#endif
    if constexpr (!CLUSTER) {
      if (lane == 0) *mine = sum;
      __syncthreads();
    }
    sum = 0;
#pragma unroll 1
    for (int i = lane; i < size * warps; i += 32) sum += found[turn][i];
    sum = sum_warp(sum);
    turn ^= 1;

    const W slope = -r * sum * per_column;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        P out;
#pragma unroll
        for (int q = 0; q < N; ++q) out.at[q] = static_cast<T>(g[p][q] * r + n[p][q] * slope);
        reinterpret_cast<P*>(dx)[row * packs + i] = out;
      }
    }
  }
  const int64_t part = blockIdx.x / size;
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    const int i = k / N * threads + t, c = i * N + k % N;
    if (i < packs) partial[part * cols + c] = dw[k];
  }
}

// dweight[c] = the sum of partial[0 … parts-1][c], always in the same order.
template <typename T, typename W>
__global__ void finish_kernel(const W* partial, T* dweight, int parts, int cols) {
  __shared__ W found[WARPS][32];
  const int c = blockIdx.x * 32 + threadIdx.x;
  W sum = 0;
  for (int part = threadIdx.y; part < parts && c < cols; part += WARPS) {
    sum += partial[int64_t{part} * cols + c];
  }
  found[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= cols) return;
  for (int w = 1; w < WARPS; ++w) sum += found[w][threadIdx.x];
  dweight[c] = static_cast<T>(sum);
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
extern "C" int64_t rms_norm_backward_workspace(int64_t rows, int64_t cols) {
  return cols * std::max(plan_of(rows, cols, VALUES<double>).parts,
                         plan_of(rows, cols, VALUES<float>).parts);
}

template <typename T, typename W>
cudaError_t launch(const T* grad, const T* x, const T* weight, const W* rstd, T* dx, T* dweight,
                   W* partial, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  uintptr_t bits = cols % N * sizeof(T);
  for (const T* pointer : {grad, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  const bool aligned = bits % 16 == 0;
  Plan plan = plan_of(rows, cols, VALUES<W>);
  if (plan.size > MAX_CLUSTER) return cudaErrorNotSupported;
  auto kernel = aligned ? rows_kernel<T, W, N, false> : rows_kernel<T, W, 1, false>;
  if (plan.size > 1) kernel = aligned ? rows_kernel<T, W, N, true> : rows_kernel<T, W, 1, true>;

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(plan.parts * plan.size);
  config.blockDim = static_cast<unsigned>(plan.threads);
  config.dynamicSmemBytes = sizeof(T) * 2 * AHEAD<T> * VALUES<W> * plan.threads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = plan.size > 1;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(config.dynamicSmemBytes));
  if (plan.size > 1 && error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int fitting = 0;  // how many clusters fit depends on how the SMs are grouped
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
    if (error == cudaSuccess && fitting == 0) error = cudaErrorNotSupported;
    plan.parts = std::min<int64_t>(plan.parts, fitting);
    config.gridDim = static_cast<unsigned>(plan.parts * plan.size);
  }
  if (error != cudaSuccess) {  // this GPU is too small for a row
    cudaGetLastError();        // which is no error of the kernel that will do it
    return cudaErrorNotSupported;
  }
  error = cudaLaunchKernelEx(&config, kernel, grad, x, weight, rstd, dx, partial, rows,
                             static_cast<int>(cols));
  if (error != cudaSuccess) return error;
  const int length = static_cast<int>(cols), parts = static_cast<int>(plan.parts);
  finish_kernel<<<(length + 31) / 32, dim3(32, WARPS), 0, stream>>>(partial, dweight, parts,
                                                                    length);
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                  \
  extern "C" cudaError_t rms_norm_backward_launch_##SUFFIX(                                     \
      const T* grad, const T* x, const T* weight, const W* rstd, T* dx, T* dweight, W* partial, \
      int64_t rows, int64_t cols, cudaStream_t stream) {                                        \
    return launch(grad, x, weight, rstd, dx, dweight, partial, rows, cols, stream);             \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
