// 6_fused_epilogue.cu: bias and activation while the results are still in registers
// Before : rung 5's second kernel reads y and writes it again: as many bytes as the convolution
//          itself must move
// Idea   : of every 8 filters a lane holds the same two for all its pixels: 8 numbers of the bias
//          serve for all. The sums are rounded once, after the activation
// Cost   : 2·N·K·P·Q·C·R·S / groups operations; y is written once, and not read
//          Legal: as rung 5
// Result : 0.23 of matmul, 369.94x rung 1, 1.15x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : BM 128 → 256; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BM = 128, BN = 64, BK = 32;            // pixels, filters, channels at a time
constexpr int WM = 64, WN = 32;                      // of a warp
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;  // 128
constexpr int STAGES = 3;                            // 36 KB
constexpr int STEP = THREADS / (BK / 8);             // rows from one piece of a thread to its next

struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

// The window of pixel j of y: its first element's place in x, and its first row and column
struct Window {
  int64_t at;
  int h, w;
};
__device__ Window window(const Conv& v, int64_t j, int64_t pixels) {
  const int64_t n = j / v.out_w / v.out_h;
  const int p = static_cast<int>(j / v.out_w % v.out_h), q = static_cast<int>(j % v.out_w);
  const int h = p * v.stride_h - v.pad_h, w = q * v.stride_w - v.pad_w;
  const int64_t at = ((n * v.height + h) * v.width + w) * v.channels;
  return {at, j < pixels ? h : -(1 << 30), w};  // beyond the last: outside of every image
}

// Where element (i, j) of a tile lies: rows of 64 bytes, whose 16-byte pieces are permuted so that
// the 8 rows that ldmatrix reads at once are in different banks.
__device__ int place(int i, int j) { return i * BK + (j ^ i / 2 % 4 * 8); }

// Starts to copy 16 bytes from global to shared memory past the registers, or to write zeros.
// .ca: by way of the L1, where the next tap finds most of it again.
// Turing has no cp.async: there it is an ordinary copy.
__device__ void cp_async(void* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
#else
  *static_cast<float4*>(to) = inside ? *static_cast<const float4*>(from) : float4{0, 0, 0, 0};
#endif
}
__device__ void cp_async_commit() {  // what was asked for since the last commit is one group
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int PENDING>
__device__ void cp_async_wait() {  // until all groups of this thread but the latest PENDING arrived
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// ldmatrix: lane l names row l % 8 of the 8 x 8 matrix l / 8; each lane gets two elements of each.
__device__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d (16 x 8) += a (16 x 16) · b (16 x 8)
template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else  // Turing multiplies 8 steps of K at once, and float16 only
  if constexpr (std::is_same_v<T, __half>) {
    for (int half = 0; half < 2; ++half) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half ? b1 : b0));
    }
  } else {
    __trap();
  }
#endif
}

