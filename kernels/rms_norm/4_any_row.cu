// 4_any_row.cu: every row length and every alignment
// Before : rungs 2 and 3 want rows that begin on 16-byte boundaries, and give a short one a whole warp
// Idea   : a row is a head of single values, packs of 16 bytes on boundaries of x, and a tail. Weight
//          is needed in the same packs: every block copies it into shared memory, shifted, once for
//          all of its rows, which begin equally far from a boundary
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over MOST bytes are read twice
// Legal  : everything
// Result : not measured yet
// Try    : a step of gridDim.x - 1 rows (and look at the results); predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MOST = 1 << 15;  // bytes of a row: its weight takes as much shared memory

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {
  T at[N<T>];
};

// The 16 bits of a bfloat16 are the high half of a float: one shift or mask a value, where the cast
// takes two instructions.
template <typename T, typename W>
__device__ void widen(Pack<T> pack, W (&value)[N<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
    for (int k = 0; k < 8; ++k) {
      value[k] = __uint_as_float(k % 2 == 0 ? bits[k / 2] << 16 : bits[k / 2] & 0xffff0000u);
    }
  } else {
    for (int k = 0; k < N<T>; ++k) value[k] = static_cast<W>(pack.at[k]);
  }
}

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
  for (int k = 0; k < N<T>; ++k) pack.at[k] = from[k];
  return pack;
}

template <typename T>
__device__ void store(T* to, Pack<T> pack, bool aligned) {
  if (aligned) *reinterpret_cast<Pack<T>*>(to) = pack;
  for (int k = 0; k < N<T> && !aligned; ++k) to[k] = pack.at[k];
}

__device__ bool on16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T, typename W>
__device__ void add_up_squares(Pack<T> pack, W& sum) {
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += value[k] * value[k];
}

template <typename T, typename W>
__device__ Pack<T> normalize(Pack<T> pack, W rstd, Pack<T> weight) {
  W value[N<T>], w[N<T>];
  widen(pack, value);
  widen(weight, w);
  for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k] * rstd * w[k]);
  return pack;
}

template <typename W>
__device__ W sum_lanes(W value, int width) {  // of neighbours, a power of two
  for (int d = width / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// And of the block's warps.
template <typename W>
__device__ W sum_row(W value, W* found) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = sum_lanes(value, min(static_cast<int>(blockDim.x), 32));
  if (warps <= 1) return value;
  if (lane == 0) found[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_lanes(lane < warps ? found[lane] : 0, 32);
}

// A block is blockDim.x threads along a row, times blockDim.y rows: either one warp or one row. From
// a row to the block's next one it is a multiple of N rows, so that both lie alike.
template <typename T, typename W, int PACKS>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_row(const T* x, const T* weight, T* out, W* rstd_out, int64_t rows, int cols, W eps) {
  extern __shared__ int4 shifted[];
  __shared__ W found[2][MAX_BLOCK / 32];
  const int t = threadIdx.x, threads = blockDim.x;
  // The row is: head · packs on 16-byte boundaries of x · tail. A thread keeps one of the singles.
  const auto skew = reinterpret_cast<uintptr_t>(x + int64_t{blockIdx.x} * cols) % 16;
  const int head = min(cols, static_cast<int>((16 - skew) % 16 / sizeof(T)));
  const int packs = (cols - head) / N<T>, singles = cols - packs * N<T>;
  const int single = t < head ? t : packs * N<T> + t;
  auto w = reinterpret_cast<Pack<T>*>(shifted);
  for (int c = threadIdx.y * threads + t; c < packs * N<T>; c += threads * blockDim.y) {
    reinterpret_cast<T*>(w)[c] = weight[head + c];
  }
  __syncthreads();

  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t row = blockIdx.x + int64_t{gridDim.x} * threadIdx.y;
  for (int turn = 0; row - gridDim.x * threadIdx.y < rows; row += step, turn ^= 1) {
    const bool inside = row < rows;  // lanes past the end join in, and do no more
    const int64_t first = row * cols, body = first + head;
    Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (inside && i < packs) pack[p] = load_once(x + body + i * N<T>);
    }
    const W rest = inside && t < singles ? static_cast<W>(x[first + single]) : 0;
    W sum = rest * rest;
    for (int p = 0; p < PACKS; ++p) {
      if (inside && p * threads + t < packs) add_up_squares(pack[p], sum);
    }
    sum = sum_row(sum, found[turn]);  // the other row's may still be read
    const W rstd = rsqrt(sum / cols + eps);
    if (!inside) continue;

    const bool alike = on16(out + body);
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) store(out + body + i * N<T>, normalize(pack[p], rstd, w[i]), alike);
    }
    if (t < singles) {
      out[first + single] = static_cast<T>(rest * rstd * static_cast<W>(weight[single]));
    }
    if (t == 0) rstd_out[row] = rstd;  // the gradient needs it
  }
}

// Rung 1.
template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    read_twice(const T* x, const T* weight, T* out, W* rstd_out, int64_t cols, W eps) {
  __shared__ W found[MAX_BLOCK / 32];
  const int64_t first = int64_t{blockIdx.x} * cols;
  W sum = 0;
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W value = static_cast<W>(x[first + c]);
    sum += value * value;
  }
  const W rstd = rsqrt(sum_row(sum, found) / cols + eps);
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W normal = static_cast<W>(x[first + c]) * rstd;
    out[first + c] = static_cast<T>(normal * static_cast<W>(weight[c]));
  }
  if (threadIdx.x == 0) rstd_out[blockIdx.x] = rstd;
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double epsilon, cudaStream_t stream) {
  constexpr int FEW = 2, MANY = 4;  // packs a thread: MOST is 16 * MANY * MAX_BLOCK
  const W eps = static_cast<W>(epsilon);
  if (cols * sizeof(T) > MOST) {
    if (rows > INT32_MAX) return cudaErrorInvalidValue;
    read_twice<<<static_cast<unsigned>(rows), MAX_BLOCK, 0, stream>>>(x, weight, out, rstd, cols,
                                                                      eps);
    return cudaGetLastError();
  }
  const int64_t packs = cols / N<T>;
  int threads = 2 * N<T>;  // a row: at least enough for the singles of head and tail
  while (threads < 32 && threads * FEW < packs) threads *= 2;
  const auto kernel = packs <= 32 * FEW ? keep_row<T, W, FEW> : keep_row<T, W, MANY>;
  if (packs > 32 * MANY) threads = static_cast<int>((packs + 32 * MANY - 1) / (32 * MANY) * 32);
  const dim3 block(threads, threads > 32 ? 1 : 256 / threads);
  const auto shared = static_cast<int>(packs * 16);
  int device = 0, sms = 0, fitting = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, threads * block.y, shared);
  if (error != cudaSuccess) return error;
  const int64_t grid = std::min<int64_t>(sms * fitting, rows / block.y) / N<T> * N<T> + N<T>;
  kernel<<<static_cast<unsigned>(grid), block, shared, stream>>>(x, weight, out, rstd, rows,
                                                                 static_cast<int>(cols), eps);
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                  \
  extern "C" cudaError_t rms_norm_launch_##SUFFIX(const T* x, const T* weight, T* out, W* rstd, \
                                                  int64_t rows, int64_t cols, double eps,       \
                                                  cudaStream_t stream) {                        \
    return launch(x, weight, out, rstd, rows, cols, eps, stream);                               \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
