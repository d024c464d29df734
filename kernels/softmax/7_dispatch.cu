// 7_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rungs 5 and 6 refuse odd row lengths, and give a row of 64 values a whole block
// Idea   : one kernel whose rows are spread over a few lanes, a warp, a block or a cluster, chosen
//          by row length; up to 15 values before and after the 16-byte packs go one by one.
//          What long rows wait for: instructions (2^x without denormals, two values converted at a
//          time) and, in 16 bits, each other (the next row loads meanwhile)
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over 262144 values (float64: 131072) are read twice
// Legal  : everything
// Result : 0.96 of copy, 12.94x rung 1, 1.59x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int SHORT = 8, LONG = 32;  // registers that hold values of the row, a thread
constexpr int TURNS = 4;             // long 16-bit rows that a cluster takes, one after the other

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

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

template <typename T>
__device__ Pack<T> load_once(const T* from) {
  const int4 bits = __ldcg(reinterpret_cast<const int4*>(from));
  Pack<T> pack;
  memcpy(&pack, &bits, 16);
  return pack;
}

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

// e^x to 22 bits; __expf takes three instructions more, to be right for denormals as well.
#ifdef __SIMT_CPU__
__device__ float fast_exp(float x) { return expf(x); }
#else
__device__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
#endif
__device__ double fast_exp(double x) { return exp(x); }

// Of `width` neighbouring lanes, a power of two.
template <typename W>
__device__ W largest_of(W value, int width) {
#pragma unroll
  for (int d = width / 2; d > 0; d /= 2) value = fmax(value, __shfl_xor_sync(~0u, value, d));
  return value;
}

template <typename W>
__device__ W sum_of(W value, int width) {
#pragma unroll
  for (int d = width / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// Joins their parts: the largest value first, so that a lane has one exponential to compute.
template <typename W>
__device__ Part<W> join_lanes(Part<W> part, int width) {
  const W largest = largest_of(part.largest, width);
  return {largest, sum_of(part.sum * fast_exp(part.largest - largest), width)};
}

// Joins what the warps of the block found. `found` is not the one of the call before.
template <typename W>
__device__ Part<W> join_warps(Part<W> part, Part<W>* found) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps <= 1) return part;
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  return join_lanes(lane < warps ? found[lane] : Part<W>{LOWEST<W>, 0}, 32);
}

// Rungs 5 and 6: rows on 16-byte boundaries, and long enough for whole warps. FULL: every thread has
// all of its packs. A long 16-bit row takes half the registers until it is widened: there is room
// for the next row, which loads while the blocks of the cluster wait for each other.
template <typename T, bool CLUSTER, bool FULL>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_aligned_row(const T* x, T* out, int64_t rows, int packs) {
  using W = Wide<T>;
  constexpr int PACKS = LONG * 4 / sizeof(W) / N<T>;
  constexpr bool AHEAD = CLUSTER && sizeof(T) == 2;
  __shared__ Part<W> found[2][MAX_BLOCK / 32], blocks[2][MAX_CLUSTER];
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
  const int64_t step = gridDim.x / size;
  int64_t row = blockIdx.x / size;
  Pack<T> next[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (FULL || i < packs) next[p] = load_once(x + (row * packs + i) * N<T>);
  }
#pragma unroll 1
  for (int turn = 0; row < rows; row += step, turn ^= 1) {
    const int64_t first = row * packs;
    W value[PACKS][N<T>];
    Part<W> part = {LOWEST<W>, 0};
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      widen(next[p], value[p]);
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        if (!FULL && p * threads + t >= packs) value[p][k] = -INFINITY;
        part.largest = fmax(part.largest, value[p][k]);
      }
    }
    if (AHEAD && row + step < rows) {
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        const int i = p * threads + t;
        if (FULL || i < packs) next[p] = load_once(x + (first + step * packs + i) * N<T>);
      }
    }
    part.largest = largest_of(part.largest, 32);
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
#pragma unroll
      for (int k = 0; k < N<T>; ++k) part.sum += value[p][k] = fast_exp(value[p][k] - part.largest);
    }
    const W own = part.largest;
    part.sum = sum_of(part.sum, 32);
    part = join_warps(part, found[turn]);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER) {
      if (row < step) cluster.barrier_wait();  // all blocks of the cluster run
      const int lane = threadIdx.x % 32;
      if (static_cast<int>(threadIdx.x) < size) {
        *cluster.map_shared_rank(&blocks[turn][rank], threadIdx.x) = part;
      }
      cluster.sync();  // all have written to all
      part = join_lanes(lane < size ? blocks[turn][lane] : Part<W>{LOWEST<W>, 0}, 32);
    }
#endif
    const W scale = fast_exp(own - part.largest) / part.sum;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
#pragma unroll
      for (int k = 0; k < N<T>; ++k) value[p][k] *= scale;
      if (FULL || i < packs) reinterpret_cast<Pack<T>*>(out)[first + i] = narrow<T, W>(value[p]);
    }
    if (!AHEAD) break;
  }
}

