// 10_resident.cu: the weights of a 3 x 3 layer stay in shared memory
// Before : every block of rung 9 loads all weights again, and waits for the slowest of its warps
//          at every tap
// Idea   : a block an SM, which keeps 9 taps of 64 x 64 weights, 72 KB, and works through many
//          tiles. Each warp loads its next patch while it multiplies: no barrier in the main loop
// Cost   : 2·N·K·P·Q·C·9 operations; the weights are loaded once an SM
//          Legal: sm_90a; float16, bfloat16; channels-last; 3 x 3 taps, stride 1, no dilation, one
//          group; C and K multiples of 8, at most 64; pointers aligned to 16 bytes
// Result : 0.41 of matmul, 662.88x rung 1, 2.06x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : wgmma_wait<1> → 0 in multiply(); predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int TILE_H = 4, TILE_W = 8;  // a warp computes TILE_H x TILE_W pixels
constexpr int BN = 64, BK = 64;        // of BN filters, from BK channels
constexpr int TAPS = 9, PATCH_W = TILE_W + 2, PIXELS = (TILE_H + 2) * PATCH_W;
constexpr int WARPS = 8;  // tiles of a block at a time; two warpgroups
constexpr int THREADS = WARPS * 32;
constexpr int ALIGNMENT = 1024;  // of swizzled shared memory
constexpr int SHARED_BYTES = (TAPS * BN + WARPS * 2 * PIXELS) * BK * 2 + ALIGNMENT;  // 193 KB

// What only Hopper has stays out of builds for other GPUs, and the launcher then refuses.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__SIMT_CPU__)
#define HOPPER 1
#else
#define HOPPER 0
#endif

struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

#if HOPPER
__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where channel j of row i (a pixel or a filter) lies: rows of 128 bytes, whose 16-byte pieces are
// permuted as wgmma wants it, which also keeps any 8 rows in different banks.
__device__ int place(int i, int j) { return i * BK + (j ^ i % 8 * 8); }

