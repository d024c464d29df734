// 3_one_read.cu: a persistent grid computes dx and the column sums from one read
// Before : rung 2 reads grad and x three times, in two kernels that know nothing of each other
// Idea   : as many blocks as the GPU can hold, each walking over rows; a thread owns the same
//          columns in every row and keeps their dweight and dbias in registers until the end
// Cost   : 3·rows·cols·sizeof(T) bytes, and 8 bytes a column and block for the sums
// Legal  : cols·sizeof(T) a multiple of 16, cols ≤ 4096 (float64: 2048), pointers on 16 bytes
// Result : 0.96 of copy, 32.76x rung 1, 2.23x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : THREADS_PER_SM 1024 → 512; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int THREADS_PER_SM = 1024;
constexpr int WARPS = 8;  // of the blocks that add up the blocks' sums

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename W>
constexpr int VALUES = 32 / sizeof(W);  // columns that a thread owns

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

// a and b, each summed over the block. `found` is not the one of the call before: so no thread can
// write into sums that another one still reads, and one barrier is enough.
template <typename W>
__device__ void sum_block(W& a, W& b, W (*found)[2]) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int d = 16; d > 0; d /= 2) {
    a += __shfl_xor_sync(~0u, a, d);
    b += __shfl_xor_sync(~0u, b, d);
  }
  if (lane == 0) {
    found[threadIdx.x / 32][0] = a;
    found[threadIdx.x / 32][1] = b;
  }
  __syncthreads();
  a = lane < warps ? found[lane][0] : 0;
  b = lane < warps ? found[lane][1] : 0;
  for (int d = 16; d > 0; d /= 2) {
    a += __shfl_xor_sync(~0u, a, d);
    b += __shfl_xor_sync(~0u, b, d);
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK, THREADS_PER_SM / MAX_BLOCK)
    rows_kernel(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                const W* rstd, T* dx, W* partial, int64_t rows, int cols) {
  constexpr int PACKS = VALUES<W> / N<T>;
  __shared__ W found[2][MAX_BLOCK / 32][2];
  const int packs = cols / N<T>, t = threadIdx.x;
  Pack<T> w[PACKS];
  W dw[VALUES<W>] = {}, db[VALUES<W>] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) w[p] = reinterpret_cast<const Pack<T>*>(weight)[i];
  }

  int turn = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    const int64_t first = row * packs;
    const W m = mean[row], r = rstd[row];
    Pack<T> gs[PACKS], xs[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * blockDim.x + t;
      if (i < packs) {
        gs[p] = reinterpret_cast<const Pack<T>*>(grad)[first + i];
        xs[p] = reinterpret_cast<const Pack<T>*>(x)[first + i];
      }
    }
    W sum_g = 0, sum_gn = 0;
