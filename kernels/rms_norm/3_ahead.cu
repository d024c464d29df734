// 3_ahead.cu: long rows: a cluster holds one, and sums up the next one before it waits
// Before : rung 2 ends where the threads of one block end, and a block that waits for its row does
//          nothing else
// Idea   : up to 16 blocks share a row, and as many clusters as the chip takes at once walk down the
//          rows. A block keeps its piece of weight in shared memory, and copies x there ahead
//          (cp.async). Every warp writes its sum into all blocks of the cluster, and before it waits
//          for the others' it takes the next row into registers and adds that one up
// Cost   : 2·rows·cols·sizeof(T) bytes. Where no cluster can hold a row, as on chips older than
//          Hopper, rung 1's two reads
// Legal  : cols·sizeof(T) a multiple of 16, pointers on 16 bytes
// Result : 0.90 of copy, 1.04x rung 1, 1.28x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : MAX_BLOCK 512 → 1024 with PACKS 8 → 4; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int PACKS = 8;  // of a row, a thread

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
__device__ W sum_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rms_norm_kernel(const T* x, const T* weight, T* out, W* rstd_out, int64_t rows, int cols,
                    W eps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  extern __shared__ int4 ahead[];                    // PACKS · blockDim.x of x; weight
  __shared__ W parts[2][MAX_CLUSTER * MAX_BLOCK / 32];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const int size = cluster.num_blocks(), rank = cluster.block_rank(), lane = threadIdx.x % 32;
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;  // in the cluster
  const int packs = cols / N<T>, step = gridDim.x / size;
  // What a thread finds in shared memory it has put there itself.
  const auto x_at = reinterpret_cast<Pack<T>*>(ahead) + threadIdx.x;
  const auto w_at = x_at + PACKS * blockDim.x;
  const auto copy = [&](Pack<T>* to, const T* from) {
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) __pipeline_memcpy_async(to + p * blockDim.x, from + i * N<T>, 16);
    }
    __pipeline_commit();
  };
  // Takes a row that was copied into registers, asks for the next one, and adds this one up.
  const auto take = [&](int64_t row, Pack<T>(&pack)[PACKS]) {
    W sum = 0;
    __pipeline_wait_prior(0);
    for (int p = 0; p < PACKS; ++p) {
      if (p * threads + t >= packs) continue;
      pack[p] = x_at[p * blockDim.x];
      add_up_squares(pack[p], sum);
    }
    if (row + step < rows) copy(x_at, x + (row + step) * cols);
    return sum_warp(sum);
  };
  // A row's sums are read after a barrier, and written over two rows later: after another one.
  const auto publish = [&](int turn, W sum) {
    if (lane < size) *cluster.map_shared_rank(&parts[turn][t / 32], lane) = sum;
    cluster.barrier_arrive();
  };

  int64_t row = blockIdx.x / size;
  copy(w_at, weight);
  copy(x_at, x + row * cols);
  Pack<T> pack[PACKS], next[PACKS];  // indexed by constants only, or they would not be registers
  W own = take(row, pack);
  cluster.barrier_wait();  // all blocks of the cluster run
  publish(0, own);
  for (int turn = 0; row < rows; row += step, turn ^= 1) {
    const bool more = row + step < rows;
    if (more) own = take(row + step, next);
    cluster.barrier_wait();  // all have written to all
    W sum = 0;
    for (int j = lane; j < threads / 32; j += 32) sum += parts[turn][j];
    const W rstd = rsqrt(sum_warp(sum) / cols + eps);
    if (more) publish(turn ^ 1, own);
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i >= packs) continue;
      reinterpret_cast<Pack<T>*>(out + row * cols)[i] =
          normalize(pack[p], rstd, w_at[p * blockDim.x]);
      pack[p] = next[p];
    }
    if (t == 0) rstd_out[row] = rstd;  // the gradient needs it
  }
#endif
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
  sum = sum_warp(sum);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = sum_warp(threadIdx.x % 32 < MAX_BLOCK / 32 ? found[threadIdx.x % 32] : 0);
  const W rstd = rsqrt(sum / cols + eps);
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
  const W eps = static_cast<W>(epsilon);
  const auto bits = static_cast<uintptr_t>(cols % N<T> * sizeof(T)) |
                    reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) |
                    reinterpret_cast<uintptr_t>(out);
  if (bits % 16 != 0 || rows > INT32_MAX) return cudaErrorInvalidValue;
  int64_t size = 1;  // of the cluster: a power of two
  while (cols > size * MAX_BLOCK * PACKS * N<T>) size *= 2;
  const int64_t per_warp = size * 32 * PACKS * N<T>;
  const auto kernel = rms_norm_kernel<T, W>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(size);
  config.blockDim = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  config.dynamicSmemBytes = 2 * PACKS * 16 * config.blockDim.x;  // x, weight
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int device = 0, clusters = 0, most = 0, fitting = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const auto shared = static_cast<int>(config.dynamicSmemBytes);
  if (clusters && size <= MAX_CLUSTER && shared <= most) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error == cudaSuccess) {  // 8 blocks are usually granted, 16 on request
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
  }
  if (error != cudaSuccess || fitting == 0) {
    cudaGetLastError();  // an error is a "no" of a chip that does not know clusters of this size
    read_twice<<<static_cast<unsigned>(rows), MAX_BLOCK, 0, stream>>>(x, weight, out, rstd, cols,
                                                                      eps);
    return cudaGetLastError();
  }
  config.gridDim = static_cast<unsigned>(size * std::min<int64_t>(rows, fitting));
  return cudaLaunchKernelEx(&config, kernel, x, weight, out, rstd, rows, static_cast<int>(cols),
                            eps);
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
