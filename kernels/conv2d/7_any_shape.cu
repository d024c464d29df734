// 7_any_shape.cu: every shape, layout and dtype, with its epilogue
// Before : rungs 4 to 6 want 16 bits, channels-last, C / groups a multiple of 8
// Idea   : rung 3 with bias and activation in its epilogue; and where a group has few filters
//          (depthwise), rung 1: a tile of 64 filters would be computed for one
// Cost   : 2·N·K·P·Q·C·R·S / groups operations, without Tensor Cores
//          Legal: every shape, layout and dtype, from sm_75 on
// Result : 0.02 of matmul, 30.96x rung 1, 0.10x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : FEW 8 → 0: what does a depthwise convolution take as a matrix product?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BM = 64, BN = 128, BK = 8;      // filters, pixels, products at a time
constexpr int TM = 8, TN = 8;                 // results of a thread, in pieces of 4
constexpr int THREADS = BM / TM * (BN / TN);  // 128: each loads one column
constexpr int BLOCK = 256;                    // of the direct kernel
constexpr int FEW = 8;  // filters in a group, below which nothing is to be shared

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

template <typename A>
__device__ A activate(A z, int activation) {
  if (activation == 1) return z < A(0) ? A(0) : z;  // NaN stays
  if (activation == 2) return z * A(0.5) * (A(1) + erf(z * A(0.70710678118654752)));
  return z;
}

template <typename A>
struct alignas(16) Four {  // one load of 16 bytes (float64: two)
  A at[4];
};
template <typename A>
__device__ const Four<A>& four(const A* from) {
  return *reinterpret_cast<const Four<A>*>(from);
}

struct Tap {       // an element of a window
  int64_t offset;  // from the window's first element, in x
  int h, w;        // and in pixels
};

