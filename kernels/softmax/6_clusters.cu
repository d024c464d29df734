// 6_clusters.cu: a long row is spread over the registers of several SMs
// Before : rung 5 ends where the registers of one block end, at 32768 values
// Idea   : up to 16 blocks form a cluster, each keeps a piece of the row, and they write what they
//          found into each other's shared memory (distributed shared memory, Hopper and newer)
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : sm_90 and newer, as far as the chip (or its MIG slice) grants such a cluster;
//          cols·sizeof(T) a multiple of 16, cols ≤ 262144 (float64: 131072), pointers on 16 bytes
// Result : 0.89 of copy, 12.27x rung 1, 1.46x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Note   : a cluster does not pay at 4096 values: there it is one block with dearer barriers
// Try    : MAX_BLOCK 512 → 1024 (half as many blocks a cluster); predict first

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

__device__ float fast_exp(float x) { return __expf(x); }
__device__ double fast_exp(double x) { return exp(x); }

template <typename W>
__device__ Part<W> join_warp(Part<W> a) {
  for (int d = 16; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.largest, d), __shfl_xor_sync(~0u, a.sum, d)};
    const W largest = fmax(a.largest, b.largest);
    a.sum = a.sum * fast_exp(a.largest - largest) + b.sum * fast_exp(b.largest - largest);
    a.largest = largest;
  }
  return a;
}

template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK) softmax_kernel(const T* x, T* out, int packs) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  using W = Wide<T>;
  constexpr int PACKS = VALUES<T> / N<T>;  // that a thread keeps; the row has `packs`
  __shared__ Part<W> found[MAX_BLOCK / 32], blocks[MAX_CLUSTER];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;  // in the cluster
  const int64_t row = blockIdx.x / size;
  const auto* in = reinterpret_cast<const Pack<T>*>(x) + row * packs;
  auto* result = reinterpret_cast<Pack<T>*>(out) + row * packs;

  Pack<T> pack[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = in[i];
  }
  W value[VALUES<T>];
  Part<W> part = {LOWEST<W>, 0};
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : -INFINITY;
    part.largest = fmax(part.largest, value[k]);
  }
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    value[k] = fast_exp(value[k] - part.largest);
    part.sum += value[k];
  }

  const W own = part.largest;
  part = join_warp(part);
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  part = join_warp(lane < warps ? found[lane] : Part<W>{LOWEST<W>, 0});

  cluster.barrier_wait();  // all blocks of the cluster run
  if (static_cast<int>(threadIdx.x) < size)
    *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = part;
  cluster.sync();  // all have written to all
  part = join_warp(lane < size ? blocks[lane] : Part<W>{LOWEST<W>, 0});
  const W scale = fast_exp(own - part.largest) / part.sum;

#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
#pragma unroll
    for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(value[p * N<T> + k] * scale);
    if (i < packs) result[i] = pack[p];
  }
#endif
}

// Whether the GPU, or the slice of it that MIG grants, can start one such cluster.
template <typename T>
bool grants(const cudaLaunchConfig_t& config) {
  int device = 0, supported = 0, clusters = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device);
  if (supported) {
    cudaFuncSetAttribute(softmax_kernel<T>, cudaFuncAttributeNonPortableClusterSizeAllowed,
                         1);  // 8 blocks are the most that every such chip knows
    cudaOccupancyMaxActiveClusters(&clusters, softmax_kernel<T>, &config);
    cudaGetLastError();  // a size that this chip does not know is an error; the answer is no
  }
  return clusters > 0;
}

template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
  int size = 1;  // of the cluster: a power of two
  while (cols > int64_t{size} * MAX_BLOCK * VALUES<T>) size *= 2;
  if (bits % 16 != 0 || cols % N<T> != 0 || size > MAX_CLUSTER || rows * size > INT32_MAX) {
    return cudaErrorInvalidValue;
  }

  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  const int64_t per_warp = int64_t{size} * 32 * VALUES<T>;
  config.gridDim = static_cast<unsigned>(rows * size);
  config.blockDim = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (!grants<T>(config)) return cudaErrorNotSupported;
  return cudaLaunchKernelEx(&config, softmax_kernel<T>, x, out, static_cast<int>(cols / N<T>));
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
