// 9_any_row.cu: any length and any alignment
// Before : rungs 5 and 6 refuse a row that does not begin and end on 16 bytes, and a longer one
// Idea   : a row is up to 15 values, packs of 16 bytes, and up to 15 values again; a thread keeps
//          one of the single values beside its packs. A block or a cluster shares a row; what
//          neither can keep, or where no cluster is to be had, is read twice
// Cost   : 2·rows·cols·sizeof(T) bytes; rows over 262144 values (float64: 131072) are read twice
// Legal  : everything
// Result : 0.97 of copy, 13.45x rung 1, 1.60x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : MAX_CLUSTER 16 → 1: what does reading a long row twice cost? Predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

constexpr int MAX_BLOCK = 512;  // two blocks an SM: one loads while the other one computes
constexpr int MAX_CLUSTER = 16;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int VALUES = 128 / sizeof(Wide<T>);  // a thread keeps: 32 registers' worth

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

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

template <typename W>
__device__ Part<W> join_warp(Part<W> a) {
  W largest = a.largest;
  for (int d = 16; d > 0; d /= 2) largest = fmax(largest, __shfl_xor_sync(~0u, largest, d));
  a.sum *= fast_exp(a.largest - largest);
  for (int d = 16; d > 0; d /= 2) a.sum += __shfl_xor_sync(~0u, a.sum, d);
  return {largest, a.sum};
}

template <typename W>
__device__ Part<W> join_block(Part<W> part) {
  __shared__ Part<W> found[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  part = join_warp(part);
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  return join_warp(lane < warps ? found[lane] : Part<W>{LOWEST<W>, 0});
}

template <typename T, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK) keep_row(const T* x, T* out, int64_t cols) {
  using W = Wide<T>;
  constexpr int PACKS = VALUES<T> / N<T>;
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
    size = cluster.num_blocks();
    rank = cluster.block_rank();
  }
#endif
  x += blockIdx.x / size * cols;
  out += blockIdx.x / size * cols;
  // The row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T);
  const int head = min(static_cast<int>(cols), before);
  const int packs = (static_cast<int>(cols) - head) / N<T>;
  const int singles = static_cast<int>(cols) - packs * N<T>;
  const int t = rank * blockDim.x + threadIdx.x, single = t < head ? t : packs * N<T> + t;
  // A warp takes 32 · PACKS packs side by side, a lane every 32nd: the distances are constants.
  const int first = t / 32 * 32 * PACKS + t % 32, left = packs - first;
  const auto* in = reinterpret_cast<const Pack<T>*>(x + head) + first;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(-INFINITY);
    if (32 * p < left) pack[p] = in[32 * p];
  }
  W rest = t < singles ? static_cast<W>(x[single]) : static_cast<W>(-INFINITY), value[VALUES<T>];
  Part<W> part = {fmax(LOWEST<W>, rest), 0};
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    value[k] = static_cast<W>(pack[k / N<T>].at[k % N<T>]);
    part.largest = fmax(part.largest, value[k]);
  }
  const W own = part.largest;
  part.sum = rest = fast_exp(rest - own);
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) part.sum += value[k] = fast_exp(value[k] - own);

  part = join_block(part);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ Part<W> blocks[MAX_CLUSTER];
    const int lane = threadIdx.x % 32;
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size) {
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = part;
    }
    cluster.sync();  // all have written to all
    part = join_warp(lane < size ? blocks[lane] : Part<W>{LOWEST<W>, 0});
  }
#endif
  const W scale = fast_exp(own - part.largest) / part.sum;

  if (t < singles) out[single] = static_cast<T>(rest * scale);
  T* to = out + head + first * N<T>;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (32 * p >= left) continue;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (aligned) {
      reinterpret_cast<Pack<T>*>(to)[32 * p] = pack[p];
    } else {  // x and out lie differently between the boundaries
#pragma unroll
      for (int k = 0; k < N<T>; ++k) to[32 * p * N<T> + k] = pack[p].at[k];
    }
  }
}

// Rung 4.
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
  part = join_block(part);
#pragma unroll 8
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    out[c] = static_cast<T>(fast_exp(static_cast<W>(x[c]) - part.largest) / part.sum);
  }
}

// Whether the GPU, or the slice of it that MIG grants, can start one such cluster.
template <typename T>
bool grants(const cudaLaunchConfig_t& config) {
  const auto kernel = keep_row<T, true>;
  int device = 0, supported = 0, clusters = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device);
  if (supported) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);  // over 8
    cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    cudaGetLastError();  // a size that this chip does not know is an error; the answer is no
  }
  return clusters > 0;
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  int size = 1;  // blocks a row
  while (size < MAX_CLUSTER && cols > int64_t{size} * MAX_BLOCK * VALUES<T>) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES<T>, warps = (cols + per_warp - 1) / per_warp;
  if (rows * size > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(rows * size);
  config.blockDim = static_cast<unsigned>(32 * warps);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = size > 1;
  if (warps > MAX_BLOCK / 32 || (size > 1 && !grants<T>(config))) {
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(x, out, cols);
    return cudaGetLastError();
  }
  return cudaLaunchKernelEx(&config, size > 1 ? keep_row<T, true> : keep_row<T, false>, x, out,
                            cols);
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
