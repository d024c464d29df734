// 9_wgmma.cu: Hopper's wgmma reads the weights where they lie in shared memory
// Before : in rung 8 every warp loads all weights of a tap into its registers, and mma.sync gets
//          about two thirds out of a Hopper Tensor Core
// Idea   : four warps together issue wgmma, which takes 64 filters from shared memory: a descriptor
//          says where, and how the rows are swizzled. The pixels still come from registers: a
//          shifted patch is nothing that a descriptor can describe, but ldmatrix can load it
// Cost   : 2·N·K·P·Q·C·R·S / groups operations; as many loads as rung 8, for 8 warps a block
//          Legal: sm_90a; as rung 8, with stride 1, patches of at most 128 pixels and a multiple
//          of 8 filters in a group
// Result : 0.32 of matmul, 520.96x rung 1, 1.62x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : SWIZZLE_64 2 → 1: which check fails?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int TILE_H = 4, TILE_W = 8;  // a warp computes TILE_H x TILE_W pixels,
constexpr int BN = 64, BK = 32;        // of BN filters; BK channels at a time
constexpr int WARPS = 8;               // tiles of a block; two warpgroups
constexpr int THREADS = WARPS * 32;
constexpr int STAGES = 3;         // of the weights, one tap each: 12 KB
constexpr int MOST_PIXELS = 128;  // of a patch
constexpr int ALIGNMENT = 1024;   // of swizzled shared memory

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

struct Patches {  // the pixels under a tile, of which a warp has several: `stages`
  int width, pixels, stages;
};

#if HOPPER
__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Where channel j of row i (a pixel or a filter) lies: rows of 64 bytes, whose 16-byte pieces are
// permuted as wgmma wants it, which also keeps any 8 rows in different banks.
__device__ int place(int i, int j) { return i * BK + (j ^ i / 2 % 4 * 8); }

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

// Describes BN filters: rows of 64 bytes, 8 of which are 512 bytes from the next 8.
__device__ uint64_t wgmma_descriptor(const void* p) {
  constexpr uint64_t STRIDE = 512 >> 4, SWIZZLE_64 = 2;
  return (shared_address(p) & 0x3FFFF) >> 4 | uint64_t{1} << 16 | STRIDE << 32 | SWIZZLE_64 << 62;
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
__global__ void __launch_bounds__(THREADS, 2)
    wgmma_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v, Patches patch,
                 int64_t tiles) {
#if HOPPER
  extern __shared__ char dynamic[];
  __shared__ float shifts[BN];  // the bias
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int taps = v.kernel_h * v.kernel_w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* weights = reinterpret_cast<T*>(dynamic + (-shared_address(dynamic) & (ALIGNMENT - 1)));
  T* patches = weights + STAGES * BN * BK + warp * patch.stages * patch.pixels * BK;  // the warp's
  const int tiles_n = (filters + BN - 1) / BN;
  const int k0 = blockIdx.x % tiles_n * BN;  // within the group
  const int group = blockIdx.x / tiles_n % v.groups;
  const int64_t tile = int64_t{blockIdx.x / tiles_n / v.groups} * WARPS + warp;
  const int tiles_h = (v.out_h + TILE_H - 1) / TILE_H, tiles_w = (v.out_w + TILE_W - 1) / TILE_W;
  const int n = static_cast<int>(tile / tiles_w / tiles_h);
  const int p0 = static_cast<int>(tile / tiles_w % tiles_h) * TILE_H;
  const int q0 = static_cast<int>(tile % tiles_w) * TILE_W;
  const int top = tile < tiles ? p0 - v.pad_h : -(1 << 30);  // outside of every image
  const T* image = x + int64_t{n} * v.height * v.width * v.channels + group * depth;
  if (const int k = threadIdx.x; k < BN) {
    const bool given = bias && k0 + k < filters;
    shifts[k] = given ? static_cast<float>(bias[group * filters + k0 + k]) : 0.0f;
  }

  auto load_patch = [&](int chunk, int stage) {
    const int c = chunk * BK + lane % 4 * 8;
    T* to = patches + stage * patch.pixels * BK;
    int h = top, col = lane / 4;  // 4 lanes a pixel; a patch is at least 8 pixels wide
#pragma unroll 1
    for (int pixel = lane / 4; pixel < patch.pixels; pixel += 8) {
      const int w = q0 - v.pad_w + col;
      const bool inside = c < depth && h >= 0 && h < v.height && w >= 0 && w < v.width;
      const T* from = image + (int64_t{h} * v.width + w) * v.channels + c;
      cp_async(to + place(pixel, lane % 4 * 8), inside ? from : x, inside);
      col += 8;
      if (col >= patch.width) {
        col -= patch.width;
        ++h;
      }
    }
  };
  // What load_weights() takes next: this thread's 8 channels of a filter, for one tap.
  const int row = threadIdx.x / 4, piece = threadIdx.x % 4 * 8;
  const int64_t length = int64_t{taps} * depth;
  const T* next = weight + (int64_t{group} * filters + k0 + row) * length + piece;
  int next_tap = 0, left = k0 + row < filters ? depth - piece : 0;
  auto load_weights = [&](int stage) {
    cp_async(weights + stage * BN * BK + place(row, piece), left > 0 ? next : weight, left > 0);
    next += depth;
    if (++next_tap < taps) return;
    next_tap = 0;
    left -= BK;
    next += BK - length;
  };

  // A patch serves all taps, and must be asked for STAGES - 1 rounds before the first.
  const int ahead = patch.stages - 1, chunks = (depth + BK - 1) / BK;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (i < chunks) load_patch(i, i);
  }
  for (int s = 0; s < STAGES - 1; ++s) {
    load_weights(s);
    cp_async_commit();
  }
  // Of 16 pixels (two rows of the tile) x 16 channels this lane names to ldmatrix:
  const int first = lane % 16 / 8 * patch.width + lane % 8, high = lane / 16 * 8;
  float sum[TILE_H / 2][BN / 8][4] = {};
  int chunk = 0, tap = 0, column = 0, shift = 0, patch_stage = 0, stage = 0;
  for (int round = 0; round < chunks * taps; ++round) {
    cp_async_wait<STAGES - 2>();
    fence_proxy_async();
    __syncthreads();
    const T* from = patches + patch_stage * patch.pixels * BK;
    uint32_t a[BK / 16][TILE_H / 2][4];
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
#pragma unroll
      for (int m = 0; m < TILE_H / 2; ++m) {
        ldmatrix_x4(a[p / 16][m], from + place(first + shift + m * 2 * patch.width, p + high));
      }
    }
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
      const uint64_t b = wgmma_descriptor(weights + stage * BN * BK + p);
