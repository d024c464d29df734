// 6_dispatch.cu: the right shape of block for every row length, and every alignment
// Before : rungs 4 and 5 refuse odd row lengths, and give a row of 64 values a whole warp
// Idea   : one kernel whose rows are spread over a few lanes, a warp, a block or a cluster, chosen
//          by row length; up to 15 values before and after the 16-byte packs go one by one
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4). Read twice: rows over 262144 values
//          (float64: 131072), odd or misaligned rows over 16384 (8192)
// Legal  : everything
// Result : not measured yet
// Seen   : rows on 16-byte boundaries as rungs 4 and 5, measured there; else, of copy bandwidth,
//          65536x128 0.92 (bfloat16 0.64), 4x eager; 32768x4099 0.87 (0.50), 2.5x eager (H200)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
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

template <typename T>
__device__ T add(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
}

template <typename W>
struct Part {         // of a row
  W count, mean, m2;  // m2 = Σ (x − mean)²
};

// Joins the parts of `width` neighbouring lanes, a power of two.
template <typename W>
__device__ Part<W> join_lanes(Part<W> a, int width) {
  for (int d = width / 2; d > 0; d /= 2) {
    const Part<W> b = {__shfl_xor_sync(~0u, a.count, d), __shfl_xor_sync(~0u, a.mean, d),
                       __shfl_xor_sync(~0u, a.m2, d)};
    const W count = a.count + b.count, distance = b.mean - a.mean;
    const W share = count > 0 ? b.count / count : 0;
    a = {count, a.mean + distance * share, a.m2 + b.m2 + distance * distance * a.count * share};
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
    part = join_lanes(lane < width / 32 ? found[lane] : Part<W>{0, 0, 0}, 32);
  }
  return part;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <typename W>
__device__ Part<W> join_cluster(Part<W> part, cooperative_groups::cluster_group cluster) {
  __shared__ Part<W> blocks[MAX_CLUSTER];
  const int size = cluster.num_blocks(), lane = threadIdx.x % 32;
  cluster.barrier_wait();  // all blocks of the cluster run
  if (static_cast<int>(threadIdx.x) < size) {
    *cluster.map_shared_rank(&blocks[cluster.block_rank()], threadIdx.x) = part;
  }
  cluster.sync();  // all have written to all
  return join_lanes(lane < size ? blocks[lane] : Part<W>{0, 0, 0}, 32);
}
#endif

// Rungs 4 and 5: rows on 16-byte boundaries, and long enough for whole warps.
template <typename T, typename W, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK)
    keep_aligned_row(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                     W* mean_out, W* rstd_out, int cols, W eps) {
  constexpr int VALUES = LONG * 4 / sizeof(W), PACKS = VALUES / N<T>;
  int size = 1, rank = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  const auto cluster = cooperative_groups::this_cluster();
  if constexpr (CLUSTER) {
    cluster.barrier_arrive();  // "I run": before that, nobody may write into my shared memory
    size = cluster.num_blocks();
    rank = cluster.block_rank();
  }
#endif
  const int packs = cols / N<T>;
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
          pack[p].at[k] = add(pack[p].at[k], more.at[k]);
        }
        reinterpret_cast<Pack<T>*>(sum)[first + i] = pack[p];
      }
    }
  }
  W value[VALUES];
  Part<W> part = {0, 0, 0};
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : 0;
    part.count += inside;
    part.mean += value[k];
  }
  if (part.count > 0) part.mean /= part.count;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    if (inside) part.m2 += (value[k] - part.mean) * (value[k] - part.mean);
  }
  part = join_block(part, blockDim.x);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) part = join_cluster(part, cluster);
#endif
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
}

// All other rows: a block is blockDim.x threads along a row, times blockDim.y rows.
template <typename T, typename W, int REGISTERS>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_row(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
             W* mean_out, W* rstd_out, int64_t rows, int64_t cols, W eps) {
  constexpr int VALUES = REGISTERS * 4 / sizeof(W), PACKS = VALUES / N<T>;
  const int t = threadIdx.x, threads = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, first = row * cols;
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
    if (i < packs) pack[p] = load(x + body + i * N<T>, true);
  }
  T rest = t < singles ? x[first + single] : static_cast<T>(0.f);
  if (residual != nullptr) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        const Pack<T> more = load(residual + body + i * N<T>, on16(residual + body));
