// 2_dispatch.cu: dx and dweight from one read, for every row length
// Before : rung 1 reads grad and x three times
// Idea   : a persistent grid whose threads own the same columns in every row and keep their part of
//          dweight in registers; rows are spread over a few lanes, a warp, a block or a cluster
// Cost   : 3·rows·cols·sizeof(T) bytes; rows over 65536 values (float64: 32768) are read 3 times
// Legal  : everything
// Result : 0.97 of copy, 19.88x rung 1, 2.24x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : THREADS_PER_SM 1024 → 512; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int THREADS_PER_SM = 1024;
constexpr int MAX_CLUSTER = 16;
constexpr int WARPS = 8;   // of the blocks that sum columns
constexpr int PARTS = 64;  // of the rows, where the columns are summed by themselves

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename W>
constexpr int VALUES = 32 / sizeof(W);  // columns that a thread owns

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // one load, one store
  T at[N];
};

// The sum over `width` neighbouring threads of the block: up to 32 a power of two, else whole
// warps. `found` is not the one of the call before: no thread can write into sums that another one
// still reads, and one barrier is enough.
template <typename W>
__device__ W sum_block(W sum, int width, W* found) {
  for (int d = min(width, 32) / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (width > 32) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) found[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = lane < width / 32 ? found[lane] : 0;
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  }
  return sum;
}

// A block is blockDim.x threads along a row, times blockDim.y rows. With CLUSTER, the blocks of a
// cluster share one row.
template <typename T, typename W, int N, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* x, const T* weight, const W* rstd, T* dx, W* partial,
                int64_t rows, int cols) {
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  __shared__ W found[2][32], blocks[2][MAX_CLUSTER];
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
  W dw[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) w[p] = reinterpret_cast<const P*>(weight)[i];
  }

  int turn = 0;
  const int64_t step = int64_t{gridDim.x / size} * blockDim.y;
  for (int64_t base = int64_t{blockIdx.x / size} * blockDim.y; base < rows; base += step) {
    const int64_t row = base + threadIdx.y, first = row * packs;
    const int mine = row < rows ? packs : 0;  // past the end: join, do no more
    const W r = mine > 0 ? rstd[row] : 0;
    P gs[PACKS], xs[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < mine) {
        gs[p] = reinterpret_cast<const P*>(grad)[first + i];
        xs[p] = reinterpret_cast<const P*>(x)[first + i];
      }
    }
    W sum = 0;
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int p = k / N, q = k % N;
      if (p * threads + t < mine) {
        const W dy = static_cast<W>(gs[p].at[q]), g = dy * static_cast<W>(w[p].at[q]);
        const W n = static_cast<W>(xs[p].at[q]) * r;
        sum += g * n;
        dw[k] += dy * n;
      }
    }
    sum = sum_block(sum, blockDim.x, found[turn]);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
      if (static_cast<int>(threadIdx.x) < size) {
        *cluster.map_shared_rank(&blocks[turn][rank], threadIdx.x) = sum;
      }
      cluster.sync();  // all have written to all
      sum = 0;
      for (int block = 0; block < size; ++block) sum += blocks[turn][block];
    }
#endif
    turn ^= 1;
    sum /= cols;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < mine) {
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W g = static_cast<W>(gs[p].at[q]) * static_cast<W>(w[p].at[q]);
          const W n = static_cast<W>(xs[p].at[q]) * r;
          gs[p].at[q] = static_cast<T>(r * (g - n * sum));
        }
        reinterpret_cast<P*>(dx)[first + i] = gs[p];
      }
    }
  }

  partial += blockIdx.x / size * int64_t{cols};
  if (blockDim.x > 32) {
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int i = k / N * threads + t;
      if (i < packs) partial[i * N + k % N] = dw[k];
    }
  } else {  // the rows of a block have columns in common: add them up first
    __shared__ W column[WARPS][32 * VALUES<W>];
    const int number = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      for (int d = blockDim.x; d < 32; d *= 2) dw[k] += __shfl_xor_sync(~0u, dw[k], d);
      const int i = k / N * threads + t;
      if (number % 32 < threads && i < packs) column[number / 32][i * N + k % N] = dw[k];
    }
    __syncthreads();
    for (int c = number; c < cols; c += 32 * WARPS) {
      W sum = 0;
      for (int warp = 0; warp < WARPS; ++warp) sum += column[warp][c];
      partial[c] = sum;
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
__global__ void finish_kernel(const W* partial, T* dweight, int64_t parts, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  W dw = 0;
  for (int64_t part = threadIdx.y; part < parts && c < cols; part += WARPS) {
    dw += partial[part * cols + c];
  }
  dw = add_warps(dw);
  if (threadIdx.y == 0 && c < cols) dweight[c] = static_cast<T>(dw);
}

// For rows that no cluster can keep, as in rung 1: the rows …
template <typename T, typename W>
__global__ void __launch_bounds__(1024)
    read_twice(const T* grad, const T* x, const T* weight, const W* rstd, T* dx, int64_t cols) {
  __shared__ W found[32];
  const int64_t row = blockIdx.x, first = row * cols;
  const W r = rstd[row];
  W sum = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]) * static_cast<W>(weight[c]);
    sum += g * static_cast<W>(x[first + c]) * r;
  }
  sum = sum_block(sum, blockDim.x, found) / cols;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]) * static_cast<W>(weight[c]);
    dx[first + c] = static_cast<T>(r * (g - static_cast<W>(x[first + c]) * r * sum));
  }
}

