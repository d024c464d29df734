// 4_short_rows.cu: several rows a block, for rows that a warp can keep
// Before : rung 3 gives a row of 64 values a whole block, and refuses rows of odd length
// Idea   : a row has as many lanes of a warp as it needs, so a block of 256 threads takes 8 rows or
//          more at once, and no row waits at a barrier. What cannot be read as packs is read one by
//          one. The sums of columns that a block's rows have in common are added up at the end
// Cost   : 3·rows·cols·sizeof(T) bytes, and 8 bytes a column and block for the sums
// Legal  : cols ≤ 512 (float64: 256)
// Result : 0.68 of copy, 682.55x rung 1, 9.05x eager  (H200, float32 (65536, 128), CUDA 13.0)
// Try    : VALUES 64 → 32, and rows of 512 in a benchmark of your own; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;
constexpr int WARPS = BLOCK / 32;
constexpr int BLOCKS_PER_SM = 2;

template <typename W>
constexpr int VALUES = 64 / sizeof(W);  // columns that a thread owns, at most

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // one load, one store
  T at[N];
};

// The sum over the lanes of a row, a power of two.
template <typename W>
__device__ W sum_lanes(W value, int lanes) {
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// A block is blockDim.x lanes along a row, times blockDim.y rows. grad_sum is the gradient that
// reaches x past the norm, or null.
template <typename T, typename W, int N>
__global__ void __launch_bounds__(BLOCK, BLOCKS_PER_SM)
    rows_kernel(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                const W* rstd, T* dx, W* partial, int64_t rows, int cols) {
  using P = Pack<T, N>;
  constexpr int PACKS = VALUES<W> / N;
  const int packs = cols / N, t = threadIdx.x, lanes = blockDim.x;
  P w[PACKS];
  W dw[VALUES<W>] = {}, db[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (p * lanes + t < packs) w[p] = reinterpret_cast<const P*>(weight)[p * lanes + t];
  }
  const W per_column = W(1) / cols;
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t base = int64_t{blockIdx.x} * blockDim.y; base < rows; base += step) {
    const int64_t row = base + threadIdx.y, first = row * packs;
    const int mine = row < rows ? packs : 0;  // past the end: join in the shuffles, do no more
    const W m = mine > 0 ? mean[row] : 0, r = mine > 0 ? rstd[row] : 0;
    P gs[PACKS], xs[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * lanes + t;
      if (i < mine) {
        gs[p] = reinterpret_cast<const P*>(grad)[first + i];
        xs[p] = reinterpret_cast<const P*>(x)[first + i];
      }
    }
    W sum_g = 0, sum_gn = 0;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      if (p * lanes + t < mine) {
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W dy = static_cast<W>(gs[p].at[q]), g = dy * static_cast<W>(w[p].at[q]);
          const W n = (static_cast<W>(xs[p].at[q]) - m) * r;
          sum_g += g;
          sum_gn += g * n;
          dw[p * N + q] += dy * n;
          db[p * N + q] += dy;
        }
      }
    }
    const W constant = -r * per_column * sum_lanes(sum_g, lanes);
    const W slope = -r * per_column * sum_lanes(sum_gn, lanes);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * lanes + t;
      if (i < mine) {
        P past;
        if (grad_sum != nullptr) past = reinterpret_cast<const P*>(grad_sum)[first + i];
#pragma unroll
        for (int q = 0; q < N; ++q) {
          const W g = static_cast<W>(gs[p].at[q]) * static_cast<W>(w[p].at[q]);
          const W n = (static_cast<W>(xs[p].at[q]) - m) * r;
          W value = g * r + (n * slope + constant);
          if (grad_sum != nullptr) value += static_cast<W>(past.at[q]);
          gs[p].at[q] = static_cast<T>(value);
        }
        reinterpret_cast<P*>(dx)[first + i] = gs[p];
      }
    }
  }

  // The rows of a warp have columns in common, and so have the warps: one sum a column and block.
  __shared__ W column[WARPS][32 * VALUES<W>];
  const int number = threadIdx.y * lanes + t;
  for (int which = 0; which < 2; ++which) {
    __syncthreads();  // nobody reads `column` any more
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      W sum = which == 0 ? dw[k] : db[k];
      for (int d = lanes; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
      const int i = k / N * lanes + t;
      if (number % 32 < lanes && i < packs) column[number / 32][i * N + k % N] = sum;
    }
    __syncthreads();
    for (int c = number; c < cols; c += BLOCK) {
      W sum = 0;
      for (int warp = 0; warp < WARPS; ++warp) sum += column[warp][c];
      partial[(int64_t{2} * blockIdx.x + which) * cols + c] = sum;
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

int lanes_of(int64_t cols, int values) {
  int lanes = 1;
  while (lanes < 32 && lanes * values < cols) lanes *= 2;
  return lanes;
}

int64_t blocks_of(int64_t rows, int64_t cols, int values) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t a_block = BLOCK / lanes_of(cols, values);
  return std::min<int64_t>((rows + a_block - 1) / a_block, BLOCKS_PER_SM * sms);
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
  if (cols > 32 * VALUES<W>) return cudaErrorInvalidValue;
  uintptr_t bits = cols % N * sizeof(T);
  for (const T* pointer : {grad, grad_sum, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  const int lanes = lanes_of(cols, VALUES<W>), length = static_cast<int>(cols);
  const auto blocks = static_cast<unsigned>(blocks_of(rows, cols, VALUES<W>));
  auto kernel = bits % 16 == 0 ? rows_kernel<T, W, N> : rows_kernel<T, W, 1>;
  kernel<<<blocks, dim3(lanes, BLOCK / lanes), 0, stream>>>(grad, grad_sum, x, weight, mean, rstd,
                                                            dx, partial, rows, length);
  const cudaError_t error = cudaGetLastError();
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