// Element k of a filter, counted as the filter lies in memory: which channel, row, column?
__device__ void find(Tap& tap, const Conv& v, int depth, int k) {
  const bool last = v.channels_last;
  const int window = v.kernel_h * v.kernel_w;
  const int c = last ? k % depth : k / window, rs = last ? k / depth : k % window;
  const int h = rs / v.kernel_w * v.dilation_h, w = rs % v.kernel_w * v.dilation_w;
  const int64_t at = int64_t{h} * v.width + w;
  tap.offset = last ? at * v.channels + c : at + int64_t{c} * v.height * v.width;
  tap.h = k < depth * window ? h : -(1 << 30);  // beyond the last: outside of every image
  tap.w = w;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v, int64_t pixels) {
  using A = Wide<T>;
  __shared__ alignas(16) A a_tile[BK][BM + 4];  // 4: so that 8 rows are in different banks
  __shared__ alignas(16) A b_tile[BK][BN];
  __shared__ Tap taps[BK];
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int length = depth * v.kernel_h * v.kernel_w;  // of a filter
  const int tiles_m = (filters + BM - 1) / BM;
  const int k0 = blockIdx.x % tiles_m * BM;  // within the group
  const int group = blockIdx.x / tiles_m % v.groups;
  const int64_t j0 = int64_t{blockIdx.x / tiles_m / v.groups} * BN;
  const int t = threadIdx.x, row = t / (BN / TN) * 4, col = t % (BN / TN) * 4;
  const T* filter = weight + (int64_t{group} * filters + k0) * length;

  // The window of this thread's column. Beyond the last pixel nothing is inside the image.
  const int64_t j = j0 + t, plane = int64_t{v.out_h} * v.out_w;
  const int p = static_cast<int>(j % plane / v.out_w), q = static_cast<int>(j % v.out_w);
  const int h0 = j < pixels ? p * v.stride_h - v.pad_h : -(1 << 30);
  const int w0 = q * v.stride_w - v.pad_w;
  const int64_t first = (j / plane * v.height + h0) * v.width + w0;  // channels-last
  const int64_t base = v.channels_last ? first * v.channels + group * depth
                                       : first + (j / plane * (v.channels - 1) + group * depth) *
                                                     (int64_t{v.height} * v.width);

  A sum[TM][TN] = {};
  T from_a[BM * BK / THREADS], from_b[BK];  // the next tiles, on their way
  auto fetch = [&](int begin) {
#pragma unroll
    for (int u = 0; u < BM * BK / THREADS; ++u) {
      const int e = t + u * THREADS, i = e / BK, k = begin + e % BK;
      from_a[u] = k0 + i < filters && k < length ? filter[int64_t{i} * length + k] : T(0.0f);
    }
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      const int h = h0 + taps[k].h, w = w0 + taps[k].w;
      const bool inside = h >= 0 && h < v.height && w >= 0 && w < v.width;
      from_b[k] = inside ? x[base + taps[k].offset] : T(0.0f);
    }
  };
  if (t < BK) find(taps[t], v, depth, t);
  __syncthreads();
  fetch(0);
  for (int begin = 0; begin < length; begin += BK) {
    __syncthreads();  // all have read the taps, and the tiles of the round before
#pragma unroll
    for (int u = 0; u < BM * BK / THREADS; ++u) {
      const int e = t + u * THREADS;
      a_tile[e % BK][e / BK] = A(from_a[u]);
    }
#pragma unroll
    for (int k = 0; k < BK; ++k) b_tile[k][t] = A(from_b[k]);
    if (t < BK) find(taps[t], v, depth, begin + BK + t);
    __syncthreads();
    if (begin + BK < length) fetch(begin + BK);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      Four<A> with_a[TM / 4], with_b[TN / 4];
#pragma unroll
      for (int m = 0; m < TM; m += 4) with_a[m / 4] = four(&a_tile[k][row + m / 4 * (BM / 2)]);
#pragma unroll
      for (int c = 0; c < TN; c += 4) with_b[c / 4] = four(&b_tile[k][col + c / 4 * (BN / 2)]);
#pragma unroll
      for (int m = 0; m < TM; ++m) {
#pragma unroll
        for (int c = 0; c < TN; ++c) {
          sum[m][c] += with_a[m / 4].at[m % 4] * with_b[c / 4].at[c % 4];
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < TN; ++c) {
    const int64_t pixel = j0 + col + c % 4 + c / 4 * (BN / 2);
    if (pixel >= pixels) break;
    const int64_t n = pixel / plane;
#pragma unroll
    for (int m = 0; m < TM; ++m) {
      const int k = k0 + row + m % 4 + m / 4 * (BM / 2);
      const int64_t f = int64_t{group} * filters + k;
      const int64_t at =
          v.channels_last ? pixel * v.filters + f : pixel + (n * (v.filters - 1) + f) * plane;
      if (k >= filters) continue;
      const A shift = bias ? A(bias[f]) : A(0);
      y[at] = T(activate(sum[m][c] + shift, v.activation));
    }
  }
}

// Element (n, c, h, w) of a tensor with C, H, W; n is 64 bits wide, and so is all that follows.
__device__ int64_t place(bool channels_last, int64_t n, int c, int h, int w, int C, int H, int W) {
  return channels_last ? ((n * H + h) * W + w) * C + c : ((n * C + c) * H + h) * W + w;
}

template <typename T>
__global__ void direct_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v,
                              int64_t total) {
  int64_t n = int64_t{blockIdx.x} * BLOCK + threadIdx.x;  // y's elements in the order they lie in
  if (n >= total) return;
  const int64_t i = n;
  auto take = [&n](int size) {  // splits the last index off
    const int index = static_cast<int>(n % size);
    n /= size;
    return index;
  };
  const bool last = v.channels_last;
  int k = last ? take(v.filters) : 0;
  const int q = take(v.out_w), p = take(v.out_h);
  if (!last) k = take(v.filters);

  const int depth = v.channels / v.groups;
  const int c0 = k / (v.filters / v.groups) * depth;  // the group's first channel
  Wide<T> sum = 0;
  for (int c = 0; c < depth; ++c) {
    for (int r = 0; r < v.kernel_h; ++r) {
      const int h = p * v.stride_h - v.pad_h + r * v.dilation_h;
      if (h < 0 || h >= v.height) continue;
      for (int s = 0; s < v.kernel_w; ++s) {
        const int w = q * v.stride_w - v.pad_w + s * v.dilation_w;
        if (w < 0 || w >= v.width) continue;
        const T a = x[place(last, n, c0 + c, h, w, v.channels, v.height, v.width)];
        const T b = weight[place(last, k, c, r, s, depth, v.kernel_h, v.kernel_w)];
        sum += Wide<T>(a) * Wide<T>(b);
      }
    }
  }
  if (bias) sum += Wide<T>(bias[k]);
  y[i] = T(activate(sum, v.activation));
}

template <typename T>
cudaError_t start(const T* x, const T* weight, const T* bias, T* y, const Conv& v,
                  cudaStream_t stream) {
  const int64_t pixels = int64_t{v.batch} * v.out_h * v.out_w, total = pixels * v.filters;
  const bool few = v.filters / v.groups < FEW;
  const int64_t tiles_m = (v.filters / v.groups + BM - 1) / BM * int64_t{v.groups};
  const int64_t blocks = few ? (total + BLOCK - 1) / BLOCK : (pixels + BN - 1) / BN * tiles_m;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if (few) {
    direct_kernel<<<grid, BLOCK, 0, stream>>>(x, weight, bias, y, v, total);
  } else {
    gemm_kernel<<<grid, THREADS, 0, stream>>>(x, weight, bias, y, v, pixels);
  }
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T)                                                                       \
  extern "C" cudaError_t conv2d_launch_##SUFFIX(const T* x, const T* weight, const T* bias, T* y, \
                                                Conv v, cudaStream_t stream) {                    \
    return start(x, weight, bias, y, v, stream);                                                  \
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