// … and the columns.
template <typename T, typename W>
__global__ void sum_columns(const T* grad, const T* x, const W* rstd, W* partial, int64_t rows,
                            int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  W dw = 0;
  if (c < cols) {
    for (int64_t row = blockIdx.y * WARPS + threadIdx.y; row < rows; row += WARPS * gridDim.y) {
      dw += static_cast<W>(grad[row * cols + c]) * static_cast<W>(x[row * cols + c]) * rstd[row];
    }
  }
  dw = add_warps(dw);
  if (threadIdx.y == 0 && c < cols) partial[blockIdx.y * cols + c] = dw;
}

// How a problem is cut. The width of x decides how many columns a thread owns: 8, or 4 of float64.
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
extern "C" int64_t rms_norm_backward_workspace(int64_t rows, int64_t cols) {
  return cols * std::max(plan_of(rows, cols, 4).parts, plan_of(rows, cols, 8).parts);
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
  const Plan plan = plan_of(rows, cols, VALUES<W>);
  cudaError_t error = cudaSuccess;
  if (plan.size == 0) {
    if (rows > INT32_MAX) return cudaErrorInvalidValue;
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(grad, x, weight, rstd, dx, cols);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const dim3 grid(static_cast<unsigned>((cols + 31) / 32), static_cast<unsigned>(plan.parts));
    sum_columns<<<grid, dim3(32, WARPS), 0, stream>>>(grad, x, rstd, partial, rows, cols);
    error = cudaGetLastError();
  } else {
    auto kernel = aligned ? rows_kernel<T, W, N, false> : rows_kernel<T, W, 1, false>;
    if (plan.size > 1) kernel = aligned ? rows_kernel<T, W, N, true> : rows_kernel<T, W, 1, true>;
    if (plan.size > 8) {  // 8 blocks are always granted, 16 on request
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(plan.parts * plan.size);
    config.blockDim = dim3(plan.lanes, plan.rows);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = plan.size > 1;
    error = cudaLaunchKernelEx(&config, kernel, grad, x, weight, rstd, dx, partial, rows,
                               static_cast<int>(cols));
  }
  if (error != cudaSuccess) return error;
  finish_kernel<<<static_cast<unsigned>((cols + 31) / 32), dim3(32, WARPS), 0, stream>>>(
      partial, dweight, plan.parts, cols);
  return cudaGetLastError();
}

extern "C" cudaError_t rms_norm_backward_launch_f32(const float* grad, const float* x,
                                                    const float* weight, const float* rstd,
                                                    float* dx, float* dweight, float* partial,
                                                    int64_t rows, int64_t cols,
                                                    cudaStream_t stream) {
  return launch(grad, x, weight, rstd, dx, dweight, partial, rows, cols, stream);
}

extern "C" cudaError_t rms_norm_backward_launch_f64(const double* grad, const double* x,
                                                    const double* weight, const double* rstd,
                                                    double* dx, double* dweight, double* partial,
                                                    int64_t rows, int64_t cols,
                                                    cudaStream_t stream) {
  return launch(grad, x, weight, rstd, dx, dweight, partial, rows, cols, stream);
}

extern "C" cudaError_t rms_norm_backward_launch_f16(const __half* grad, const __half* x,
                                                    const __half* weight, const float* rstd,
                                                    __half* dx, __half* dweight, float* partial,
                                                    int64_t rows, int64_t cols,
                                                    cudaStream_t stream) {
  return launch(grad, x, weight, rstd, dx, dweight, partial, rows, cols, stream);
}

extern "C" cudaError_t rms_norm_backward_launch_bf16(const __nv_bfloat16* grad,
                                                     const __nv_bfloat16* x,
                                                     const __nv_bfloat16* weight, const float* rstd,
                                                     __nv_bfloat16* dx, __nv_bfloat16* dweight,
                                                     float* partial, int64_t rows, int64_t cols,
                                                     cudaStream_t stream) {
  return launch(grad, x, weight, rstd, dx, dweight, partial, rows, cols, stream);
}
