// 4_tensor_cores.cu: the same product on the Tensor Cores, channels-last
// Before : rung 3 multiplies one pair of numbers an instruction, and finds each number by itself
// Idea   : where channels lie side by side, 8 of a pixel are one load of 16 bytes. The product is
//          done tap by tap: 32 channels of one tap at a time, with WMMA from padded shared memory
// Cost   : 2·N·K·P·Q·C·R·S / groups operations; each pixel is loaded again for each tap
//          Legal: channels-last, C / groups a multiple of 8, 16-byte aligned; float16 from sm_75,
//          bfloat16 from sm_80
// Result : 0.12 of matmul, 192.02x rung 1, 0.60x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : PAD 8 → 0; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdint>
#include <type_traits>

using namespace nvcuda;

constexpr int BLOCK = 256;                 // of the second kernel
constexpr int BM = 128, BN = 64, BK = 32;  // pixels, filters, channels at a time
constexpr int WARPS = 4;                   // each computes BM / WARPS pixels
constexpr int THREADS = WARPS * 32;
constexpr int PAD = 8;  // rows of 80 bytes, so that 8 rows begin in different banks

struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

__device__ __half to(float x, __half) { return __float2half(x); }
__device__ __nv_bfloat16 to(float x, __nv_bfloat16) { return __float2bfloat16(x); }

// The window of pixel j of y: its image, and its first row and column in it
struct Window {
  int64_t image;
  int h, w;
};
__device__ Window window(const Conv& v, int64_t j, int64_t pixels) {
  const int64_t n = j / v.out_w / v.out_h;
  const int p = static_cast<int>(j / v.out_w % v.out_h), q = static_cast<int>(j % v.out_w);
  const int h = j < pixels ? p * v.stride_h - v.pad_h : -(1 << 30);  // outside of every image
  return {n * v.height * v.width, h, q * v.stride_w - v.pad_w};
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv_kernel(const T* x, const T* weight, T* y, Conv v, int64_t pixels) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr bool SUPPORTED = std::is_same_v<T, __half>;
#else
  constexpr bool SUPPORTED = true;
#endif
  if constexpr (SUPPORTED) {
    __shared__ alignas(32) T a_tile[BM][BK + PAD];  // a row a pixel
    __shared__ alignas(32) T b_tile[BN][BK + PAD];  // a row a filter
    __shared__ alignas(32) float results[WARPS][16 * 16];
    const int depth = v.channels / v.groups, filters = v.filters / v.groups;
    const int tiles_n = (filters + BN - 1) / BN;
    const int k0 = blockIdx.x % tiles_n * BN;  // within the group
    const int group = blockIdx.x / tiles_n % v.groups;
    const int64_t j0 = int64_t{blockIdx.x / tiles_n / v.groups} * BM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int STEP = THREADS / (BK / 8);  // rows from one piece of a thread to its next
    const int row = threadIdx.x / (BK / 8), c = threadIdx.x % (BK / 8) * 8;
    Window windows[BM / STEP];
#pragma unroll
    for (int u = 0; u < BM / STEP; ++u) windows[u] = window(v, j0 + row + u * STEP, pixels);

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[BM / WARPS / 16][BN / 16];
    for (auto& line : sum) {
      for (auto& tile : line) wmma::fill_fragment(tile, 0.0f);
    }
    for (int tap = 0; tap < v.kernel_h * v.kernel_w; ++tap) {
      const int dh = tap / v.kernel_w * v.dilation_h, dw = tap % v.kernel_w * v.dilation_w;
      for (int c0 = 0; c0 < depth; c0 += BK) {
        const bool deep = c0 + c < depth;  // all 8 channels, or none
        const uint4 zero = {0, 0, 0, 0};
#pragma unroll
        for (int u = 0; u < BM / STEP; ++u) {
          const int h = windows[u].h + dh, w = windows[u].w + dw;
          const bool inside = deep && h >= 0 && h < v.height && w >= 0 && w < v.width;
          const int64_t pixel = windows[u].image + int64_t{h} * v.width + w;
          const T* from = x + pixel * v.channels + group * depth + c0 + c;
          *reinterpret_cast<uint4*>(&a_tile[row + u * STEP][c]) =
              inside ? *reinterpret_cast<const uint4*>(from) : zero;
        }
#pragma unroll
        for (int u = 0; u < BN; u += STEP) {
          const int64_t k = int64_t{group} * filters + k0 + row + u;
          const bool inside = deep && k0 + row + u < filters;
          const T* from = weight + (k * v.kernel_h * v.kernel_w + tap) * depth + c0 + c;
          *reinterpret_cast<uint4*>(&b_tile[row + u][c]) =
              inside ? *reinterpret_cast<const uint4*>(from) : zero;
        }
        __syncthreads();
#pragma unroll
        for (int p = 0; p < BK; p += 16) {
          wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major> from_b[BN / 16];
#pragma unroll
          for (int n = 0; n < BN / 16; ++n) {
            wmma::load_matrix_sync(from_b[n], &b_tile[n * 16][p], BK + PAD);
          }
#pragma unroll
          for (int m = 0; m < BM / WARPS / 16; ++m) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> from_a;
            wmma::load_matrix_sync(from_a, &a_tile[warp * (BM / WARPS) + m * 16][p], BK + PAD);
#pragma unroll
            for (int n = 0; n < BN / 16; ++n)
              wmma::mma_sync(sum[m][n], from_a, from_b[n], sum[m][n]);
          }
        }
        __syncthreads();
      }
    }
#pragma unroll
    for (int m = 0; m < BM / WARPS / 16; ++m) {
#pragma unroll
      for (int n = 0; n < BN / 16; ++n) {
        // Which lane holds which element is not specified, so the way to T leads through memory.
        wmma::store_matrix_sync(results[warp], sum[m][n], 16, wmma::mem_row_major);
        __syncwarp();
        for (int e = lane; e < 16 * 16; e += 32) {
          const int64_t j = j0 + warp * (BM / WARPS) + m * 16 + e / 16;
          const int k = k0 + n * 16 + e % 16;
          if (j < pixels && k < filters) {
            y[j * v.filters + group * filters + k] = to(results[warp][e], T());
          }
        }
        __syncwarp();
      }
    }
  } else {
    __trap();
  }
}

