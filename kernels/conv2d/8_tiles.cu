// 8_tiles.cu: each pixel is loaded once for all taps
// Before : rung 6 loads a pixel 9 times for 3 x 3 taps, most of it from the L1
// Idea   : a warp keeps the patch under its 4 x 8 results in shared memory, 32 channels of it at a
//          time. A tap is a shift, and ldmatrix takes the address of each row: it reads shifted
//          tiles for nothing. Only the weights are loaded tap by tap
// Cost   : 2·N·K·P·Q·C·R·S / groups operations; 3 x 3 taps: 1.9 loads a pixel instead of 9
//          Legal: as rung 6. A patch over 128 pixels (stride 2, 7 x 7 taps) is loaded tap by tap
// Result : 0.28 of matmul, 458.84x rung 1, 1.43x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : MOST_PIXELS 128 → 0, so that each tap has its own patch; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int TILE_H = 4, TILE_W = 8;  // a warp computes TILE_H x TILE_W pixels,
constexpr int BN = 64, BK = 32;        // of BN filters; BK channels at a time
constexpr int WARPS = 4;               // tiles of a block
constexpr int THREADS = WARPS * 32;
constexpr int STAGES = 3;         // of the weights, one tap each: 12 KB
constexpr int MOST_PIXELS = 128;  // of a patch; above, a patch for each tap

struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

// What a warp has in shared memory: a patch of the image, for all taps or for one.
struct Plan {
  int taps, stages;    // how many taps a patch serves, how many patches there is room for
  int height, width;   // of a patch
  int step_h, step_w;  // from one of its pixels to the next, in the image
  int jump_h, jump_w;  // from one pixel of the tile to the next, in the patch
};

// Where channel j of row i (a pixel or a filter) lies: rows of 64 bytes, whose 16-byte pieces are
// permuted so that the 8 rows that ldmatrix reads at once are in different banks, wherever in the
// patch they begin.
__device__ int place(int i, int j) { return i * BK + (j ^ i / 2 % 4 * 8); }

