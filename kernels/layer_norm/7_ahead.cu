// 7_ahead.cu: the next row is summed up while the blocks wait for each other
// Before : in rung 5 a cluster waits for its row and then for the slowest of its blocks, and all
//          clusters read weight and bias for each row
// Idea   : as many clusters as the chip takes at once walk down the rows. A block keeps its piece of
//          weight and bias in shared memory, and copies x there ahead (cp.async): a thread waits for
//          its own copies only. Every warp writes its part into all blocks of the cluster, and before
//          it waits for the others' it takes the next row into registers and adds that one up
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4). Where no cluster can hold a row, as on
//          chips older than Hopper, rung 2's two reads
// Legal  : cols·sizeof(T) a multiple of 16, pointers on 16 bytes
// Result : 0.88 of copy, 1.02x rung 1, 1.22x eager  (H200, float32 (32768, 4096), CUDA 13.0)
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
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

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
__device__ Part<W> join_lanes(Part<W> part) {
  const W count = sum_warp(part.count), mean = sum_warp(part.count * part.mean) / count;
  const W distance = part.count > 0 ? part.mean - mean : 0;
  return {count, mean, sum_warp(part.m2 + part.count * distance * distance)};
}

// And those of a block's warps.
template <typename W>
__device__ Part<W> join_warps(Part<W> part, Part<W>* found) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps <= 1) return part;
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  return join_lanes(lane < warps ? found[lane] : Part<W>{0, 0, 0});
}

// What a row's warps have found, together.
template <typename W>
__device__ Part<W> join_row(const Part<W>* parts, int warps) {
  const int lane = threadIdx.x % 32;
  W count = 0, sum = 0, m2 = 0;
  for (int j = lane; j < warps; j += 32) {
    count += parts[j].count;
    sum += parts[j].count * parts[j].mean;
  }
  count = sum_warp(count);
  const W mean = sum_warp(sum) / count;
  for (int j = lane; j < warps; j += 32) {
    const W distance = parts[j].mean - mean;
    m2 += parts[j].m2 + parts[j].count * distance * distance;
  }
  return {count, mean, sum_warp(m2)};
}

template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int64_t rows, int cols, W eps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  extern __shared__ int4 ahead[];                    // PACKS · blockDim.x of x; weight; bias
  __shared__ Part<W> parts[2][MAX_CLUSTER * MAX_BLOCK / 32];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
  const int size = cluster.num_blocks(), rank = cluster.block_rank(), lane = threadIdx.x % 32;
  const int t = rank * blockDim.x + threadIdx.x, threads = size * blockDim.x;  // in the cluster
  const int packs = cols / N<T>, step = gridDim.x / size;
  // What a thread finds in shared memory it has put there itself.
  const auto x_at = reinterpret_cast<Pack<T>*>(ahead) + threadIdx.x;
  const auto w_at = x_at + PACKS * blockDim.x, b_at = w_at + PACKS * blockDim.x;
  const auto copy = [&](Pack<T>* to, const T* from) {
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) __pipeline_memcpy_async(to + p * blockDim.x, from + i * N<T>, 16);
    }
    __pipeline_commit();
  };
  int mine = 0;
  for (int p = 0; p < PACKS; ++p) mine += p * threads + t < packs ? N<T> : 0;
  const W count = sum_warp(static_cast<W>(mine));

  // Takes a row that was copied into registers, asks for the next one, and adds this one up.
  const auto take = [&](int64_t row, Pack<T>(&pack)[PACKS]) {
    W total = 0;
    __pipeline_wait_prior(0);
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i >= packs) continue;
      pack[p] = x_at[p * blockDim.x];
      if (residual != nullptr) {
        const Pack<T> more = reinterpret_cast<const Pack<T>*>(residual + row * cols)[i];
        for (int k = 0; k < N<T>; ++k) pack[p].at[k] = add(pack[p].at[k], more.at[k]);
        reinterpret_cast<Pack<T>*>(sum + row * cols)[i] = pack[p];
      }
      add_up(pack[p], total);
    }
    if (row + step < rows) copy(x_at, x + (row + step) * cols);
    // Distances from the mean of the warp: no barrier before them, and no cancellation.
    Part<W> part = {count, count > 0 ? sum_warp(total) / count : 0, 0};
    for (int p = 0; p < PACKS; ++p) {
      if (p * threads + t < packs) add_up_squares(pack[p], part.mean, part.m2);
    }
    part.m2 = sum_warp(part.m2);
    return part;
  };
  // A row's parts are read after a barrier, and written over two rows later: after another one.
  const auto publish = [&](int turn, Part<W> part) {
    if (lane < size) *cluster.map_shared_rank(&parts[turn][t / 32], lane) = part;
    cluster.barrier_arrive();
  };

  int64_t row = blockIdx.x / size;
  copy(w_at, weight);
  copy(b_at, bias);
  copy(x_at, x + row * cols);
  Pack<T> pack[PACKS], next[PACKS];  // indexed by constants only, or they would not be registers
  Part<W> part = take(row, pack);
  cluster.barrier_wait();  // all blocks of the cluster run
  publish(0, part);
  for (int turn = 0; row < rows; row += step, turn ^= 1) {
    const bool more = row + step < rows;
    if (more) part = take(row + step, next);
    cluster.barrier_wait();  // all have written to all
    const Part<W> whole = join_row(parts[turn], threads / 32);
    if (more) publish(turn ^ 1, part);
    const W rstd = rsqrt(whole.m2 / cols + eps);
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i >= packs) continue;
      reinterpret_cast<Pack<T>*>(out + row * cols)[i] =
          normalize(pack[p], whole.mean, rstd, w_at[p * blockDim.x], b_at[p * blockDim.x]);
      pack[p] = next[p];
    }
    if (t == 0) {  // the gradient needs both
      mean_out[row] = whole.mean;
      rstd_out[row] = rstd;
    }
  }