#pragma unroll
        for (int k = 0; k < N<T>; ++k) pack[p].at[k] = add(pack[p].at[k], more.at[k]);
        store(sum + body + i * N<T>, pack[p], on16(sum + body));
      }
    }
    if (t < singles) sum[first + single] = rest = add(rest, residual[first + single]);
  }

  W value[VALUES];
  Part<W> part = {static_cast<W>(t < singles), static_cast<W>(rest), 0};
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const bool inside = k / N<T> * threads + t < packs;
    value[k] = inside ? static_cast<W>(pack[k / N<T>].at[k % N<T>]) : 0;
    part.count += inside;
    part.mean += value[k];
  }
  if (part.count > 0) part.mean /= part.count;
#pragma unroll
  for (int k = 0; k < VALUES; ++k) {
    const W distance = value[k] - part.mean;
    if (k / N<T> * threads + t < packs) part.m2 += distance * distance;
  }
  if (t < singles) {
    const W distance = static_cast<W>(rest) - part.mean;
    part.m2 += distance * distance;
  }
  part = join_block(part, blockDim.x);
  const W mean = part.mean, rstd = 1 / sqrt(part.m2 / cols + eps);

  const bool alike = on16(weight + head) && on16(bias + head);
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
      const Pack<T> w = load(weight + head + i * N<T>, alike);
      const Pack<T> b = load(bias + head + i * N<T>, alike);
#pragma unroll
      for (int k = 0; k < N<T>; ++k) {
        const W normal = (value[p * N<T> + k] - mean) * rstd;
        pack[p].at[k] = static_cast<T>(normal * static_cast<W>(w.at[k]) + static_cast<W>(b.at[k]));
      }
      store(out + body + i * N<T>, pack[p], on16(out + body));
    }
  }
  if (t < singles) {
    const W normal = (static_cast<W>(rest) - mean) * rstd;
    out[first + single] =
        static_cast<T>(normal * static_cast<W>(weight[single]) + static_cast<W>(bias[single]));
  }
  if (t == 0 && row < rows) {  // the gradient needs both
    mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
}

// For rows that no cluster can keep: rung 2.
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
  part = join_block(part, blockDim.x);
  const W rstd = 1 / sqrt(part.m2 / cols + eps);
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
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(W), VALUES = LONG * 4 / sizeof(W);
  const W eps = static_cast<W>(epsilon);
  const bool odd = cols % N<T> != 0 || reinterpret_cast<uintptr_t>(x) % 16 != 0;
  uintptr_t bits = cols % N<T> * sizeof(T);
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  const bool aligned = bits % 16 == 0 && cols >= 32 * VALUES;
  if (cols <= 32 * VALUES && !aligned) {  // a few lanes a row: 256 threads, several rows a block
    int lanes = odd ? 2 * N<T> : 1;       // enough for the singles of head and tail
    while (lanes < 32 && lanes * SHORT_VALUES < cols) lanes *= 2;
    const dim3 block(lanes, 256 / lanes);
    const int64_t grid = (rows + block.y - 1) / block.y;
    if (grid > INT32_MAX) return cudaErrorInvalidValue;
    const bool is_short = cols <= 32 * SHORT_VALUES;
    const auto kernel = is_short ? keep_row<T, W, SHORT> : keep_row<T, W, LONG>;
    kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, residual, weight, bias, sum, out,
                                                              mean, rstd, rows, cols, eps);
    return cudaGetLastError();
  }
  int size = 1;  // blocks a row
  while (cols > int64_t{size} * MAX_BLOCK * VALUES) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES;
  const auto block = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  if (rows * std::min(size, MAX_CLUSTER) > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(rows);
  if (size == 1 && aligned) {
    keep_aligned_row<T, W, false><<<grid, block, 0, stream>>>(
        x, residual, weight, bias, sum, out, mean, rstd, static_cast<int>(cols), eps);
    return cudaGetLastError();
  }
  if (size == 1) {
    keep_row<T, W, LONG><<<grid, block, 0, stream>>>(x, residual, weight, bias, sum, out, mean,
                                                     rstd, rows, cols, eps);
    return cudaGetLastError();
  }
  int device = 0, clusters = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device);
  if (error != cudaSuccess) return error;
  if (!aligned || size > MAX_CLUSTER || !clusters) {
    read_twice<<<grid, 1024, 0, stream>>>(x, residual, weight, bias, sum, out, mean, rstd, cols,
                                          eps);
    return cudaGetLastError();
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid * size;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = keep_aligned_row<T, W, true>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;  // 8 blocks are always granted, 16 on request
  return cudaLaunchKernelEx(&config, kernel, x, residual, weight, bias, sum, out, mean, rstd,
                            static_cast<int>(cols), eps);
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