// Starts to copy 16 bytes from global to shared memory past the registers, or to write zeros.
// Turing has no cp.async: there it is an ordinary copy.
__device__ void cp_async(void* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
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
__global__ void __launch_bounds__(THREADS, 4)
    tile_kernel(const T* x, const T* weight, const T* bias, T* y, Conv v, Plan plan,
                int64_t tiles) {
  extern __shared__ float4 memory[];
  const int depth = v.channels / v.groups, filters = v.filters / v.groups;
  const int all_taps = v.kernel_h * v.kernel_w, pixels = plan.height * plan.width;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T* weights = reinterpret_cast<T*>(memory);                                   // [STAGES][BN][BK]
  T* patches = weights + STAGES * BN * BK + warp * plan.stages * pixels * BK;  // of this warp
  const int tiles_n = (filters + BN - 1) / BN;
  const int k0 = blockIdx.x % tiles_n * BN;  // within the group
  const int group = blockIdx.x / tiles_n % v.groups;
  const int64_t tile = int64_t{blockIdx.x / tiles_n / v.groups} * WARPS + warp;
  const int tiles_h = (v.out_h + TILE_H - 1) / TILE_H, tiles_w = (v.out_w + TILE_W - 1) / TILE_W;
  const int n = static_cast<int>(tile / tiles_w / tiles_h);
  const int p0 = static_cast<int>(tile / tiles_w % tiles_h) * TILE_H;
  const int q0 = static_cast<int>(tile % tiles_w) * TILE_W;
  const int h0 = tile < tiles ? p0 * v.stride_h - v.pad_h : -(1 << 30);  // outside of every image
  const int w0 = q0 * v.stride_w - v.pad_w;
  const T* image = x + int64_t{n} * v.height * v.width * v.channels + group * depth;

  // What load_patch() takes next: 32 channels, for all taps or for the next one.
  int top = h0, side = w0, c = lane % 4 * 8, tap_h = 0, tap_w = 0;
  auto load_patch = [&](int stage) {
    T* to = patches + stage * pixels * BK;
    int row = 0, col = lane / 4;  // 4 lanes a pixel; a patch is at least 8 pixels wide
#pragma unroll 1
    for (int pixel = lane / 4; pixel < pixels; pixel += 8) {
      const int h = top + row * plan.step_h, w = side + col * plan.step_w;
      const bool inside = c < depth && h >= 0 && h < v.height && w >= 0 && w < v.width;
      const T* from = image + (int64_t{h} * v.width + w) * v.channels + c;
      cp_async(to + place(pixel, lane % 4 * 8), inside ? from : x, inside);
      col += 8;
      if (col >= plan.width) {
        col -= plan.width;
        ++row;
      }
    }
    if (plan.taps == 1) {
      side += v.dilation_w;
      if (++tap_w < v.kernel_w) return;
      tap_w = 0;
      side = w0;
      top += v.dilation_h;
      if (++tap_h < v.kernel_h) return;
      tap_h = 0;
      top = h0;
    }
    c += BK;
  };
  // What load_weights() takes next: this thread's 8 channels of two filters, half a tile apart.
  const int64_t length = int64_t{all_taps} * depth;
  const T* next =
      weight + (int64_t{group} * filters + k0 + threadIdx.x / 4) * length + threadIdx.x % 4 * 8;
  int next_tap = 0, left = depth - threadIdx.x % 4 * 8;
  auto load_weights = [&](int stage) {
#pragma unroll
    for (int k = 0; k < BN; k += THREADS / 4) {
      const int row = threadIdx.x / 4 + k;
      const bool inside = left > 0 && k0 + row < filters;
      cp_async(weights + stage * BN * BK + place(row, threadIdx.x % 4 * 8),
               inside ? next + k * length : weight, inside);
    }
    next += depth;
    if (++next_tap < all_taps) return;
    next_tap = 0;
    left -= BK;
    next += BK - length;
  };

  // A patch serves plan.taps rounds, and must be asked for STAGES - 1 rounds before the first.
  const int ahead = plan.stages - 1;
  const int chunks = (depth + BK - 1) / BK, rounds = chunks * all_taps;
  const int last_patch = rounds / plan.taps;
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (i < last_patch) load_patch(i);
  }
  for (int s = 0; s < STAGES - 1; ++s) {
    load_weights(s);
    cp_async_commit();
  }
  // Of a 16 x 16 piece (two rows of the tile, or 16 filters) this lane names to ldmatrix:
  const int low = lane % 16, high = lane / 16 * 8;
  const int turned_low = lane % 8 + lane / 16 * 8, turned_high = lane / 8 % 2 * 8;
  const int first = low / 8 * plan.jump_h * plan.width + low % 8 * plan.jump_w;
  float sum[TILE_H / 2][BN / 8][4] = {};
  int patch = 0, tap = 0, column = 0, shift = 0, patch_stage = 0, stage = 0;
  for (int round = 0; round < rounds; ++round) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    if (tap == 0 && patch + ahead < last_patch) {
      load_patch(patch_stage == 0 ? ahead : patch_stage - 1);
    }
    load_weights((stage + STAGES - 1) % STAGES);
    cp_async_commit();
    const T* from = patches + patch_stage * pixels * BK;
    const T* with = weights + stage * BN * BK;
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
      uint32_t from_a[TILE_H / 2][4];
#pragma unroll
      for (int m = 0; m < TILE_H / 2; ++m) {
        ldmatrix_x4(from_a[m],
                    from + place(first + shift + m * 2 * plan.jump_h * plan.width, p + high));
      }
#pragma unroll
      for (int k = 0; k < BN / 16; ++k) {
        uint32_t from_b[4];
        ldmatrix_x4(from_b, with + place(k * 16 + turned_low, p + turned_high));
#pragma unroll
        for (int m = 0; m < TILE_H / 2; ++m) {
          mma<T>(sum[m][2 * k], from_a[m], from_b[0], from_b[1]);
          mma<T>(sum[m][2 * k + 1], from_a[m], from_b[2], from_b[3]);
        }
      }
    }
    stage = (stage + 1) % STAGES;
    shift += v.dilation_w;  // the next tap, to the right or at the left of the next row
    if (++column == v.kernel_w) {
      column = 0;
      shift += v.dilation_h * plan.width - v.kernel_w * v.dilation_w;
    }
    if (++tap == plan.taps) {
      tap = column = shift = 0;
      ++patch;
      patch_stage = patch_stage + 1 == plan.stages ? 0 : patch_stage + 1;
    }
  }
  cp_async_wait<0>();
  __syncwarp();  // the warp's patches are read: their room holds its results now

  // [TILE_H x TILE_W pixels][BN filters], 16-byte pieces swizzled
