// 5_any_row.cu: every row length and every alignment
// Before : rungs 2 and 3 want rows that begin on 16-byte boundaries, and give a short one a whole warp
// Idea   : a row is a head of single values, packs of 16 bytes on boundaries of x, and a tail. Several
//          rows a warp, a warp a row or a block a row, by the length
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over 16384 values (float64: 8192) are read twice
// Legal  : everything
// Result : 0.96 of copy, 1.11x rung 1, 1.37x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int SHORT = 8, LONG = 32;  // registers that hold values of the row, a thread

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {
  T at[N<T>];
};

// Reads past L1, which is left to weight: all rows need that, and x only one.
template <typename T>
__device__ Pack<T> load_once(const T* from) {
  const int4 bits = __ldcg(reinterpret_cast<const int4*>(from));
  Pack<T> pack;
  memcpy(&pack, &bits, 16);
  return pack;
}

template <typename T>
__device__ Pack<T> load(const T* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < N<T>; ++k) pack.at[k] = from[k];
  return pack;
}

template <typename T>
__device__ void store(T* to, Pack<T> pack, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
  } else {
#pragma unroll
    for (int k = 0; k < N<T>; ++k) to[k] = pack.at[k];
  }
}

__device__ bool on16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// The sum over `width` neighbouring threads: up to 32 a power of two, else whole warps.
template <typename W>
__device__ W sum_block(W value, int width) {
  for (int d = min(width, 32) / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (width > 32) {
    __shared__ W found[32];
    const int lane = threadIdx.x % 32;
    if (lane == 0) found[threadIdx.x / 32] = value;
    __syncthreads();
    value = lane < width / 32 ? found[lane] : 0;
    for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  }
  return value;
}

// A block is blockDim.x threads along a row, times blockDim.y rows.
template <typename T, typename W, int REGISTERS>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_row(const T* x, const T* weight, T* out, W* rstd_out, int64_t rows, int64_t cols, W eps) {
  constexpr int VALUES = REGISTERS * 4 / sizeof(W), PACKS = VALUES / N<T>;
  const int t = threadIdx.x, threads = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, first = row * cols;
  const int length = row < rows ? static_cast<int>(cols) : 0;  // past the end: join, do no more
  // The row is: head · packs on 16-byte boundaries of x · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(x + first) % 16) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;
  const int64_t body = first + head;

  Pack<T> pack[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = load_once(x + body + i * N<T>);
  }
  T rest = t < singles ? x[first + single] : static_cast<T>(0.f);

  W value[VALUES], sum = static_cast<W>(rest) * static_cast<W>(rest);
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : 0;
    sum += value[k] * value[k];
  }
  sum = sum_block(sum, blockDim.x);
  const W rstd = 1 / sqrt(sum / cols + eps);

  const bool alike = on16(weight + head);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
      const Pack<T> w = load(weight + head + i * N<T>, alike);
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * rstd * static_cast<W>(w.at[k]));
      }
      store(out + body + i * N<T>, pack[p], on16(out + body));
    }
  }
  if (t < singles) {
    out[first + single] =
        static_cast<T>(static_cast<W>(rest) * rstd * static_cast<W>(weight[single]));
  }
  if (t == 0 && row < rows) rstd_out[row] = rstd;  // the gradient needs it
}

// For rows that no block can keep: rung 1.
template <typename T, typename W>
__global__ void __launch_bounds__(1024)
    read_twice(const T* x, const T* weight, T* out, W* rstd_out, int64_t cols, W eps) {
  const int64_t first = int64_t{blockIdx.x} * cols;
  W sum = 0;
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W value = static_cast<W>(x[first + c]);
    sum += value * value;
  }
  const W rstd = 1 / sqrt(sum_block(sum, blockDim.x) / cols + eps);
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    out[first + c] =
        static_cast<T>(static_cast<W>(x[first + c]) * rstd * static_cast<W>(weight[c]));
  }
  if (threadIdx.x == 0) rstd_out[blockIdx.x] = rstd;
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double epsilon, cudaStream_t stream) {
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(W), VALUES = LONG * 4 / sizeof(W);
  const W eps = static_cast<W>(epsilon);
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0;
  if (cols <= 32 * VALUES) {         // a few lanes a row: 256 threads, several rows a block
    int lanes = odd ? 2 * N<T> : 1;  // enough for the singles of head and tail
    while (lanes < 32 && lanes * SHORT_VALUES < cols) lanes *= 2;
    const dim3 block(lanes, 256 / lanes);
    const int64_t grid = (rows + block.y - 1) / block.y;
    if (grid > INT32_MAX) return cudaErrorInvalidValue;
    const bool is_short = cols <= 32 * SHORT_VALUES;
    const auto kernel = is_short ? keep_row<T, W, SHORT> : keep_row<T, W, LONG>;
    kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, weight, out, rstd, rows, cols,
                                                              eps);
    return cudaGetLastError();
  }
  if (rows > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(rows);
  if (cols > MAX_BLOCK * VALUES) {
    read_twice<<<grid, 1024, 0, stream>>>(x, weight, out, rstd, cols, eps);
  } else {
    const auto block = static_cast<unsigned>(32 * ((cols + 32 * VALUES - 1) / (32 * VALUES)));
    keep_row<T, W, LONG><<<grid, block, 0, stream>>>(x, weight, out, rstd, rows, cols, eps);
  }
  return cudaGetLastError();
}

extern "C" cudaError_t rms_norm_launch_f32(const float* x, const float* weight, float* out,
                                           float* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_f64(const double* x, const double* weight, double* out,
                                           double* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_f16(const __half* x, const __half* weight, __half* out,
                                           float* rstd, int64_t rows, int64_t cols, double eps,
                                           cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t rms_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                            __nv_bfloat16* out, float* rstd, int64_t rows,
                                            int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, weight, out, rstd, rows, cols, eps, stream);
}
