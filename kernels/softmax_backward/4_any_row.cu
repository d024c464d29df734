// 4_any_row.cu: any length and any alignment
// Before : rungs 2 and 3 refuse long rows, and rung 2 those that do not begin and end on 16 bytes
// Idea   : a row is up to 15 values, packs of 16 bytes, and up to 15 values again; a thread keeps
//          one of the single values beside its packs. A block shares a row, or a cluster that adds
//          up through distributed shared memory. What they cannot keep is read twice, and so is a
//          long row without clusters, or tensors that lie differently between boundaries
// Cost   : 3·rows·cols·sizeof(T) bytes; rows of more than 1 MB are read twice: 5
// Legal  : everything
// Result : 1.01 of copy, 1.28x rung 1, 1.99x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : MAX_CLUSTER 16 → 1: what do long rows cost when they are read twice?

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 1024;  // where 16 blocks share a row
constexpr int BLOCK = 512;       // else: two blocks an SM, one loads while the other one computes
constexpr int MAX_CLUSTER = 16;
constexpr int PACKS = 4;  // of each tensor, that a thread keeps

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int N = 16 / sizeof(T);

// What is in 16 bytes. The high half of a float is a bfloat16: a shift or a mask, no conversion.
template <typename T, typename W>
__device__ void unpack(int4 pack, W (&value)[N<T>]) {
  if constexpr (sizeof(T) > 2) {
    memcpy(value, &pack, 16);
  } else {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        value[2 * k] = __uint_as_float(bits[k] << 16);
        value[2 * k + 1] = __uint_as_float(bits[k] & 0xffff0000u);
      } else {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(bits[k]));
        value[2 * k] = pair.x;
        value[2 * k + 1] = pair.y;
      }
    }
  }
}

// The other way: one instruction rounds two values.
template <typename T, typename W>
__device__ int4 pack(const W (&value)[N<T>]) {
  int4 bits;
  if constexpr (sizeof(T) > 2) {
    memcpy(&bits, value, 16);
  } else {
    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (std::is_same_v<T, __half>) {
        pair[k] = __floats2half2_rn(value[2 * k], value[2 * k + 1]);
      } else {
        pair[k] = __floats2bfloat162_rn(value[2 * k], value[2 * k + 1]);
      }
    }
    memcpy(&bits, pair, 16);
  }
  return bits;
}

template <typename W>
__device__ W sum_of_block(W value) {
  __shared__ W found[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (lane == 0) found[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < warps ? found[lane] : 0;
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <typename T, bool CLUSTER>
__global__ void __launch_bounds__(MAX_BLOCK)
    keep_row(const T* grad, const T* out, T* dx, int64_t cols) {
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
  const int64_t start = blockIdx.x / size * cols;
  // The row is: head · packs on 16-byte boundaries · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(grad + start) % 16) % 16 / sizeof(T);
  const int length = static_cast<int>(cols);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int t = rank * blockDim.x + threadIdx.x, singles = length - packs * N<T>;
  const int64_t single = start + (t < head ? t : packs * N<T> + t);
  // A warp takes 32 · PACKS packs side by side, a lane every 32nd: the distances are constants.
  const int mine = t / 32 * 32 * PACKS + t % 32, left = packs - mine;
  const int64_t first = start + head + int64_t{mine} * N<T>;

  int4 g[PACKS], y[PACKS];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (32 * p >= left) break;
    g[p] = *reinterpret_cast<const int4*>(grad + first + p * 32 * N<T>);
    y[p] = *reinterpret_cast<const int4*>(out + first + p * 32 * N<T>);
  }
  const W g_rest = t < singles ? static_cast<W>(grad[single]) : 0;
  const W y_rest = t < singles ? static_cast<W>(out[single]) : 0;
  W dot = g_rest * y_rest, a[N<T>], b[N<T>];
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (32 * p >= left) break;
    unpack<T>(g[p], a);
    unpack<T>(y[p], b);
#pragma unroll
    for (int k = 0; k < N<T>; ++k) dot += a[k] * b[k];
  }
  dot = sum_of_block(dot);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (CLUSTER) {
    __shared__ W blocks[MAX_CLUSTER];
    cluster.barrier_wait();  // all blocks of the cluster run
    if (static_cast<int>(threadIdx.x) < size) {
      *cluster.map_shared_rank(&blocks[rank], threadIdx.x) = dot;
    }
    cluster.sync();  // all have written to all
    dot = 0;
    for (int block = 0; block < size; ++block) dot += blocks[block];
  }
#endif

  if (t < singles) dx[single] = static_cast<T>(y_rest * (g_rest - dot));
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (32 * p >= left) break;
    unpack<T>(g[p], a);
    unpack<T>(y[p], b);
#pragma unroll
    for (int k = 0; k < N<T>; ++k) a[k] = b[k] * (a[k] - dot);
    *reinterpret_cast<int4*>(dx + first + p * 32 * N<T>) = pack<T>(a);
  }
}

// Rung 1.
template <typename T>
__global__ void __launch_bounds__(1024)
    read_twice(const T* grad, const T* out, T* dx, int64_t cols) {
  using W = Wide<T>;
  const int64_t first = int64_t{blockIdx.x} * cols;
  W dot = 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    dot += static_cast<W>(grad[first + c]) * static_cast<W>(out[first + c]);
  }
  dot = sum_of_block(dot);
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W g = static_cast<W>(grad[first + c]), y = static_cast<W>(out[first + c]);
    dx[first + c] = static_cast<T>(y * (g - dot));
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
cudaError_t launch(const T* grad, const T* out, T* dx, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  constexpr int VALUES = PACKS * N<T>;
  int size = 1;  // blocks a row
  while (size < MAX_CLUSTER && cols > int64_t{size} * BLOCK * VALUES) size *= 2;
  const int64_t per_warp = int64_t{size} * 32 * VALUES, warps = (cols + per_warp - 1) / per_warp;
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
  const auto place = [](const T* of) { return reinterpret_cast<uintptr_t>(of) % 16; };
  const bool alike = place(out) == place(grad) && place(dx) == place(grad);
  if (!alike || warps > MAX_BLOCK / 32 || (size > 1 && !grants<T>(config))) {
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(grad, out, dx, cols);
    return cudaGetLastError();
  }
  const auto kernel = size > 1 ? keep_row<T, true> : keep_row<T, false>;
  return cudaLaunchKernelEx(&config, kernel, grad, out, dx, cols);
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