__device__ float activate(float z, int activation) {
  if (activation == 1) return z < 0.0f ? 0.0f : z;  // NaN stays
  if (activation == 2) return z * 0.5f * (1.0f + erff(z * 0.70710678f));
  return z;
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
    conv_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v, int64_t pixels) {
  __shared__ alignas(128) T a_tile[STAGES][BM * BK];  // a row a pixel
  __shared__ alignas(128) T b_tile[STAGES][BN * BK];  // a row a filter
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int taps = v.kernel_h * v.kernel_w;
  const int tiles_n = (filters + BN - 1) / BN;
  const int k0 = blockIdx.x % tiles_n * BN;  // within the group
  const int group = blockIdx.x / tiles_n % v.groups;
  const int64_t j0 = int64_t{blockIdx.x / tiles_n / v.groups} * BM;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / (BN / WN) * WM, col = warp % (BN / WN) * WN;  // the warp's corner

  // What this thread loads: 8 channels from c on, of every STEP-th pixel and filter
  const int first = threadIdx.x / (BK / 8), c = threadIdx.x % (BK / 8) * 8;
  Window windows[BM / STEP];
#pragma unroll
  for (int u = 0; u < BM / STEP; ++u) {
    windows[u] = window(v, j0 + first + u * STEP, pixels);
    windows[u].at += group * depth + c;
  }
  const T* filter = weight + (int64_t{group} * filters + k0 + first) * taps * depth + c;
  int tap_h = 0, tap_w = 0, c0 = 0;  // what load() takes next
  auto load = [&](int stage) {
    const int dh = tap_h * v.dilation_h, dw = tap_w * v.dilation_w;
    const bool deep = tap_h < v.kernel_h && c0 + c < depth;  // all 8 channels, or none
    const int64_t step = (int64_t{dh} * v.width + dw) * v.channels + c0;
#pragma unroll
    for (int u = 0; u < BM / STEP; ++u) {
      const int h = windows[u].h + dh, w = windows[u].w + dw;
      const bool inside = deep && h >= 0 && h < v.height && w >= 0 && w < v.width;
      cp_async(a_tile[stage] + place(first + u * STEP, c), inside ? x + windows[u].at + step : x,
               inside);
    }
    const int64_t tap = (int64_t{tap_h} * v.kernel_w + tap_w) * depth + c0;
#pragma unroll
    for (int u = 0; u < BN / STEP; ++u) {
      const bool inside = deep && k0 + first + u * STEP < filters;
      const T* from = filter + int64_t{u} * STEP * taps * depth + tap;
      cp_async(b_tile[stage] + place(first + u * STEP, c), inside ? from : weight, inside);
    }
    cp_async_commit();
    c0 += BK;
    if (c0 < depth) return;
    c0 = 0;
    if (++tap_w < v.kernel_w) return;
    tap_w = 0;
    ++tap_h;
  };

  float sum[WM / 16][WN / 8][4] = {};
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  const int rounds = taps * ((depth + BK - 1) / BK);
  for (int round = 0, stage = 0, next = STAGES - 1; round < rounds; ++round) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load(next);
    // The row and column of a 16 x 16 piece that this lane names to ldmatrix
    const int low = lane % 16, high = lane / 16 * 8;  // down, then right
    const int turned_low = lane % 8 + lane / 16 * 8, turned_high = lane / 8 % 2 * 8;  // right first
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
      uint32_t from_a[WM / 16][4];
#pragma unroll
      for (int m = 0; m < WM / 16; ++m) {
        ldmatrix_x4(from_a[m], a_tile[stage] + place(row + m * 16 + low, p + high));
      }
#pragma unroll
      for (int n = 0; n < WN / 16; ++n) {
        uint32_t from_b[4];
        ldmatrix_x4(from_b, b_tile[stage] + place(col + n * 16 + turned_low, p + turned_high));
#pragma unroll
        for (int m = 0; m < WM / 16; ++m) {
          mma<T>(sum[m][2 * n], from_a[m], from_b[0], from_b[1]);
          mma<T>(sum[m][2 * n + 1], from_a[m], from_b[2], from_b[3]);
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
  cp_async_wait<0>();  // the last groups only write zeros, but nothing should be left under way
#pragma unroll
  for (int n = 0; n < WN / 8; ++n) {
    const int k = k0 + col + n * 8 + lane % 4 * 2;  // two of these 8, the same for all pixels
    if (k >= filters) break;
    float shift[2] = {};
    if (bias) {
      shift[0] = static_cast<float>(bias[group * filters + k]);
      if (k + 1 < filters) shift[1] = static_cast<float>(bias[group * filters + k + 1]);
    }
#pragma unroll
    for (int m = 0; m < WM / 16; ++m) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {  // of pixel lane / 4, and of the eighth after it
        const int64_t j = j0 + row + m * 16 + e / 2 * 8 + lane / 4;
        alignas(4) const T pair[] = {T(activate(sum[m][n][e] + shift[0], v.activation)),
                                     T(activate(sum[m][n][e + 1] + shift[1], v.activation))};
        T* to = y + j * v.filters + group * filters + k;
        if (j >= pixels) continue;
        if (filters % 2 == 0) {
          *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(pair);
        } else {
          to[0] = pair[0];
          if (k + 1 < filters) to[1] = pair[1];
        }
      }
    }
  }
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
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  conv_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(x, weight, bias, y, v, pixels);
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