// A block is blockDim.x threads along a row, times blockDim.y rows. With CLUSTER, the blocks of a
// cluster share one row.
template <typename T, int REGISTERS, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK)
    keep_row(const T* x, T* out, int64_t rows, int64_t cols) {
  using W = Wide<T>;
  constexpr int VALUES = REGISTERS * 4 / sizeof(W), PACKS = VALUES / N<T>;
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
  x += row * cols;
  out += row * cols;
  // The row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;

  Pack<T> pack[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x + head)[i];
  }
  W rest = -INFINITY, value[VALUES];
  if (t < singles) rest = static_cast<W>(x[single]);
  Part<W> part = {fmax(LOWEST<W>, rest), 0};
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : -INFINITY;
    part.largest = fmax(part.largest, value[k]);
  }
  part.sum = rest = fast_exp(rest - part.largest);
#pragma unroll
  for (int k = 0; k < VALUES; ++k) part.sum += value[k] = fast_exp(value[k] - part.largest);

  const W own = part.largest;
  __shared__ Part<W> found[MAX_BLOCK / 32];
  part = join_warps(join_lanes(part, min(static_cast<int>(blockDim.x), 32)), found);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ Part<W> blocks[MAX_CLUSTER];
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size)
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = part;
    cluster.sync();  // all have written to all
    part = join_lanes(static_cast<int>(threadIdx.x % 32) < size ? blocks[threadIdx.x % 32]
                                                                : Part<W>{LOWEST<W>, 0},
                      32);
  }
#endif
  const W scale = fast_exp(own - part.largest) / part.sum;

  if (t < singles) out[single] = static_cast<T>(rest * scale);
  const bool aligned = reinterpret_cast<uintptr_t>(out + head) % 16 == 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (i < packs && aligned) reinterpret_cast<Pack<T>*>(out + head)[i] = pack[p];
    if (i < packs && !aligned) {  // x and out lie differently between the boundaries
#pragma unroll
      for (int k = 0; k < N<T>; ++k) out[head + i * N<T> + k] = pack[p].at[k];
    }
  }
}

// For rows that no cluster can keep: rung 4.
template <typename T>
__global__ void __launch_bounds__(1024) read_twice(const T* x, T* out, int64_t cols) {
  using W = Wide<T>;
  x += int64_t{blockIdx.x} * cols;
  out += int64_t{blockIdx.x} * cols;
  Part<W> part = {LOWEST<W>, 0};
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W value = static_cast<W>(x[c]), before = part.largest;
    part.largest = fmax(before, value);
    part.sum = part.sum * fast_exp(before - part.largest) + fast_exp(value - part.largest);
  }
  __shared__ Part<W> found[32];
  part = join_warps(join_lanes(part, 32), found);
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    out[c] = static_cast<T>(fast_exp(static_cast<W>(x[c]) - part.largest) / part.sum);
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(Wide<T>), VALUES = LONG * 4 / sizeof(Wide<T>);
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0;
  const bool aligned = !odd && reinterpret_cast<uintptr_t>(out) % 16 == 0 && cols >= 32 * VALUES;
  if (cols <= 32 * VALUES && !aligned) {  // a few lanes a row: 256 threads, several rows a block
    const bool is_short = cols <= 32 * SHORT_VALUES;
    int lanes = odd ? 2 * N<T> : 1;  // enough for the singles of head and tail
    while (lanes < 32 && lanes * SHORT_VALUES < cols) lanes *= 2;
    const dim3 block(lanes, 256 / lanes);
    const int64_t grid = (rows + block.y - 1) / block.y;
    if (grid > INT32_MAX) return cudaErrorInvalidValue;
    const auto kernel = is_short ? keep_row<T, SHORT, false> : keep_row<T, LONG, false>;
    kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, out, rows, cols);
    return cudaGetLastError();
  }
  int device = 0, sms = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  int size = 1;  // blocks a row
  while (cols > int64_t{size} * MAX_BLOCK * VALUES) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES;
  const auto block = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  if (rows * std::min(size, MAX_CLUSTER) > INT32_MAX) return cudaErrorInvalidValue;
  if (size > (clusters ? MAX_CLUSTER : 1)) {
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(x, out, cols);
    return cudaGetLastError();
  }
  // Rows are taken in turns if enough blocks are left: four times what the chip takes at once.
  const bool turns =
      aligned && size > 1 && sizeof(T) == 2 && rows * size >= int64_t{8} * TURNS * sms;
  const int64_t row_groups = turns ? (rows + TURNS - 1) / TURNS : rows;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(row_groups * size);
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = size > 1;
  const auto start = [&](auto kernel, auto... arguments) {
    // 8 blocks are always granted, 16 on request.
    const auto more = cudaFuncAttributeNonPortableClusterSizeAllowed;
    if (size > 8) error = cudaFuncSetAttribute(kernel, more, 1);
    if (error != cudaSuccess) return error;
    return cudaLaunchKernelEx(&config, kernel, x, out, rows, arguments...);
  };
  if (!aligned) return start(size > 1 ? keep_row<T, LONG, true> : keep_row<T, LONG, false>, cols);
  const bool full = cols == int64_t{size} * block * VALUES;
  auto kernel = full ? keep_aligned_row<T, false, true> : keep_aligned_row<T, false, false>;
  if (size > 1) kernel = full ? keep_aligned_row<T, true, true> : keep_aligned_row<T, true, false>;
  return start(kernel, static_cast<int>(cols / N<T>));
}

extern "C" cudaError_t softmax_launch_f32(const float* x, float* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f64(const double* x, double* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f16(const __half* x, __half* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, int64_t rows,
                                           int64_t cols, cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