#pragma unroll
      for (int m = 0; m < TILE_H / 2; ++m) wgmma<T>(sum[m], a[p / 16][m], b);
    }
    wgmma_commit();
    if (tap == 0 && chunk + ahead < chunks) {
      load_patch(chunk + ahead, patch_stage == 0 ? ahead : patch_stage - 1);
    }
    load_weights((stage + STAGES - 1) % STAGES);
    cp_async_commit();
    wgmma_wait<0>();
    stage = (stage + 1) % STAGES;
    shift += v.dilation_w;  // the next tap, to the right or at the left of the next row
    if (++column == v.kernel_w) {
      column = 0;
      shift += v.dilation_h * patch.width - v.kernel_w * v.dilation_w;
    }
    if (++tap == taps) {
      tap = column = shift = 0;
      ++chunk;
      patch_stage = patch_stage + 1 == patch.stages ? 0 : patch_stage + 1;
    }
  }
  cp_async_wait<0>();
  __syncwarp();  // the warp's patches are read: their room holds its results now

  // [TILE_H x TILE_W pixels][BN filters], 16-byte pieces swizzled
#pragma unroll
  for (int k = 0; k < BN / 8; ++k) {
    const int at = lane % 4 * 2;  // two of 8 filters, the same for all pixels
    const float shift0 = shifts[k * 8 + at], shift1 = shifts[k * 8 + at + 1];
#pragma unroll
    for (int m = 0; m < TILE_H / 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int pixel = m * 16 + e / 2 * 8 + lane / 4;
        T* to = patches + pixel * BN + (k ^ pixel % 8) * 8 + at;
        to[0] = T(activate(sum[m][k][e] + shift0, v.activation));
        to[1] = T(activate(sum[m][k][e + 1] + shift1, v.activation));
      }
    }
  }
  __syncwarp();
  const int k = k0 + lane % 8 * 8;  // 8 lanes write 64 filters of a pixel
  for (int pixel = lane / 8; pixel < TILE_H * TILE_W; pixel += 4) {
    const int p = p0 + pixel / TILE_W, q = q0 + pixel % TILE_W;
    if (tile >= tiles || p >= v.out_h || q >= v.out_w || k >= filters) continue;
    T* to = y + ((int64_t{n} * v.out_h + p) * v.out_w + q) * v.filters + group * filters + k;
    *reinterpret_cast<float4*>(to) =
        *reinterpret_cast<const float4*>(patches + pixel * BN + (lane % 8 ^ pixel % 8) * 8);
  }
#endif
}

template <typename T>
cudaError_t launch(const T* x, const T* weight, const T* bias, T* y, const Conv& v,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight);
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int64_t height = TILE_H + int64_t{v.kernel_h - 1} * v.dilation_h;
  const int64_t width = TILE_W + int64_t{v.kernel_w - 1} * v.dilation_w;
  if (!v.channels_last || depth % 8 || filters % 8 || bits % 16 || v.stride_h * v.stride_w != 1 ||
      height > MOST_PIXELS || width > MOST_PIXELS || height * width > MOST_PIXELS) {
    return cudaErrorNotSupported;
  }
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, wgmma_kernel<T>);
  if (error != cudaSuccess) return error;
  if (attributes.sharedSizeBytes == 0) return cudaErrorNotSupported;  // built without sm_90a
  const int stages = v.kernel_h * v.kernel_w == 1 ? STAGES : 2;
  const Patches patch = {static_cast<int>(width), static_cast<int>(height * width), stages};
  const int size = (WARPS * patch.stages * patch.pixels + STAGES * BN) * BK * 2 + ALIGNMENT;
  error = cudaFuncSetAttribute(wgmma_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, size);
  if (error != cudaSuccess) return error;
  const int64_t tiles =
      int64_t{v.batch} * ((v.out_h + TILE_H - 1) / TILE_H) * ((v.out_w + TILE_W - 1) / TILE_W);
  const int64_t blocks = (tiles + WARPS - 1) / WARPS * ((filters + BN - 1) / BN) * v.groups;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  wgmma_kernel<T><<<static_cast<unsigned>(blocks), THREADS, size, stream>>>(x, weight, bias, y, v,
                                                                            patch, tiles);
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
