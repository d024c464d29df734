// 7_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rungs 5 and 6 refuse odd row lengths, and give a row of 64 values a whole block
// Idea   : one kernel whose rows are spread over a few lanes, a warp, a block or a cluster, chosen
//          by row length; up to 15 values before and after the 16-byte packs go one by one
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over 262144 values (float64: 131072) are read twice
// Legal  : everything
// Result : not measured yet
// Seen   : rows of 1024 to 16384 values on 16-byte boundaries as rung 5, measured there; else, of
//          copy bandwidth, 4096x65536 0.89, 1.8x eager (bfloat16 0.65, 1.2x), 1024x262144 0.80, 1.6x
//          (0.57, 1.3x), 32768x4099 0.98, 1.7x (0.76, 2.7x), 262144x128 0.98, 1.0x (0.72, 1.3x);
//          128x1048576 0.26, 0.6x (0.14, 0.4x) (H200, CUDA 13.0)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

__device__ float fast_exp(float x) { return __expf(x); }
__device__ double fast_exp(double x) { return exp(x); }

// Joins the parts of `width` neighbouring lanes, a power of two.
template <typename W>
__device__ Part<W> join_lanes(Part<W> a, int width) {
  for (int d = width / 2; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.largest, d), __shfl_xor_sync(~0u, a.sum, d)};
    const W largest = fmax(a.largest, b.largest);
    a.sum = a.sum * fast_exp(a.largest - largest) + b.sum * fast_exp(b.largest - largest);
    a.largest = largest;
  }
  return a;
}

template <typename W>
__device__ Part<W> join_block(Part<W> part, int width) {
  part = join_lanes(part, min(width, 32));
  if (width > 32) {
    __shared__ Part<W> found[32];
    const int lane = threadIdx.x % 32;
    if (lane == 0) found[threadIdx.x / 32] = part;
    __syncthreads();
    part = join_lanes(lane < width / 32 ? found[lane] : Part<W>{LOWEST<W>, 0}, 32);
  }
  return part;
}

// Rung 5: rows on 16-byte boundaries, and long enough for whole warps.
template <typename T>
__global__ void __launch_bounds__(1024) keep_aligned_row(const T* x, T* out, int packs) {
  using W = Wide<T>;
  constexpr int VALUES = LONG * 4 / sizeof(W), PACKS = VALUES / N<T>;
  const int t = threadIdx.x;
  const auto* in = reinterpret_cast<const Pack<T>*>(x) + int64_t{blockIdx.x} * packs;
  auto* result = reinterpret_cast<Pack<T>*>(out) + int64_t{blockIdx.x} * packs;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
    if (i < packs) pack[p] = in[i];
  }
  W value[VALUES];
  Part<W> part = {LOWEST<W>, 0};
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * static_cast<int>(blockDim.x) + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : -INFINITY;
    part.largest = fmax(part.largest, value[k]);
  }
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    value[k] = fast_exp(value[k] - part.largest);
    part.sum += value[k];
  }

  const W own = part.largest;
  part = join_block(part, blockDim.x);
  const W scale = fast_exp(own - part.largest) / part.sum;

#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * blockDim.x + t;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (i < packs) result[i] = pack[p];
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
  part = join_block(part, blockDim.x);
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
  part = join_block(part, blockDim.x);
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    out[c] = static_cast<T>(fast_exp(static_cast<W>(x[c]) - part.largest) / part.sum);
  }
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(Wide<T>), VALUES = LONG * 4 / sizeof(Wide<T>);
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0;
  const bool aligned = !odd && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  if (aligned && cols >= 32 * VALUES && cols <= MAX_BLOCK * VALUES && rows <= INT32_MAX) {
    const auto block = static_cast<unsigned>((cols + 32 * VALUES - 1) / (32 * VALUES) * 32);
    keep_aligned_row<<<static_cast<unsigned>(rows), block, 0, stream>>>(
        x, out, static_cast<int>(cols / N<T>));
    return cudaGetLastError();
  }
  if (cols <= 32 * VALUES) {  // a few lanes a row: 256 threads, several rows a block
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
  int size = 1;  // blocks a row
  while (cols > int64_t{size} * MAX_BLOCK * VALUES) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES;
  const auto block = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  if (rows * std::min(size, MAX_CLUSTER) > INT32_MAX) return cudaErrorInvalidValue;
  if (size == 1) {
    keep_row<T, LONG, false><<<static_cast<unsigned>(rows), block, 0, stream>>>(x, out, rows, cols);
    return cudaGetLastError();
  }
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  if (size > MAX_CLUSTER || !clusters) {
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(x, out, cols);
    return cudaGetLastError();
  }
  const auto kernel = keep_row<T, LONG, true>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(rows * size);
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, x, out, rows, cols);
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
