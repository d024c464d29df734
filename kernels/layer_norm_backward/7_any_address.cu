// 7_any_address.cu: rows that begin anywhere still travel 16 bytes at a time
// Before : rows of 4099 values begin at no multiple of 16 bytes, and rung 5 moves them one by one:
//          those of 16 bits without an asynchronous copy, because none is that small
// Idea   : a block copies all 16-byte pieces that hold a part of its row, also the neighbours' in
//          the first and the last piece, to the same place between the boundaries in shared memory.
//          There a thread can read any value, so neighbouring threads own neighbouring columns
// Cost   : 3·rows·cols·sizeof(T) bytes, and 8 bytes a column and block for the sums
// Legal  : cols ≤ 8192 (float64: 4096), any alignment
// Result : 0.80 of copy, 27.31x rung 1, 1.86x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : VALUES 32 → 64: half the threads, twice the columns; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;
constexpr int THREADS_PER_SM = 1024;
constexpr int WARPS = 8;  // of the blocks that add up the blocks' sums

template <typename T>
constexpr int AHEAD = sizeof(T) == 2 ? 2 : 1;  // rows on their way: 64 KB an SM

template <typename W>
constexpr int VALUES = 32 / sizeof(W);  // columns that a thread owns

// Starts the copy of row[0 … cols-1] to `to`, as far behind a 16-byte boundary as row is. first and
// last bound the whole tensor: pieces that reach beyond are copied value by value.
template <typename T>
__device__ void start_copy(char* to, const T* row, int cols, const T* first, const T* last) {
  constexpr int N = 16 / sizeof(T);
  const int before = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
  T* const shared = reinterpret_cast<T*>(to);
#pragma unroll 1
  for (int i = threadIdx.x * N; i < before + cols; i += blockDim.x * N) {
    const T* const from = row - before + i;
    if (from >= first && from + N <= last) {
      __pipeline_memcpy_async(shared + i, from, 16);
    } else {
#pragma unroll 1
      for (int k = 0; k < N; ++k) {
        if (from + k >= first && from + k < last) shared[i + k] = from[k];
      }
    }
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
template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                const W* rstd, T* dx, W* partial, int64_t rows, int cols) {
  __shared__ Sums<W> found[2][32];
  const int t = threadIdx.x, threads = blockDim.x, lane = t % 32, warps = threads / 32;

  extern __shared__ uint4 queue[];  // of rows, each with room for 16 bytes more
  const int length = (cols * static_cast<int>(sizeof(T)) + 31) / 16 * 16;
  const auto place = [&](int slot, int tensor) {
    return reinterpret_cast<char*>(queue) + (slot * 2 + tensor) * length;
  };
  const auto request = [&](int64_t row, int slot) {
    if (row < rows) {
      start_copy(place(slot, 0), grad + row * cols, cols, grad, grad + rows * cols);
      start_copy(place(slot, 1), x + row * cols, cols, x, x + rows * cols);
    }
    __pipeline_commit();
  };

  T w[VALUES<W>];
  W dw[VALUES<W>] = {}, db[VALUES<W>] = {};
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    if (k * threads + t < cols) w[k] = weight[k * threads + t];
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
    __syncthreads();  // all have waited for their own copies
    const auto begin = [](const T* at) { return reinterpret_cast<uintptr_t>(at) % 16; };
    const T* gs = reinterpret_cast<const T*>(place(slot, 0) + begin(grad + row * cols));
    const T* xs = reinterpret_cast<const T*>(place(slot, 1) + begin(x + row * cols));
    W g[VALUES<W>], n[VALUES<W>];
    Sums<W> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int c = k * threads + t;
      if (c < cols) {
        const W dy = static_cast<W>(gs[c]);
        g[k] = dy * static_cast<W>(w[k]);
        n[k] = (static_cast<W>(xs[c]) - m) * r;
        sums.g += g[k];
        sums.gn += g[k] * n[k];
        dw[k] += dy * n[k];
        db[k] += dy;
      }
    }
    sums = sum_warp(sums);
    // `found` is not the one of the row before, which another warp may still be reading.
    if (lane == 0) found[turn][t / 32] = sums;
    __syncthreads();
    sums = lane < warps ? found[turn][lane] : Sums<W>{0, 0};
    request(row + AHEAD<T> * step, slot);  // all have read what it overwrites
    slot = (slot + 1) % AHEAD<T>;
    sums = sum_warp(sums);
    turn ^= 1;

    const W constant = -r * sums.g * per_column, slope = -r * sums.gn * per_column;
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int c = k * threads + t;
      if (c < cols) {
        W value = g[k] * r + (n[k] * slope + constant);
        if (grad_sum != nullptr) value += static_cast<W>(grad_sum[row * cols + c]);
        dx[row * cols + c] = static_cast<T>(value);
      }
    }
  }
  const int64_t part = blockIdx.x;
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    const int c = k * threads + t;
    if (c < cols) {
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
  if (cols > MAX_BLOCK * VALUES<W>) return cudaErrorInvalidValue;
  auto kernel = rows_kernel<T, W>;
  const int threads = threads_of(cols, VALUES<W>), length = static_cast<int>(cols);
  const auto blocks = static_cast<unsigned>(blocks_of(rows, cols, VALUES<W>));
  const int queue = (length * static_cast<int>(sizeof(T)) + 31) / 16 * 16 * 2 * AHEAD<T>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, queue);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the launch of another rung would find it
    return cudaErrorNotSupported;
  }
  kernel<<<blocks, threads, queue, stream>>>(grad, grad_sum, x, weight, mean, rstd, dx, partial,
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