// Starts to copy 16 bytes from global to shared memory past the registers, or to write zeros.
__device__ void cp_async(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ void cp_async_wait() {  // until all groups of this thread but the latest PENDING arrived
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Makes what cp.async wrote visible to wgmma, which reads through the async proxy.
__device__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ldmatrix: lane l names row l % 8 of the 8 x 8 matrix l / 8; each lane gets two elements of each.
__device__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Describes BN filters: rows of 128 bytes, 8 of which are 1024 bytes from the next 8.
__device__ uint64_t wgmma_descriptor(const void* p) {
  constexpr uint64_t STRIDE = 1024 >> 4, SWIZZLE_128 = 1;
  return (shared_address(p) & 0x3FFFF) >> 4 | uint64_t{1} << 16 | STRIDE << 32 | SWIZZLE_128 << 62;
}
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// d (64 x 64) += a (64 x 16, of which a warp holds 16 rows) · b (16 x 64, in shared memory)
#define F4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_M64N64K16(type)                                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                   \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "    \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
               "%31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"                                \
               : F4(0), F4(1), F4(2), F4(3), F4(4), F4(5), F4(6), F4(7)                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <typename T>
__device__ void wgmma(float (&d)[BN / 8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    WGMMA_M64N64K16("f16");
  } else {
    WGMMA_M64N64K16("bf16");
  }
}

__device__ float activate(float z, int activation) {
  if (activation == 1) return z < 0.0f ? 0.0f : z;  // NaN stays
  if (activation == 2) return z * 0.5f * (1.0f + erff(z * 0.70710678f));
  return z;
}
#endif

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    resident_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v, int64_t tiles) {
#if HOPPER
  extern __shared__ char dynamic[];
  __shared__ float shifts[BN];  // the bias
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* weights = reinterpret_cast<T*>(dynamic + (-shared_address(dynamic) & (ALIGNMENT - 1)));
  T* patches = weights + TAPS * BN * BK + warp * 2 * PIXELS * BK;  // of this warp
  const int tiles_h = (v.out_h + TILE_H - 1) / TILE_H, tiles_w = (v.out_w + TILE_W - 1) / TILE_W;

  auto load_patch = [&](int64_t tile, int stage) {
    const int64_t n = tile / tiles_w / tiles_h;
    const int p0 = static_cast<int>(tile / tiles_w % tiles_h) * TILE_H;
    const int q0 = static_cast<int>(tile % tiles_w) * TILE_W;
    const int c = lane % 8 * 8;  // 8 lanes a pixel
    const T* image = x + n * v.height * v.width * v.channels + c;
    T* to = patches + stage * PIXELS * BK;
    for (int pixel = lane / 8; pixel < PIXELS; pixel += 4) {
      const int h = p0 - v.pad_h + pixel / PATCH_W, w = q0 - v.pad_w + pixel % PATCH_W;
      const bool inside =
          tile < tiles && c < v.channels && h >= 0 && h < v.height && w >= 0 && w < v.width;
      const T* from = image + (int64_t{h} * v.width + w) * v.channels;
      cp_async(to + place(pixel, c), inside ? from : x, inside);
    }
    cp_async_commit();
  };

  if (const int k = threadIdx.x; k < BN) {
    shifts[k] = bias && k < v.filters ? static_cast<float>(bias[k]) : 0.0f;
  }
  for (int e = threadIdx.x; e < TAPS * BN * 8; e += THREADS) {
    const int tap = e / (BN * 8), k = e / 8 % BN, c = e % 8 * 8;
    const bool inside = k < v.filters && c < v.channels;
    const T* from = weight + (k * TAPS + tap) * v.channels + c;
    cp_async(weights + place(tap * BN + k, c), inside ? from : weight, inside);
  }
  const int64_t step = int64_t{gridDim.x} * WARPS;
  int64_t base = int64_t{blockIdx.x} * WARPS;
  load_patch(base + warp, 0);
  cp_async_wait<0>();
  fence_proxy_async();
  __syncthreads();

  // Of 16 pixels (two rows of the tile) x 16 channels this lane names to ldmatrix:
  const int first = lane % 16 / 8 * PATCH_W + lane % 8, high = lane / 16 * 8;
  int stage = 0;
  for (; base < tiles; base += step, stage ^= 1) {  // alike for all warps: they share wgmma
    const int64_t tile = base + warp;
    load_patch(tile + step, stage ^ 1);
    cp_async_wait<1>();
    __syncwarp();
    T* patch = patches + stage * PIXELS * BK;
    float sum[TILE_H / 2][BN / 8][4] = {};
    auto multiply = [&](uint32_t (&a)[BK / 16][TILE_H / 2][4], int tap) {
      const int shifted = first + tap / 3 * PATCH_W + tap % 3;
#pragma unroll
      for (int p = 0; p < BK; p += 16) {
#pragma unroll
        for (int m = 0; m < TILE_H / 2; ++m) {
          ldmatrix_x4(a[p / 16][m], patch + place(shifted + m * 2 * PATCH_W, p + high));
        }
      }
      wgmma_fence();
#pragma unroll
      for (int p = 0; p < BK; p += 16) {
        const uint64_t b = wgmma_descriptor(weights + tap * BN * BK + p);
#pragma unroll
        for (int m = 0; m < TILE_H / 2; ++m) wgmma<T>(sum[m], a[p / 16][m], b);
      }
      wgmma_commit();
      wgmma_wait<1>();  // so the registers of the tap before are free
    };
    uint32_t even[BK / 16][TILE_H / 2][4], odd[BK / 16][TILE_H / 2][4];
    multiply(even, 0);
#pragma unroll 1
    for (int tap = 1; tap < TAPS; tap += 2) {
      multiply(odd, tap);
      multiply(even, tap + 1);
    }
    wgmma_wait<0>();
    __syncwarp();  // the patch is read: its room holds the results now

    // [TILE_H x TILE_W pixels][BN filters], 16-byte pieces swizzled
#pragma unroll
    for (int k = 0; k < BN / 8; ++k) {
      const int at = lane % 4 * 2;  // two of 8 filters, the same for all pixels
      const float shift0 = shifts[k * 8 + at], shift1 = shifts[k * 8 + at + 1];
#pragma unroll
      for (int m = 0; m < TILE_H / 2; ++m) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          T* to = patch + place(m * 16 + e / 2 * 8 + lane / 4, k * 8) + at;
          to[0] = T(activate(sum[m][k][e] + shift0, v.activation));
          to[1] = T(activate(sum[m][k][e + 1] + shift1, v.activation));
        }
      }
    }
    __syncwarp();
    const int64_t n = tile / tiles_w / tiles_h;
    const int p0 = static_cast<int>(tile / tiles_w % tiles_h) * TILE_H;
    const int q0 = static_cast<int>(tile % tiles_w) * TILE_W;
    const int k = lane % 8 * 8;  // 8 lanes write 64 filters of a pixel
    for (int pixel = lane / 8; pixel < TILE_H * TILE_W; pixel += 4) {
      const int p = p0 + pixel / TILE_W, q = q0 + pixel % TILE_W;
      if (tile >= tiles || p >= v.out_h || q >= v.out_w || k >= v.filters) continue;
      *reinterpret_cast<float4*>(y + ((n * v.out_h + p) * v.out_w + q) * v.filters + k) =
          *reinterpret_cast<const float4*>(patch + place(pixel, k));
    }
    __syncwarp();
  }
  cp_async_wait<0>();  // of the patch after the last
#endif
}

template <typename T>
cudaError_t launch(const T* x, const T* weight, const T* bias, T* y, const Conv& v,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight);
  const bool plain = v.kernel_h == 3 && v.kernel_w == 3 && v.stride_h == 1 && v.stride_w == 1 &&
                     v.dilation_h == 1 && v.dilation_w == 1 && v.groups == 1;
  if (!plain || !v.channels_last || v.channels > BK || v.channels % 8 || v.filters > BN ||
      v.filters % 8 || bits % 16) {
    return cudaErrorNotSupported;
  }
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, resident_kernel<T>);
  if (error != cudaSuccess) return error;
  if (attributes.sharedSizeBytes == 0) return cudaErrorNotSupported;  // built without sm_90a
  error = cudaFuncSetAttribute(resident_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               SHARED_BYTES);
  if (error != cudaSuccess) return error;
  int device = 0, sms = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int64_t tiles =
      int64_t{v.batch} * ((v.out_h + TILE_H - 1) / TILE_H) * ((v.out_w + TILE_W - 1) / TILE_W);
  const int64_t blocks = std::min<int64_t>(sms, (tiles + WARPS - 1) / WARPS);
  resident_kernel<T><<<static_cast<unsigned>(blocks), THREADS, SHARED_BYTES, stream>>>(
      x, weight, bias, y, v, tiles);
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
  return launch(x, weight, bias, y, v, stream);
}
extern "C" cudaError_t conv2d_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                          const __nv_bfloat16* bias, __nv_bfloat16* y, Conv v,
                                          cudaStream_t stream) {
  return launch(x, weight, bias, y, v, stream);
}