#pragma unroll
  for (int k = 0; k < BN / 8; ++k) {
    const int filter = k0 + k * 8 + lane % 4 * 2;  // two of these 8, the same for all pixels
    float shift[2] = {};
    if (bias && filter < filters) shift[0] = static_cast<float>(bias[group * filters + filter]);
    if (bias && filter + 1 < filters) {
      shift[1] = static_cast<float>(bias[group * filters + filter + 1]);
    }
#pragma unroll
    for (int m = 0; m < TILE_H / 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int pixel = m * 16 + e / 2 * 8 + lane / 4;
        T* to = patches + pixel * BN + (k ^ pixel % 8) * 8 + lane % 4 * 2;
        to[0] = T(activate(sum[m][k][e] + shift[0], v.activation));
        to[1] = T(activate(sum[m][k][e + 1] + shift[1], v.activation));
      }
    }
  }
  __syncwarp();
  const int k = k0 + lane % 8 * 8;  // 8 lanes write 64 filters of a pixel
  for (int pixel = lane / 8; pixel < TILE_H * TILE_W; pixel += 4) {
    const int p = p0 + pixel / TILE_W, q = q0 + pixel % TILE_W;
    if (tile >= tiles || p >= v.out_h || q >= v.out_w) continue;
    const T* from = patches + pixel * BN + (lane % 8 ^ pixel % 8) * 8;
    T* to = y + ((int64_t{n} * v.out_h + p) * v.out_w + q) * v.filters + group * filters + k;
    if (filters % 8 == 0 && k < filters) {
      *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
    } else {
      for (int i = 0; i < 8 && k + i < filters; ++i) to[i] = from[i];
    }
  }
}

template <typename T>
cudaError_t start_tiles(int capability, const T* x, const T* weight, const T* bias, T* y,
                        const Conv& v, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight);
  if (!v.channels_last || v.channels / v.groups % 8 || bits % 16) return cudaErrorNotSupported;
  int device = 0, major = 0, room = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (major < capability) return cudaErrorNotSupported;
  auto size = [](const Plan& plan) {
    return (WARPS * plan.stages * plan.height * plan.width + STAGES * BN) * BK * 2;
  };
  const int taps = v.kernel_h * v.kernel_w;
  const int64_t height =
      int64_t{TILE_H - 1} * v.stride_h + int64_t{v.kernel_h - 1} * v.dilation_h + 1;
  const int64_t width =
      int64_t{TILE_W - 1} * v.stride_w + int64_t{v.kernel_w - 1} * v.dilation_w + 1;
  Plan plan = {1, STAGES, TILE_H, TILE_W, v.stride_h, v.stride_w, 1, 1};
  if (taps > 1 && height <= MOST_PIXELS && width <= MOST_PIXELS && height * width <= MOST_PIXELS) {
    const Plan all = {
        taps, 2, static_cast<int>(height), static_cast<int>(width), 1, 1, v.stride_h, v.stride_w};
    if (size(all) <= room) plan = all;
  }
  const int64_t tiles =
      int64_t{v.batch} * ((v.out_h + TILE_H - 1) / TILE_H) * ((v.out_w + TILE_W - 1) / TILE_W);
  const int64_t blocks =
      (tiles + WARPS - 1) / WARPS * ((v.filters / v.groups + BN - 1) / BN) * v.groups;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  auto* kernel = tile_kernel<T>;
  const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, size(plan));
  if (allowed != cudaSuccess) return allowed;
  kernel<<<static_cast<unsigned>(blocks), THREADS, size(plan), stream>>>(x, weight, bias, y, v,
                                                                         plan, tiles);
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
  return start_tiles(7, x, weight, bias, y, v, stream);
}
extern "C" cudaError_t conv2d_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                          const __nv_bfloat16* bias, __nv_bfloat16* y, Conv v,
                                          cudaStream_t stream) {
  return start_tiles(8, x, weight, bias, y, v, stream);
}
