// 2_shared_tile.cu: a block loads its piece of the image once, and takes it for 8 filters
// Before : rung 1 loads each pixel again for each filter and each window that it lies in
// Idea   : the pixels that a tile of 16 x 16 results needs (its own and a border) go to shared
//          memory, one channel at a time. Each thread has one result of 8 filters
// Cost   : 2·N·K·P·Q·C·R·S / groups operations, 9 shared loads for 8 multiply-adds
//          Legal: N, C, H, W layout; the tile with its border fits into 48 KB
// Result : 0.13 of matmul, 5.15x rung 1, 0.25x eager  (H200, float32 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu)
// Try    : FILTERS 8 → 16; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;
constexpr int TILE = 16;    // results of a block: TILE x TILE pixels,
constexpr int FILTERS = 8;  // of FILTERS filters
constexpr size_t SHARED = 48 * 1024;

struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
__global__ void __launch_bounds__(BLOCK)
    conv_kernel(const T* x, const T* weight, T* y, Conv v, int patch_h, int patch_w) {
  using A = Wide<T>;
  extern __shared__ double memory[];  // aligned for the widest
  A* patch = reinterpret_cast<A*>(memory);
  A* taps = patch + patch_h * patch_w;  // [R·S][FILTERS]
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int window = v.kernel_h * v.kernel_w;
  unsigned b = blockIdx.x;
  auto take = [&b](int size) {  // splits the last index off
    const int index = static_cast<int>(b % size);
    b /= size;
    return index;
  };
  const int q0 = take((v.out_w + TILE - 1) / TILE) * TILE;
  const int p0 = take((v.out_h + TILE - 1) / TILE) * TILE;
  const int k0 = take((filters + FILTERS - 1) / FILTERS) * FILTERS;  // within the group
  const int group = take(v.groups);
  const int64_t n = b;
  const int h0 = p0 * v.stride_h - v.pad_h, w0 = q0 * v.stride_w - v.pad_w;  // of the patch
  const int t = threadIdx.x, row = t / TILE, col = t % TILE;
  const T* image = x + (n * v.channels + group * depth) * v.height * v.width;
  const T* filter = weight + (int64_t{group} * filters + k0) * depth * window;

  A sum[FILTERS] = {};
  for (int c = 0; c < depth; ++c) {
    for (int e = t; e < patch_h * patch_w; e += BLOCK) {
      const int h = h0 + e / patch_w, w = w0 + e % patch_w;
      const bool inside = h >= 0 && h < v.height && w >= 0 && w < v.width;
      const T pixel = inside ? image[(int64_t{c} * v.height + h) * v.width + w] : T(0.0f);
      patch[e] = A(pixel);
    }
    for (int e = t; e < window * FILTERS; e += BLOCK) {
      const int k = e / window, tap = e % window;
      const T one = k0 + k < filters ? filter[(int64_t{k} * depth + c) * window + tap] : T(0.0f);
      taps[tap * FILTERS + k] = A(one);
    }
    __syncthreads();
    for (int r = 0, tap = 0; r < v.kernel_h; ++r) {
      const int from = (row * v.stride_h + r * v.dilation_h) * patch_w + col * v.stride_w;
      for (int s = 0; s < v.kernel_w; ++s, ++tap) {
        const A pixel = patch[from + s * v.dilation_w];
#pragma unroll
        for (int k = 0; k < FILTERS; ++k) sum[k] += pixel * taps[tap * FILTERS + k];
      }
    }
    __syncthreads();  // before the next channel overwrites this one
  }
  const int p = p0 + row, q = q0 + col;
  if (p >= v.out_h || q >= v.out_w) return;
#pragma unroll
  for (int k = 0; k < FILTERS; ++k) {
    const int64_t plane = n * v.filters + group * filters + k0 + k;
    if (k0 + k < filters) y[(plane * v.out_h + p) * v.out_w + q] = T(sum[k]);
  }
}

template <typename A>
__device__ A activate(A z, int activation) {
  if (activation == 1) return z < A(0) ? A(0) : z;  // NaN stays
  if (activation == 2) return z * A(0.5) * (A(1) + erf(z * A(0.70710678118654752)));
  return z;
}

// One filter's elements lie `inner` in a row.
template <typename T>
__global__ void finish_kernel(T* y, const T* bias, int64_t total, int64_t inner, int filters,
                              int activation) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i >= total) return;
  const T sum = y[i], b = bias ? bias[i / inner % filters] : T(0.0f);
  y[i] = T(activate(Wide<T>(sum) + Wide<T>(b), activation));
}

template <typename T>
cudaError_t launch(const T* x, const T* weight, const T* bias, T* y, const Conv& v,
                   cudaStream_t stream) {
  const int64_t patch_h =
      int64_t{TILE - 1} * v.stride_h + int64_t{v.kernel_h - 1} * v.dilation_h + 1;
  const int64_t patch_w =
      int64_t{TILE - 1} * v.stride_w + int64_t{v.kernel_w - 1} * v.dilation_w + 1;
  constexpr int64_t MOST = SHARED / sizeof(Wide<T>);
  if (v.channels_last || patch_h > MOST || patch_w > MOST) return cudaErrorNotSupported;
  const int64_t shared = patch_h * patch_w + int64_t{v.kernel_h} * v.kernel_w * FILTERS;
  if (shared > MOST) return cudaErrorNotSupported;
  auto pieces = [](int64_t size, int piece) { return (size + piece - 1) / piece; };
  const int64_t blocks = pieces(v.out_w, TILE) * pieces(v.out_h, TILE) * v.batch *
                         pieces(v.filters / v.groups, FILTERS) * v.groups;
  const int64_t pixels = int64_t{v.out_h} * v.out_w, total = v.batch * pixels * v.filters;
  const int64_t finish = (total + BLOCK - 1) / BLOCK;
  if (blocks > INT32_MAX || finish > INT32_MAX) return cudaErrorInvalidValue;
  conv_kernel<<<static_cast<unsigned>(blocks), BLOCK, shared * sizeof(Wide<T>), stream>>>(
      x, weight, y, v, static_cast<int>(patch_h), static_cast<int>(patch_w));
  if (bias || v.activation) {
    finish_kernel<<<static_cast<unsigned>(finish), BLOCK, 0, stream>>>(y, bias, total, pixels,
                                                                       v.filters, v.activation);
  }
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T)                                                                       \
  extern "C" cudaError_t conv2d_launch_##SUFFIX(const T* x, const T* weight, const T* bias, T* y, \
                                                Conv v, cudaStream_t stream) {                    \
    return launch(x, weight, bias, y, v, stream);                                                 \
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
