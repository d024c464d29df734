// 6_short_rows.cu: several short rows a thread
// Before : rung 3 moves 2 or 4 bytes an instruction, and gives a row of 16 packs a whole warp
// Idea   : a row has as many lanes as packs of 16 bytes, rounded up to a power of two; a lane has
//          its pack of ROWS rows, so that enough loads are under way, and weight and bias once
// Cost   : 2·rows·cols·sizeof(T) bytes: no more than must be
// Legal  : cols·sizeof(T) a multiple of 16, up to 512; pointers on 16 bytes; no residual
// Result : 0.82 of copy, 6.50x rung 1, 5.08x eager  (H200, float32 (65536, 128), CUDA 13.0)
// Try    : ROWS 4 → 1; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int BLOCK = 256;
constexpr int ROWS = 4;

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

// Reads past L1, which is left to weight and bias: all rows need those.
template <typename T>
__device__ Pack<T> load_once(const T* from) {
  const int4 bits = __ldcg(reinterpret_cast<const int4*>(from));
  Pack<T> pack;
  memcpy(&pack, &bits, 16);
  return pack;
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

// Of each row over `lanes` neighbours, a power of two: the rows' shuffles do not wait for each other.
template <typename W>
__device__ void sum_lanes(W (&value)[ROWS], int lanes) {
  for (int d = lanes / 2; d > 0; d /= 2) {
    for (int j = 0; j < ROWS; ++j) value[j] += __shfl_xor_sync(~0u, value[j], d);
  }
}

// A block is blockDim.x lanes along a row, times blockDim.y rows, ROWS times.
template <typename T, typename W>
__global__ void __launch_bounds__(BLOCK)
    layer_norm_kernel(const T* x, const T* weight, const T* bias, T* out, W* mean_out, W* rstd_out,
                      int64_t rows, int cols, W eps) {
  const int i = threadIdx.x * N<T>;
  const int64_t row = int64_t{blockIdx.x} * ROWS * blockDim.y + threadIdx.y;
  Pack<T> pack[ROWS], w = {}, b = {};
  W mean[ROWS] = {}, rstd[ROWS] = {};
  for (int j = 0; j < ROWS; ++j) {
    const int64_t r = row + j * blockDim.y;
    if (i < cols && r < rows) pack[j] = load_once(x + r * cols + i);
  }
  if (i < cols) {
    w = *reinterpret_cast<const Pack<T>*>(weight + i);
    b = *reinterpret_cast<const Pack<T>*>(bias + i);
    for (int j = 0; j < ROWS; ++j) add_up(pack[j], mean[j]);
  }
  sum_lanes(mean, blockDim.x);
  for (int j = 0; j < ROWS; ++j) {
    mean[j] /= cols;
    if (i < cols) add_up_squares(pack[j], mean[j], rstd[j]);
  }
  sum_lanes(rstd, blockDim.x);
  for (int j = 0; j < ROWS; ++j) {
    const int64_t r = row + j * blockDim.y;
    if (i >= cols || r >= rows) continue;
    rstd[j] = rsqrt(rstd[j] / cols + eps);
    *reinterpret_cast<Pack<T>*>(out + r * cols + i) = normalize(pack[j], mean[j], rstd[j], w, b);
    if (i == 0) {  // the gradient needs both
      mean_out[r] = mean[j];
      rstd_out[r] = rstd[j];
    }
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* /* sum */,
                   T* out, W* mean, W* rstd, int64_t rows, int64_t cols, double eps,
                   cudaStream_t stream) {
  uintptr_t bits = cols * sizeof(T);
  for (const T* pointer : {x, weight, bias, static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  if (bits % 16 != 0 || cols > 32 * N<T> || residual != nullptr) return cudaErrorInvalidValue;
  int lanes = 1;
  while (lanes * N<T> < cols) lanes *= 2;
  const int64_t per_block = int64_t{BLOCK} / lanes * ROWS;
  const int64_t blocks = (rows + per_block - 1) / per_block;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  layer_norm_kernel<<<static_cast<unsigned>(blocks), dim3(lanes, BLOCK / lanes), 0, stream>>>(
      x, weight, bias, out, mean, rstd, rows, static_cast<int>(cols), static_cast<W>(eps));
  return cudaGetLastError();
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
