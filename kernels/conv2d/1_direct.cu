// 1_direct.cu: one thread an output element, which walks over its window
// Before : nothing; this is the definition of a convolution, as it is written down
// Idea   : each thread multiplies the window under its pixel with its filter. Bias and activation
//          are a second kernel that reads y and writes it again, as in a chain of PyTorch operators
// Cost   : 2·N·K·P·Q·C·R·S / groups operations, two loads for each two of them
//          Legal: every shape, layout and dtype
// Result : 0.00 of matmul, 0.00x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : let a thread walk over r and s outside, over c inside; predict first for both layouts

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BLOCK = 256;

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

// Element (n, c, h, w) of a tensor with C, H, W; n is 64 bits wide, and so is all that follows.
__device__ int64_t place(bool channels_last, int64_t n, int c, int h, int w, int C, int H, int W) {
  return channels_last ? ((n * H + h) * W + w) * C + c : ((n * C + c) * H + h) * W + w;
}

template <typename T>
__global__ void conv_kernel(const T* x, const T* weight, T* y, Conv v, int64_t total) {
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
  y[i] = T(sum);
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
  const int64_t pixels = int64_t{v.out_h} * v.out_w, total = v.batch * pixels * v.filters;
  const int64_t blocks = (total + BLOCK - 1) / BLOCK;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  conv_kernel<<<grid, BLOCK, 0, stream>>>(x, weight, y, v, total);
  if (bias || v.activation) {
    finish_kernel<<<grid, BLOCK, 0, stream>>>(y, bias, total, v.channels_last ? 1 : pixels,
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
