// 3_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rung 2 refuses odd and long rows, and gives a row of 64 values a whole block
// Idea   : the rows are spread over a few lanes, a warp, a block or a cluster of blocks that add up
//          through distributed shared memory; values outside the 16-byte packs go one by one
// Cost   : 3·rows·cols·sizeof(T) bytes; rows over 262144 values (float64: 131072) are read twice
// Legal  : everything
// Result : 1.02 of copy, 1.28x rung 1, 2.01x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : MAX_CLUSTER 16 → 1: what do long rows cost when they are read twice?

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;  // for rows of 16 blocks; the others are cut for 512
constexpr int MAX_CLUSTER = 16;
constexpr int MAX_ALIGNED = 512;  // threads a block, for rows on 16-byte boundaries
template <typename T>
constexpr int KEPT = 64 / sizeof(T);  // values of each tensor that a thread keeps of those

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
constexpr int LONG = 64 / sizeof(Wide<T>) / N<T>;  // packs of each tensor that a thread keeps
constexpr int SHORT = 1;                           // and of rows that are short

template <typename T>
struct alignas(16) Pack {
  T at[N<T>];
};

// The four 16-bit pairs of a pack become floats with one shift or mask each, and pairs are rounded
// together: half the instructions of one value at a time.
template <typename T, typename W>
__device__ void widen(Pack<T> pack, W (&value)[N<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the high half of a float
    unsigned bits[4];
    memcpy(bits, &pack, 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      value[2 * k] = __uint_as_float(bits[k] << 16);
      value[2 * k + 1] = __uint_as_float(bits[k] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int k = 0; k < N<T>; ++k) value[k] = static_cast<W>(pack.at[k]);
  }
}

template <typename T, typename W>
__device__ Pack<T> narrow(const W (&value)[N<T>]) {
  Pack<T> pack;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    __nv_bfloat162 pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) pair[k] = __floats2bfloat162_rn(value[2 * k], value[2 * k + 1]);
    memcpy(&pack, pair, 16);
  } else if constexpr (std::is_same_v<T, __half>) {
    __half2 pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) pair[k] = __floats2half2_rn(value[2 * k], value[2 * k + 1]);
    memcpy(&pack, pair, 16);
  } else {
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k]);
  }
  return pack;
}

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
template <typename T, int PACKS, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK)
    keep_row(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols) {
  using W = Wide<T>;
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
    size = cluster.num_blocks();
    rank = cluster.block_rank();
  }
#endif
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;
  const int64_t row = int64_t{blockIdx.x / size} * blockDim.y + threadIdx.y;
  const int length = row < rows ? static_cast<int>(cols) : 0;  // past the end: join, do no more
  grad += row * cols;
  out += row * cols;
  dx += row * cols;
  // A row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const auto place = reinterpret_cast<uintptr_t>(grad) % 16;
  const int before = (16 - place) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;
  const bool alike = reinterpret_cast<uintptr_t>(out) % 16 == place &&
                     reinterpret_cast<uintptr_t>(dx) % 16 == place;

  Pack<T> g[PACKS], y[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
      g[p] = reinterpret_cast<const Pack<T>*>(grad + head)[i];
      if (alike) {
        y[p] = reinterpret_cast<const Pack<T>*>(out + head)[i];
      } else {  // the three tensors lie differently between the boundaries
#pragma unroll
        for (int k = 0; k < N<T>; ++k) y[p].at[k] = out[head + i * N<T> + k];
      }
    }
  }
  W g_rest = 0, y_rest = 0;
  if (t < singles) {
    g_rest = static_cast<W>(grad[single]);
    y_rest = static_cast<W>(out[single]);
  }
  W dot = g_rest * y_rest;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t < packs) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) dot += static_cast<W>(g[p].at[k]) * static_cast<W>(y[p].at[k]);
    }
  }
  dot = sum_block(dot, blockDim.x);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ W blocks[MAX_CLUSTER];
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size)
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = dot;
    cluster.sync();  // all have written to all
    dot = 0;
    for (int block = 0; block < size; ++block) dot += blocks[block];
  }
#endif

  if (t < singles) dx[single] = static_cast<T>(y_rest * (g_rest - dot));
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        const W value = static_cast<W>(y[p].at[k]) * (static_cast<W>(g[p].at[k]) - dot);
        g[p].at[k] = static_cast<T>(value);
      }
      if (alike) {
        reinterpret_cast<Pack<T>*>(dx + head)[i] = g[p];
      } else {
#pragma unroll
        for (int k = 0; k < N<T>; ++k) dx[head + i * N<T> + k] = g[p].at[k];
      }
    }
  }
}

// Rung 2, and the same in a cluster: rows on 16-byte boundaries, long enough for whole warps. FULL:
// every thread has all of its packs.
template <typename T, bool CLUSTER, bool FULL>
__global__ void __launch_bounds__(MAX_ALIGNED, 2)
    keep_aligned_row(const T* grad, const T* out, T* dx, int packs) {
  using W = Wide<T>;
  constexpr int PACKS = KEPT<T> / N<T>;
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
    size = cluster.num_blocks();
    rank = cluster.block_rank();
  }
