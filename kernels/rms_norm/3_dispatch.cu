// 3_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rung 2 refuses odd and long rows, and gives a row of 64 values a whole warp
// Idea   : one kernel whose rows are spread over a few lanes, a warp, a block or a cluster, chosen
//          by row length; values before and after the 16-byte packs go one by one
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over 262144 values (float64: 131072) are read twice
// Legal  : everything
// Result : 0.96 of copy, 1.13x rung 1, 1.36x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MAX_CLUSTER = 16;
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

// A block is blockDim.x threads along a row, times blockDim.y rows. With CLUSTER, the blocks of a
// cluster share one row.
template <typename T, typename W, int REGISTERS, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_row(const T* x, const T* weight, T* out, W* rstd_out, int64_t rows, int64_t cols, W eps) {
  constexpr int VALUES = REGISTERS * 4 / sizeof(W), PACKS = VALUES / N<T>;
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
    size = cluster.num_blocks();
    rank = cluster.block_rank();
  }
#endif
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;
  const int64_t row = int64_t{blockIdx.x / size} * blockDim.y + threadIdx.y, first = row * cols;
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
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ W blocks[MAX_CLUSTER];
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size) {
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = sum;
    }
    cluster.sync();  // all have written to all
    sum = 0;
    for (int block = 0; block < size; ++block) sum += blocks[block];
  }
#endif
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

// For rows that no cluster can keep: rung 1.
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
    const auto kernel = is_short ? keep_row<T, W, SHORT, false> : keep_row<T, W, LONG, false>;
    kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, weight, out, rstd, rows, cols,
                                                              eps);
    return cudaGetLastError();
  }
  int size = 1;  // blocks a row
  while (cols > int64_t{size} * MAX_BLOCK * VALUES) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES;
  const auto block = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  if (rows * std::min(size, MAX_CLUSTER) > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(rows);
  if (size == 1) {
    keep_row<T, W, LONG, false><<<grid, block, 0, stream>>>(x, weight, out, rstd, rows, cols, eps);
    return cudaGetLastError();
  }
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  if (size > MAX_CLUSTER || !clusters) {
    read_twice<<<grid, 1024, 0, stream>>>(x, weight, out, rstd, cols, eps);
    return cudaGetLastError();
  }
  const auto kernel = keep_row<T, W, LONG, true>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid * size;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, x, weight, out, rstd, rows, cols, eps);
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
