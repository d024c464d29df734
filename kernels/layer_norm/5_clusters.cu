// 5_clusters.cu: a long row is spread over the registers of several SMs
// Before : rung 4 ends where the threads of one block end, at 16384 values (float64: 8192)
// Idea   : up to 16 blocks form a cluster, each keeps a piece of the row, and they write what they
//          found into each other's shared memory (distributed shared memory, Hopper and newer)
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4): no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, up to 2^20; pointers on 16 bytes; a chip, or a slice of
//          one, that has room for such a cluster (sm_90 and newer)
// Result : 0.79 of copy, 0.92x rung 1, 1.09x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Note   : a cluster does not pay at 4096 values: there it is one block with dearer barriers
// Try    : MAX_BLOCK 1024 → 512 (twice as many blocks a cluster); predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;
constexpr int MAX_CLUSTER = 16;
constexpr int PACKS = 4;  // of a row, a thread

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {  // one load, one store
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
__device__ T add(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
}

template <typename T, typename W>
__device__ void add_up(Pack<T> pack, W& sum) {
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += value[k];
}

template <typename T, typename W>
__device__ void add_up_squares(Pack<T> pack, W mean, W& sum) {  // of distances from the mean
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += (value[k] - mean) * (value[k] - mean);
}

template <typename T, typename W>
__device__ Pack<T> normalize(Pack<T> pack, W mean, W rstd, Pack<T> weight, Pack<T> bias) {
  W value[N<T>], w[N<T>], b[N<T>];
  widen(pack, value);
  widen(weight, w);
  widen(bias, b);
  for (int k = 0; k < N<T>; ++k) value[k] = (value[k] - mean) * rstd * w[k] + b[k];
  for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k]);
  return pack;
}

template <typename W>
struct Part {         // of a row
  W count, mean, m2;  // m2 = Σ (x − mean)²
};

template <typename W>
__device__ W sum_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// Joins the parts of 32 lanes: the mean first, then the distances from it. Joining two by two would
// divide in every step.
template <typename W>
__device__ Part<W> join_warp(Part<W> part) {
  const W count = sum_warp(part.count), mean = sum_warp(part.count * part.mean) / count;
  const W distance = part.count > 0 ? part.mean - mean : 0;
  return {count, mean, sum_warp(part.m2 + part.count * distance * distance)};
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int cols, W eps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  __shared__ Part<W> found[MAX_BLOCK / 32], blocks[MAX_CLUSTER];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;  // in the cluster
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32, packs = cols / N<T>;
  const int64_t row = blockIdx.x / size, first = row * cols;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x + first)[i];
  }
  if (residual != nullptr) {
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i >= packs) continue;
      const Pack<T> more = reinterpret_cast<const Pack<T>*>(residual + first)[i];
      for (int k = 0; k < N<T>; ++k) pack[p].at[k] = add(pack[p].at[k], more.at[k]);
      reinterpret_cast<Pack<T>*>(sum + first)[i] = pack[p];
    }
  }
  int mine = 0;
  W total = 0;
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t >= packs) continue;
    mine += N<T>;
    add_up(pack[p], total);
  }
  // Distances from the mean of the warp: no barrier before them, and no cancellation.
  const W count = sum_warp(static_cast<W>(mine));
  const W mean = count > 0 ? sum_warp(total) / count : 0;
  Part<W> part = {count, mean, 0};
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t < packs) add_up_squares(pack[p], mean, part.m2);
  }
  part.m2 = sum_warp(part.m2);
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  part = join_warp(lane < warps ? found[lane] : Part<W>{0, 0, 0});
  cluster.barrier_wait();  // all blocks of the cluster run
  if (static_cast<int>(threadIdx.x) < size) {
    *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = part;
  }
  cluster.sync();  // all have written to all
  part = join_warp(lane < size ? blocks[lane] : Part<W>{0, 0, 0});
  const W rstd = rsqrt(part.m2 / cols + eps);

  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i >= packs) continue;
    const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[i];
    const Pack<T> b = reinterpret_cast<const Pack<T>*>(bias)[i];
    reinterpret_cast<Pack<T>*>(out + first)[i] = normalize(pack[p], part.mean, rstd, w, b);
  }
  if (t == 0) {  // the gradient needs both
    mean_out[row] = part.mean;
    rstd_out[row] = rstd;
  }
#endif
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  uintptr_t bits = cols * sizeof(T);
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  int64_t size = 1;  // of the cluster: a power of two
  while (cols > size * MAX_BLOCK * PACKS * N<T>) size *= 2;
  if (bits % 16 != 0 || size > MAX_CLUSTER || rows * size > INT32_MAX) return cudaErrorInvalidValue;
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  if (!clusters) return cudaErrorNotSupported;
  const auto kernel = layer_norm_kernel<T, W>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;  // without: 8 blocks

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  const int64_t per_warp = size * 32 * PACKS * N<T>;
  config.gridDim = static_cast<unsigned>(rows * size);
  config.blockDim = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);  // that run at once
  if (error != cudaSuccess) return error;
  if (clusters == 0) return cudaErrorNotSupported;
  return cudaLaunchKernelEx(&config, kernel, x, residual, weight, bias, sum, out, mean, rstd,
                            static_cast<int>(cols), static_cast<W>(eps));
}

#define LAUNCHER(SUFFIX, T, W)                                                                \
  extern "C" cudaError_t layer_norm_launch_##SUFFIX(                                          \
      const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out, W* mean, \
      W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {                 \
    return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);  \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
