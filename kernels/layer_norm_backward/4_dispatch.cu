// 4_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rung 3 refuses odd and long rows, and gives a row of 64 values a whole block
// Idea   : the same persistent grid, whose rows are spread over a few lanes, a warp, a block or a
//          cluster of blocks that add up through distributed shared memory: as many clusters as
//          the chip takes at once. 16-bit types load the next row while they work on this one
// Cost   : 3·rows·cols·sizeof(T) bytes; rows over 131072 values (float64: 65536) are read 3 times
// Legal  : everything
// Result : 0.95 of copy, 32.57x rung 1, 2.21x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : VALUES 64 → 32 and THREADS_PER_SM 512 → 1024: which row lengths gain, which lose?

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int THREADS_PER_SM = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int WARPS = 8;   // of the blocks that sum columns
constexpr int PARTS = 64;  // of the rows, where the columns are summed by themselves

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

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

template <typename W>
struct Sums {  // over a row
  W g, gn;
};

// Over `width` neighbouring lanes, a power of two.
template <typename W>
__device__ Sums<W> sum_lanes(Sums<W> sums, int width) {
  for (int d = width / 2; d > 0; d /= 2) {
    sums.g += __shfl_xor_sync(~0u, sums.g, d);
    sums.gn += __shfl_xor_sync(~0u, sums.gn, d);
  }
  return sums;
}

// Over `width` neighbouring threads: up to 32 a power of two, else whole warps. `found` is not the
// one of the call before, so that nobody can write into sums that another one still reads.
template <typename W>
__device__ Sums<W> sum_block(Sums<W> sums, int width, Sums<W>* found) {
  sums = sum_lanes(sums, min(width, 32));
  if (width <= 32) return sums;
  const int lane = threadIdx.x % 32;
  if (lane == 0) found[threadIdx.x / 32] = sums;
  __syncthreads();
  return sum_lanes(lane < width / 32 ? found[lane] : Sums<W>{0, 0}, 32);
}

// A block is blockDim.x threads along a row, times blockDim.y rows. With CLUSTER, the blocks of a
// cluster share one row. grad_sum is the gradient that reaches x past the norm, or null.
template <typename T, typename W, int N, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                const W* rstd, T* dx, W* partial, int64_t rows, int cols) {
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  __shared__ Sums<W> found[2][32], blocks[2][MAX_CLUSTER];
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
  P w[PACKS];
  W dw[VALUES<W>] = {}, db[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) w[p] = reinterpret_cast<const P*>(weight)[i];
  }

  int turn = 0;
  const int64_t step = int64_t{gridDim.x / size} * blockDim.y;
  constexpr bool AHEAD = sizeof(T) == 2 && N > 1;  // of wider types, the registers hold one row
  P next_g[PACKS], next_x[PACKS];
  W next_m = 0, next_r = 0;
  const auto load_row = [&](int64_t row) {
    if (row >= rows) return;
    next_m = mean[row];
    next_r = rstd[row];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        next_g[p] = reinterpret_cast<const P*>(grad)[row * packs + i];
        next_x[p] = reinterpret_cast<const P*>(x)[row * packs + i];
      }
    }
  };
  if (AHEAD) load_row(int64_t{blockIdx.x / size} * blockDim.y + threadIdx.y);
#pragma unroll 1
  for (int64_t base = int64_t{blockIdx.x / size} * blockDim.y; base < rows; base += step) {
    const int64_t row = base + threadIdx.y, first = row * packs;
    const int mine = row < rows ? packs : 0;  // past the end: join, do no more
    if (!AHEAD) load_row(row);
    P gs[PACKS], xs[PACKS];
    memcpy(gs, next_g, sizeof(gs));
    memcpy(xs, next_x, sizeof(xs));
    const W r = mine > 0 ? next_r : 0, shift = mine > 0 ? next_m : 0;
    if (AHEAD) load_row(row + step);
    Sums<W> sums = {0, 0};
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (p * threads + t < mine) {
        W dy[N], v[N], ws[N];
        widen(gs[p], dy);
        widen(xs[p], v);
        widen(w[p], ws);
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W g = dy[q] * ws[q], n = (v[q] - shift) * r;
          sums.g += g;
          sums.gn += g * n;
          dw[p * N + q] += dy[q] * n;
          db[p * N + q] += dy[q];
        }
      }
    }
    sums = sum_block(sums, blockDim.x, found[turn]);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
      if (static_cast<int>(threadIdx.x) < size)
        *cluster.map_shared_rank(&blocks[turn][rank], threadIdx.x) = sums;
      cluster.sync();  // all have written to all
      const int lane = threadIdx.x % 32;
      sums = sum_lanes(lane < size ? blocks[turn][lane] : Sums<W>{0, 0}, 32);
    }