#endif
}

// Rung 2.
template <typename T, typename W>
__global__ void __launch_bounds__(1024)
    read_twice(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
               W* mean_out, W* rstd_out, int64_t cols, W eps) {
  const int64_t first = int64_t{blockIdx.x} * cols;
  Part<W> part = {0, 0, 0};
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    T value = x[first + c];
    if (residual != nullptr) sum[first + c] = value = add(value, residual[first + c]);
    const W distance = static_cast<W>(value) - part.mean;
    part.count += 1;
    part.mean += distance / part.count;
    part.m2 += distance * (static_cast<W>(value) - part.mean);
  }
  __shared__ Part<W> found[32];
  part = join_warps(join_lanes(part), found);
  const W rstd = rsqrt(part.m2 / cols + eps);
  if (residual != nullptr) x = sum;  // each thread reads what it wrote itself
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W normal = (static_cast<W>(x[first + c]) - part.mean) * rstd;
    out[first + c] = static_cast<T>(normal * static_cast<W>(weight[c]) + static_cast<W>(bias[c]));
  }
  if (threadIdx.x == 0) {
    mean_out[blockIdx.x] = part.mean;
    rstd_out[blockIdx.x] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double epsilon,
                   cudaStream_t stream) {
  const W eps = static_cast<W>(epsilon);
  uintptr_t bits = cols % N<T> * sizeof(T);
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  if (bits % 16 != 0 || rows > INT32_MAX) return cudaErrorInvalidValue;
  int64_t size = 1;  // of the cluster: a power of two
  while (cols > size * MAX_BLOCK * PACKS * N<T>) size *= 2;
  const int64_t per_warp = size * 32 * PACKS * N<T>;
  const auto kernel = layer_norm_kernel<T, W>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(size);
  config.blockDim = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  config.dynamicSmemBytes = 3 * PACKS * 16 * config.blockDim.x;  // x, weight, bias
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
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(x, residual, weight, bias, sum,
                                                                 out, mean, rstd, cols, eps);
    return cudaGetLastError();
  }
  config.gridDim = static_cast<unsigned>(size * std::min<int64_t>(rows, fitting));
  return cudaLaunchKernelEx(&config, kernel, x, residual, weight, bias, sum, out, mean, rstd, rows,
                            static_cast<int>(cols), eps);
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