__device__ float activate(float z, int activation) {
  if (activation == 1) return z < 0.0f ? 0.0f : z;  // NaN stays
  if (activation == 2) return z * 0.5f * (1.0f + erff(z * 0.70710678f));
  return z;
}

// In channels-last the filter changes from one element to the next.
template <typename T>
__global__ void finish_kernel(T* y, const T* bias, int64_t total, int filters, int activation) {
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i >= total) return;
  const T sum = y[i], b = bias ? bias[i % filters] : T(0.0f);
  y[i] = T(activate(static_cast<float>(sum) + static_cast<float>(b), activation));
}

template <typename T>
cudaError_t launch(int capability, const T* x, const T* weight, const T* bias, T* y, const Conv& v,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight);
  if (!v.channels_last || v.channels / v.groups % 8 || bits % 16) return cudaErrorNotSupported;
  int device = 0, major = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < capability) return cudaErrorNotSupported;
  const int64_t pixels = int64_t{v.batch} * v.out_h * v.out_w;
  const int64_t blocks = (pixels + BM - 1) / BM * ((v.filters / v.groups + BN - 1) / BN) * v.groups;
  const int64_t total = pixels * v.filters, finish = (total + BLOCK - 1) / BLOCK;
  if (blocks > INT32_MAX || finish > INT32_MAX) return cudaErrorInvalidValue;
  conv_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(x, weight, y, v, pixels);
  if (bias || v.activation) {
    finish_kernel<<<static_cast<unsigned>(finish), BLOCK, 0, stream>>>(y, bias, total, v.filters,
                                                                       v.activation);
  }
  return cudaGetLastError();
}

extern "C" cudaError_t conv2d_launch_f32(const float*, const float*, const float*, float*, Conv,
                                         cudaStream_t) {
  return cudaErrorNotSupported;
}
extern "C" cudaError_t conv2d_launch_f64(const double*, const double*, const double*, double*, Conv,
                                         cudaStream_t) {
  return cudaErrorNotSupported;
}
extern "C" cudaError_t conv2d_launch_f16(const __half* x, const __half* weight, const __half* bias,
                                         __half* y, Conv v, cudaStream_t stream) {
  return launch(7, x, weight, bias, y, v, stream);
}
extern "C" cudaError_t conv2d_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                          const __nv_bfloat16* bias, __nv_bfloat16* y, Conv v,
                                          cudaStream_t stream) {
  return launch(8, x, weight, bias, y, v, stream);
}