#endif
    turn ^= 1;
    const W constant = -r * sums.g / cols, slope = -r * sums.gn / cols;
    W opaque = shift;  // to the compiler another value: it computes n again, and does not keep it
#ifndef __SIMT_CPU__
    if constexpr (sizeof(W) == 4) asm volatile("" : "+f"(opaque));
#endif
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < mine) {
        W dy[N], v[N], ws[N], past[N] = {};
        widen(gs[p], dy);
        widen(xs[p], v);
        widen(w[p], ws);
        if (grad_sum != nullptr) widen(reinterpret_cast<const P*>(grad_sum)[first + i], past);
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W n = (v[q] - opaque) * r;
          gs[p].at[q] = static_cast<T>(dy[q] * ws[q] * r + (n * slope + constant) + past[q]);
        }
        reinterpret_cast<P*>(dx)[first + i] = gs[p];
      }
    }
  }

  const int64_t part = blockIdx.x / size;
  W* const to[2] = {partial + 2 * part * cols, partial + (2 * part + 1) * cols};
  if (blockDim.x > 32) {
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int i = k / N * threads + t;
      if (i < packs) {
        to[0][i * N + k % N] = dw[k];
        to[1][i * N + k % N] = db[k];
      }
    }
  } else {  // the rows of a block have columns in common: add them up first
    __shared__ W column[WARPS][32 * VALUES<W>];
    const int number = threadIdx.y * blockDim.x + threadIdx.x;
    for (int which = 0; which < 2; ++which) {
      __syncthreads();  // nobody reads `column` any more
#pragma unroll
      for (int k = 0; k < VALUES<W>; ++k) {
        W sum = which == 0 ? dw[k] : db[k];
        for (int d = blockDim.x; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        const int i = k / N * threads + t;
        if (number % 32 < threads && i < packs) column[number / 32][i * N + k % N] = sum;
      }
      __syncthreads();
      for (int c = number; c < cols; c += 32 * WARPS) {
        W sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += column[warp][c];
        to[which][c] = sum;
      }
    }
  }
}

// The sums of the block's warps, lane by lane.
template <typename W>
__device__ W add_warps(W value) {
  __shared__ W found[WARPS][32];
  __syncthreads();  // whoever still reads `found` from the call before is done
  found[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  W total = 0;
  for (int w = 0; w < WARPS; ++w) total += found[w][threadIdx.x];
  return total;
}

template <typename T, typename W>
__global__ void finish_kernel(const W* partial, T* dweight, T* dbias, int64_t parts, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  W dw = 0, db = 0;
  for (int64_t part = threadIdx.y; part < parts && c < cols; part += WARPS) {
    dw += partial[2 * part * cols + c];
    db += partial[(2 * part + 1) * cols + c];
  }
  dw = add_warps(dw);
  db = add_warps(db);
  if (threadIdx.y == 0 && c < cols) {
    dweight[c] = static_cast<T>(dw);
    dbias[c] = static_cast<T>(db);
  }
}

// For rows that no cluster can keep, as in rung 2: the rows …
template <typename T, typename W>
__global__ void __launch_bounds__(1024)
    read_twice(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
               const W* rstd, T* dx, int64_t cols) {
  __shared__ Sums<W> found[32];
  const int64_t row = blockIdx.x, first = row * cols;
  const W m = mean[row], r = rstd[row];
  Sums<W> sums = {0, 0};
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]) * static_cast<W>(weight[c]);
    sums.g += g;
    sums.gn += g * (static_cast<W>(x[first + c]) - m) * r;
  }
  sums = sum_block(sums, blockDim.x, found);
  const W constant = -r * sums.g / cols, slope = -r * sums.gn / cols;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]) * static_cast<W>(weight[c]);
    const W n = (static_cast<W>(x[first + c]) - m) * r;
    const W past = grad_sum != nullptr ? static_cast<W>(grad_sum[first + c]) : 0;
    dx[first + c] = static_cast<T>(g * r + (n * slope + constant) + past);
  }
}