#pragma unroll
    for (int k = 0; k < VALUES<W>; ++k) {
      const int p = k / N<T>, q = k % N<T>;
      if (p * static_cast<int>(blockDim.x) + t < packs) {
        const W dy = static_cast<W>(gs[p].at[q]), g = dy * static_cast<W>(w[p].at[q]);
        const W n = (static_cast<W>(xs[p].at[q]) - m) * r;
        sum_g += g;
        sum_gn += g * n;
        dw[k] += dy * n;
        db[k] += dy;
      }
    }
    sum_block(sum_g, sum_gn, found[turn]);
    sum_g /= cols;
    sum_gn /= cols;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * blockDim.x + t;
      if (i < packs) {
        Pack<T> past;
        if (grad_sum != nullptr) past = reinterpret_cast<const Pack<T>*>(grad_sum)[first + i];
#pragma unroll
        for (int q = 0; q < N<T>; ++q) {
          const W g = static_cast<W>(gs[p].at[q]) * static_cast<W>(w[p].at[q]);
          const W n = (static_cast<W>(xs[p].at[q]) - m) * r;
          W value = r * (g - sum_g - n * sum_gn);
          if (grad_sum != nullptr) value += static_cast<W>(past.at[q]);
          gs[p].at[q] = static_cast<T>(value);
        }
        reinterpret_cast<Pack<T>*>(dx)[first + i] = gs[p];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < VALUES<W>; ++k) {
    const int i = k / N<T> * blockDim.x + t, c = i * N<T> + k % N<T>;
    if (i < packs) {
      partial[int64_t{2} * blockIdx.x * cols + c] = dw[k];
      partial[(int64_t{2} * blockIdx.x + 1) * cols + c] = db[k];
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
__global__ void finish_kernel(const W* partial, T* dweight, T* dbias, int parts, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  W dw = 0, db = 0;
  for (int part = threadIdx.y; part < parts && c < cols; part += WARPS) {
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

// Blocks of the first kernel: for 8 values a thread; for float64's 4, half of that is resident.
int64_t blocks_of(int64_t rows, int64_t cols) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t threads = std::min<int64_t>(MAX_BLOCK, (cols + 255) / 256 * 32);
  return std::min(rows, sms * (THREADS_PER_SM / threads));
}

// How many values the launcher wants in `partial`.
extern "C" int64_t layer_norm_backward_workspace(int64_t rows, int64_t cols) {
  return 2 * blocks_of(rows, cols) * cols;
}

template <typename T, typename W>
cudaError_t launch(const T* grad, const T* grad_sum, const T* x, const T* weight, const W* mean,
                   const W* rstd, T* dx, T* dweight, T* dbias, W* partial, int64_t rows,
                   int64_t cols, cudaStream_t stream) {
  uintptr_t bits = 0;
  for (const T* pointer : {grad, grad_sum, x, weight, static_cast<const T*>(dx)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  if (bits % 16 != 0 || cols % N<T> != 0 || cols > MAX_BLOCK * VALUES<W>) {
    return cudaErrorInvalidValue;
  }
  const int64_t blocks = blocks_of(rows, cols);
  const int64_t warps = (cols + 32 * VALUES<W> - 1) / (32 * VALUES<W>);
  rows_kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(32 * warps), 0, stream>>>(
      grad, grad_sum, x, weight, mean, rstd, dx, partial, rows, static_cast<int>(cols));
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  finish_kernel<<<static_cast<unsigned>((cols + 31) / 32), dim3(32, WARPS), 0, stream>>>(
      partial, dweight, dbias, static_cast<int>(blocks), cols);
  return cudaGetLastError();
}

extern "C" cudaError_t layer_norm_backward_launch_f32(const float* grad, const float* grad_sum,
                                                      const float* x, const float* weight,
                                                      const float* mean, const float* rstd,
                                                      float* dx, float* dweight, float* dbias,
                                                      float* partial, int64_t rows, int64_t cols,
                                                      cudaStream_t stream) {
  return launch(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial, rows, cols,
                stream);
}

extern "C" cudaError_t layer_norm_backward_launch_f64(const double* grad, const double* grad_sum,
                                                      const double* x, const double* weight,
                                                      const double* mean, const double* rstd,
                                                      double* dx, double* dweight, double* dbias,
                                                      double* partial, int64_t rows, int64_t cols,
                                                      cudaStream_t stream) {
  return launch(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial, rows, cols,
                stream);
}

extern "C" cudaError_t layer_norm_backward_launch_f16(const __half* grad, const __half* grad_sum,
                                                      const __half* x, const __half* weight,
                                                      const float* mean, const float* rstd,
                                                      __half* dx, __half* dweight, __half* dbias,
                                                      float* partial, int64_t rows, int64_t cols,
                                                      cudaStream_t stream) {
  return launch(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial, rows, cols,
                stream);
}

extern "C" cudaError_t layer_norm_backward_launch_bf16(
    const __nv_bfloat16* grad, const __nv_bfloat16* grad_sum, const __nv_bfloat16* x,
    const __nv_bfloat16* weight, const float* mean, const float* rstd, __nv_bfloat16* dx,
    __nv_bfloat16* dweight, __nv_bfloat16* dbias, float* partial, int64_t rows, int64_t cols,
    cudaStream_t stream) {
  return launch(grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial, rows, cols,
                stream);
}
