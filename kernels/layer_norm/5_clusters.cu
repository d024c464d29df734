// 5_clusters.cu: a long row is spread over the registers of several SMs
// Before : rung 4 ends where the registers of one block end, at 16384 values
// Idea   : up to 16 blocks form a cluster, each keeps a piece of the row, and they write what they
//          found into each other's shared memory (distributed shared memory, Hopper and newer)
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4): no more than must be
// Legal  : sm_90 and newer, cols·sizeof(T) a multiple of 16, cols ≤ 262144 (float64: 131072),
//          pointers on 16 bytes
// Result : 0.76 of copy, 0.92x rung 1, 1.05x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Note   : a cluster does not pay at 4096 values: there it is one block with dearer barriers
// Try    : MAX_BLOCK 512 → 1024 (half as many blocks a cluster); predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

constexpr int MAX_BLOCK = 512;  // two blocks an SM: one loads while the other one computes
constexpr int MAX_CLUSTER = 16;

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
constexpr int VALUES = 128 / sizeof(Wide<T>);  // a thread keeps: 32 registers' worth

template <typename T>
struct alignas(16) Pack {  // one load, one store
  T at[N<T>];
};

template <typename W>
struct Part {         // of a row
  W count, mean, m2;  // m2 = Σ (x − mean)²
};

template <typename W>
__device__ Part<W> join_warp(Part<W> a) {
  for (int d = 16; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.count, d), __shfl_xor_sync(~0u, a.mean, d),
                       __shfl_xor_sync(~0u, a.m2, d)};
    const W count = a.count + b.count, distance = b.mean - a.mean;
    const W share = count > 0 ? b.count / count : 0;
    a = {count, a.mean + distance * share, a.m2 + b.m2 + distance * distance * a.count * share};
  }
  return a;
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int cols, W eps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  constexpr int PACKS = VALUES<T> / N<T>;            // that a thread keeps; the row has `packs`
  __shared__ Part<W> found[MAX_BLOCK / 32], blocks[MAX_CLUSTER];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  const int packs = cols / N<T>, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;  // in the cluster
  const int64_t row = blockIdx.x / size, first = row * packs;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = reinterpret_cast<const Pack<T>*>(x)[first + i];
  }
  if (residual != nullptr) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        const Pack<T> more = reinterpret_cast<const Pack<T>*>(residual)[first + i];
#pragma unroll
        for (int k = 0; k < N<T>; ++k) {
          pack[p].at[k] =
              static_cast<T>(static_cast<W>(pack[p].at[k]) + static_cast<W>(more.at[k]));
        }
        reinterpret_cast<Pack<T>*>(sum)[first + i] = pack[p];
      }
    }
  }
  W value[VALUES<T>];
  Part<W> part = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : 0;
    part.count += inside;
    part.mean += value[k];
  }
  if (part.count > 0) part.mean /= part.count;
#pragma unroll
  for (int k = 0; k < VALUES<T>; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    if (inside) part.m2 += (value[k] - part.mean) * (value[k] - part.mean);
  }
  part = join_warp(part);
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  part = join_warp(lane < warps ? found[lane] : Part<W>{0, 0, 0});
  cluster.barrier_wait();  // all blocks of the cluster run
  if (static_cast<int>(threadIdx.x) < size)
    *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = part;
  cluster.sync();  // all have written to all
  part = join_warp(lane < size ? blocks[lane] : Part<W>{0, 0, 0});
  const W rstd = 1 / sqrt(part.m2 / cols + eps);

#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[i];
      const Pack<T> b = reinterpret_cast<const Pack<T>*>(bias)[i];
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        const W normal = (value[p * N<T> + k] - part.mean) * rstd;
        pack[p].at[k] = static_cast<T>(normal * static_cast<W>(w.at[k]) + static_cast<W>(b.at[k]));
      }
      reinterpret_cast<Pack<T>*>(out)[first + i] = pack[p];
    }
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
  uintptr_t bits = 0;
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  int size = 1;  // of the cluster: a power of two
  while (cols > int64_t{size} * MAX_BLOCK * VALUES<T>) size *= 2;
  if (bits % 16 != 0 || cols % N<T> != 0 || size > MAX_CLUSTER || rows * size > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  if (!clusters) return cudaErrorNotSupported;
  const auto kernel = layer_norm_kernel<T, W>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;  // 8 blocks are always granted, 16 on request

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
  return cudaLaunchKernelEx(&config, kernel, x, residual, weight, bias, sum, out, mean, rstd,
                            static_cast<int>(cols), static_cast<W>(eps));
}

extern "C" cudaError_t layer_norm_launch_f32(const float* x, const float* residual,
                                             const float* weight, const float* bias, float* sum,
                                             float* out, float* mean, float* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_f64(const double* x, const double* residual,
                                             const double* weight, const double* bias, double* sum,
                                             double* out, double* mean, double* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_f16(const __half* x, const __half* residual,
                                             const __half* weight, const __half* bias, __half* sum,
                                             __half* out, float* mean, float* rstd, int64_t rows,
                                             int64_t cols, double eps, cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}

extern "C" cudaError_t layer_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* residual,
                                              const __nv_bfloat16* weight,
                                              const __nv_bfloat16* bias, __nv_bfloat16* sum,
                                              __nv_bfloat16* out, float* mean, float* rstd,
                                              int64_t rows, int64_t cols, double eps,
                                              cudaStream_t stream) {
  return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
}