#endif
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;
  const int64_t first = int64_t{blockIdx.x / size} * packs;
  Pack<T> g[PACKS], y[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (FULL || i < packs) {
      g[p] = reinterpret_cast<const Pack<T>*>(grad)[first + i];
      y[p] = reinterpret_cast<const Pack<T>*>(out)[first + i];
    }
  }
  W dot = 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (FULL || p * threads + t < packs) {
      W a[N<T>], b[N<T>];
      widen(g[p], a);
      widen(y[p], b);
#pragma unroll
      for (int k = 0; k < N<T>; ++k) dot += a[k] * b[k];
    }
  }
  dot = sum_block(dot, blockDim.x);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ W blocks[MAX_CLUSTER];
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size)
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = dot;
    cluster.sync();  // all have written to all
    dot = 0;
    for (int block = 0; block < size; ++block) dot += blocks[block];
  }
#endif
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (FULL || i < packs) {
      W a[N<T>], b[N<T>];
      widen(g[p], a);
      widen(y[p], b);
#pragma unroll
      for (int k = 0; k < N<T>; ++k) a[k] = b[k] * (a[k] - dot);
      reinterpret_cast<Pack<T>*>(dx)[first + i] = narrow<T, W>(a);
    }
  }
}

// For rows that no cluster can keep: rung 1.
template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK)
    read_twice(const T* grad, const T* out, T* dx, int64_t cols) {
  using W = Wide<T>;
  const int64_t first = int64_t{blockIdx.x} * cols;
  W dot = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    dot += static_cast<W>(grad[first + c]) * static_cast<W>(out[first + c]);
  }
  dot = sum_block(dot, blockDim.x);
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]), y = static_cast<W>(out[first + c]);
    dx[first + c] = static_cast<T>(y * (g - dot));
  }
}

template <typename T>
cudaError_t launch(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(grad) % 16 != 0;
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  const bool aligned = !odd && reinterpret_cast<uintptr_t>(out) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(dx) % 16 == 0;
  if (aligned && cols >= 32 * KEPT<T> &&
      cols <= int64_t{clusters ? MAX_CLUSTER : 1} * MAX_ALIGNED * KEPT<T> &&
      rows * MAX_CLUSTER <= INT32_MAX) {
    int size = 1;
    while (cols > int64_t{size} * MAX_ALIGNED * KEPT<T>) size *= 2;
    const int64_t per_warp = int64_t{size} * 32 * KEPT<T>;
    const auto block = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
    const bool full = cols == int64_t{size} * block * KEPT<T>;
    auto kernel = full ? keep_aligned_row<T, false, true> : keep_aligned_row<T, false, false>;
    if (size > 1)
      kernel = full ? keep_aligned_row<T, true, true> : keep_aligned_row<T, true, false>;
    if (size > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(rows * size);
    config.blockDim = block;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = size > 1;
    return cudaLaunchKernelEx(&config, kernel, grad, out, dx, static_cast<int>(cols / N<T>));
  }
  if (cols <= 32 * LONG<T> * N<T>) {  // a few lanes a row: 256 threads, several rows a block
    int lanes = odd ? 2 * N<T> : 1;   // enough for the singles of head and tail
    while (lanes < 32 && lanes * SHORT * N<T> < cols) lanes *= 2;
    const dim3 block(lanes, 256 / lanes);
    const int64_t grid = (rows + block.y - 1) / block.y;
    if (grid > INT32_MAX) return cudaErrorInvalidValue;
    const bool is_short = cols <= 32 * SHORT * N<T>;
    const auto kernel = is_short ? keep_row<T, SHORT, false> : keep_row<T, LONG<T>, false>;
    kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(grad, out, dx, rows, cols);
    return cudaGetLastError();
  }
  const int most = clusters ? MAX_CLUSTER : 1;
  int size = 1;  // blocks a row
  while (size < most && cols > int64_t{size} * 512 * LONG<T> * N<T>) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * LONG<T> * N<T>;
  const int64_t block = 32 * ((cols + per_warp - 1) / per_warp);
  if (rows * size > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(rows * size);
  if (block > MAX_BLOCK) {
    read_twice<<<static_cast<unsigned>(rows), MAX_BLOCK, 0, stream>>>(grad, out, dx, cols);
    return cudaGetLastError();
  }
  if (size == 1) {
    keep_row<T, LONG<T>, false>
        <<<grid, static_cast<unsigned>(block), 0, stream>>>(grad, out, dx, rows, cols);
    return cudaGetLastError();
  }
  const auto kernel = keep_row<T, LONG<T>, true>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(block);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, grad, out, dx, rows, cols);
}

extern "C" cudaError_t softmax_backward_launch_f32(const float* grad, const float* out, float* dx,
                                                   int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_f64(const double* grad, const double* out,
                                                   double* dx, int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_f16(const __half* grad, const __half* out,
                                                   __half* dx, int64_t rows, int64_t cols,
                                                   cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
extern "C" cudaError_t softmax_backward_launch_bf16(const __nv_bfloat16* grad,
                                                    const __nv_bfloat16* out, __nv_bfloat16* dx,
                                                    int64_t rows, int64_t cols,
                                                    cudaStream_t stream) {
  return launch(grad, out, dx, rows, cols, stream);
}