// … and the columns.
template <typename T, typename W>
__global__ void sum_columns(const T* grad, const T* x, const W* mean, const W* rstd, W* partial,
                            int64_t rows, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  W dw = 0, db = 0;
  int64_t row = blockIdx.y * WARPS + threadIdx.y;
  for (; row < rows && c < cols; row += WARPS * gridDim.y) {
    const W g = static_cast<W>(grad[row * cols + c]);
    dw += g * (static_cast<W>(x[row * cols + c]) - mean[row]) * rstd[row];
    db += g;
  }
  dw = add_warps(dw);
  db = add_warps(db);
  if (threadIdx.y == 0 && c < cols) {
    partial[2 * blockIdx.y * cols + c] = dw;
    partial[(2 * blockIdx.y + 1) * cols + c] = db;
  }
}

// How a problem is cut. The type decides how many columns a thread owns: 16, or 8 of float64.
struct Plan {
  int lanes, rows, size;  // threads along a row, rows a block, blocks a row; size 0: none fits
  int64_t parts;          // of the rows, each with its own sums of columns
};

Plan plan_of(int64_t rows, int64_t cols, int values) {
  int device = 0, sms = 1, clusters = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  Plan plan = {1, 1, 1, 0};
  if (cols <= 32 * values) {
    while (plan.lanes * values < cols) plan.lanes *= 2;
    plan.rows = 32 * WARPS / plan.lanes;
  } else {
    while (cols > int64_t{plan.size} * MAX_BLOCK * values) plan.size *= 2;
    const int64_t per_warp = int64_t{plan.size} * 32 * values;
    plan.lanes = static_cast<int>(32 * ((cols + per_warp - 1) / per_warp));
  }
  if (plan.size > (clusters ? MAX_CLUSTER : 1)) {
    plan.size = 0;
    plan.parts = std::min<int64_t>(PARTS, (rows + WARPS - 1) / WARPS);
  } else {
    const int64_t resident = sms * (THREADS_PER_SM / (plan.lanes * plan.rows)) / plan.size;
    // At least one, though a chip of few SMs may seem too small for a cluster of 16.
    plan.parts = std::min((rows + plan.rows - 1) / plan.rows, std::max<int64_t>(1, resident));
  }
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
  uintptr_t bits = cols % N * sizeof(T);
  for (const T* pointer : {grad, grad_sum, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  const bool aligned = bits % 16 == 0;
  const Plan plan = plan_of(rows, cols, VALUES<W>);
  int64_t parts = plan.parts;
  cudaError_t error = cudaSuccess;
  if (plan.size == 0) {
    if (rows > INT32_MAX) return cudaErrorInvalidValue;
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(grad, grad_sum, x, weight, mean,
                                                                 rstd, dx, cols);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>((cols + 31) / 32), static_cast<unsigned>(plan.parts));
    sum_columns<<<grid, dim3(32, WARPS), 0, stream>>>(grad, x, mean, rstd, partial, rows, cols);
    error = cudaGetLastError();
  } else {
    auto kernel = aligned ? rows_kernel<T, W, N, false> : rows_kernel<T, W, 1, false>;
    if (plan.size > 1) kernel = aligned ? rows_kernel<T, W, N, true> : rows_kernel<T, W, 1, true>;
    const auto size = static_cast<unsigned>(plan.size);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(parts) * size;
    config.blockDim = dim3(plan.lanes, plan.rows);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = size > 1;
    if (size > 8) {  // 8 blocks are always granted, 16 on request
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (size > 1 && error == cudaSuccess) {  // how many fit depends on how the SMs are grouped
      int fitting = 0;
      error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
      parts = std::min<int64_t>(parts, std::max(1, fitting));
      config.gridDim = static_cast<unsigned>(parts) * size;
    }
    if (error != cudaSuccess) return error;
    error = cudaLaunchKernelEx(&config, kernel, grad, grad_sum, x, weight, mean, rstd, dx, partial,
                               rows, static_cast<int>(cols));
  }
  if (error != cudaSuccess) return error;
  finish_kernel<<<static_cast<unsigned>((cols + 31) / 32), dim3(32, WARPS), 0, stream>>>(
      partial, dweight, dbias, parts, cols);
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
