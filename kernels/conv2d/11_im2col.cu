// 11_im2col.cu: TMA unfolds the image: a convolution becomes the matrix product of matmul_tc
// Before : rung 9's warps fetch their patches themselves and hold 64 filters' sums: the Tensor Cores
//          of wide layers wait most of the time, and a stride is nothing for rungs 9 and 10
// Idea   : a tensor map of the im2col kind knows window, stride and padding. One instruction then
//          fetches, for one tap, 64 channels of the next 192 windows, whichever rows and images they
//          are in. Producer, stages, consumers and stores are those of matmul_tc/8
// Cost   : 2·N·K·P·Q·C·R·S operations, with C rounded up to 64; x is read once a tap, from L2
//          Legal: sm_90a; float16, bfloat16; channels-last; one group; C and K multiples of 8;
//          stride up to 8, padding and (R - 1)·dilation up to 127; pointers aligned to 16 bytes
// Result : 0.40 of matmul, 650.64x rung 1, 2.02x eager  (H200, bfloat16 (32, 64, 56, 56) * (64, 64, 3, 3) stride 1 padding 1 dilation 1 groups 1 relu channels-last)
// Try    : MOST_SHARED 226 → 130: two or three stages; predict first

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

constexpr int BK = 64, ROW_BYTES = BK * 2;  // channels of a pixel or filter; swizzled by TMA
constexpr int BOX_BYTES = 64 * ROW_BYTES;  // a consumer's pixels of a stage; what is stored at once
constexpr int MOST_SHARED = 226 * 1024;    // of 227 KB that a block may have
template <int BM, int BN>  // a tile: BM / 64 warpgroups compute 64 pixels x BN filters each
struct Tile {
  static constexpr int CONSUMERS = BM / 64, THREADS = 128 + CONSUMERS * 128;
  static constexpr int OUT_BYTES = CONSUMERS * 2 * BOX_BYTES;  // two boxes of results each
  static constexpr int STAGE_BYTES = (BM + BN) * ROW_BYTES;
  static constexpr int STAGES = (MOST_SHARED - OUT_BYTES - 1024) / STAGE_BYTES;  // 4 to 8
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + OUT_BYTES + 1024;   // 1024: to align
};

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

// An mbarrier counts arrivals and bytes; a phase ends when both are complete.
__device__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], %1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(barrier),
      "r"(arrivals)
      : "memory");
}
__device__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity has ended. The phase before the first counts as ended.
__device__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// BK channels from c on, in windows of which the first begins at (w, h) of image n: of each the pixel
// (right, down) from its beginning. The map knows how many windows, and which comes next.
__device__ void tma_load_im2col(uint32_t to, const CUtensorMap* map, int c, int w, int h, int n,
                                int right, int down, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(to),
      "l"(map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"(static_cast<uint16_t>(right)),
      "h"(static_cast<uint16_t>(down))
      : "memory");
}
__device__ void tma_load_weights(uint32_t to, const CUtensorMap* map, int c, int tap, int k,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(c), "r"(tap), "r"(k), "r"(barrier)
      : "memory");
}
__device__ void tma_store(const CUtensorMap* map, int k, int pixel, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(k), "r"(pixel), "r"(from)
      : "memory");
}
template <int PENDING>
__device__ void tma_store_wait_read() {  // all but the latest PENDING stores have read their source
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// What was written to shared memory before it is visible to TMA after it.
__device__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void warpgroup_barrier(int id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}
// Stores four 8 x 8 matrices: lane l names row l % 8 of matrix l / 8.
__device__ void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Describes rows of 128 bytes, 8 of which are 1024 bytes from the next 8.
__device__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t STRIDE = 1024 >> 4, SWIZZLE_128 = 1;
  return (address & 0x3FFFF) >> 4 | uint64_t{1} << 16 | STRIDE << 32 | SWIZZLE_128 << 62;
}
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// d (64 x 2·N) = a (64 x 16) · b (16 x 2·N) + (accumulate ? d : 0), by the threads of a warpgroup
// clang-format off
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F32(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12), F4(i + 16), F4(i + 20), F4(i + 24), F4(i + 28)
#define R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "  \
            "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R64 R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(type, n, registers, operands, predicate, ...)                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\n"                                \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type                        \
               " {" registers "}, " operands ", p, 1, 1, 0, 0;\n}"                                   \
               : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate))
template <typename T, int N>
__device__ void wgmma(float (&d)[N], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool HALF = std::is_same_v<T, __half>;
  if constexpr (N == 32 && HALF) WGMMA("f16", "64", R32, "%32, %33", "%34", F32(0));
  if constexpr (N == 32 && !HALF) WGMMA("bf16", "64", R32, "%32, %33", "%34", F32(0));
  if constexpr (N == 64 && HALF) WGMMA("f16", "128", R64, "%64, %65", "%66", F32(0), F32(32));
  if constexpr (N == 64 && !HALF) WGMMA("bf16", "128", R64, "%64, %65", "%66", F32(0), F32(32));
}
// clang-format on

template <int ACTIVATION>
__device__ float activate(float z) {
  if (ACTIVATION == 1) return z < 0.0f ? 0.0f : z;  // NaN stays
  if (ACTIVATION == 2) return z * 0.5f * (1.0f + erff(z * 0.70710678f));
  return z;
}
#endif

template <int BM, int BN, typename T>
__global__ void __launch_bounds__(Tile<BM, BN>::THREADS, 1)
    im2col_kernel(const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap y_map, const T* bias, Conv v) {
#if HOPPER
  constexpr int CONSUMERS = Tile<BM, BN>::CONSUMERS, STAGES = Tile<BM, BN>::STAGES;
  constexpr int STAGE_BYTES = Tile<BM, BN>::STAGE_BYTES;
  extern __shared__ char dynamic[];
  __shared__ uint64_t barriers[2 * STAGES];
  __shared__ T shifts[CONSUMERS][BN];                               // the bias
  const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;  // a swizzle spans 1024 bytes
  const uint32_t full = shared_address(barriers), empty = full + STAGES * 8;
  const int warpgroup = threadIdx.x / 128, t = threadIdx.x % 128, taps = v.kernel_h * v.kernel_w;
  const int tiles_k = (v.filters + BN - 1) / BN;
  const int tiles = (v.batch * v.out_h * v.out_w + BM - 1) / BM * tiles_k;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full + s * 8, 1);               // the producer, and then the bytes
      mbarrier_init(empty + s * 8, CONSUMERS * 4);  // every warp that reads the stage
    }
  }
  __syncthreads();

  int stage = 0;
  uint32_t phase = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  };
  if (warpgroup == CONSUMERS) {  // the producer: one thread keeps the stages full
    if (t > 0) return;
    for (int u = blockIdx.x; u < tiles; u += gridDim.x) {
      const int pixel = u / tiles_k * BM, k = u % tiles_k * BN;
      const int w = pixel % v.out_w * v.stride_w - v.pad_w;
      const int h = pixel / v.out_w % v.out_h * v.stride_h - v.pad_h;
      const int n = pixel / v.out_w / v.out_h;
      for (int tap = 0; tap < taps; ++tap) {
        const int right = tap % v.kernel_w * v.dilation_w, down = tap / v.kernel_w * v.dilation_h;
        for (int c = 0; c < v.channels; c += BK, advance()) {
          const uint32_t barrier = full + stage * 8, to = base + stage * STAGE_BYTES;
          mbarrier_wait(empty + stage * 8, phase ^ 1);
          mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
          tma_load_im2col(to, &x_map, c, w, h, n, right, down, barrier);
          tma_load_weights(to + BM * ROW_BYTES, &weight_map, c, tap, k, barrier);
        }
      }
    }
    return;
  }
  const int warp = t / 32, lane = t % 32, steps = taps * ((v.channels + BK - 1) / BK);
  auto release_last = [&] {  // this warp has read the stage before this one
    if (lane == 0) mbarrier_arrive(empty + (stage == 0 ? STAGES - 1 : stage - 1) * 8);
  };
  const int out_row = warp * 16 + lane % 16;  // that this lane names to stmatrix
  const uint32_t out = base + STAGES * STAGE_BYTES + warpgroup * 2 * BOX_BYTES;
  int side = 0;
  float d[BN / 2];  // d[4·j …]: filters 8·j + lane % 4 · 2 and the next, of pixels r and r + 8
  for (int u = blockIdx.x; u < tiles; u += gridDim.x) {
    const int pixel = u / tiles_k * BM + warpgroup * 64, k = u % tiles_k * BN;
    const bool has_bias = bias && t < BN && k + t < v.filters;
    const T ahead = has_bias ? bias[k + t] : T(0.0f);  // arrives during the first stages
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(full + stage * 8, phase);
      const uint32_t a = base + stage * STAGE_BYTES + warpgroup * BOX_BYTES;
      const uint32_t b = base + stage * STAGE_BYTES + BM * ROW_BYTES;
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < ROW_BYTES; i += 32) {  // 16 channels at a time
        wgmma<T>(d, wgmma_descriptor(a + i), wgmma_descriptor(b + i), step + i > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the products of the stage before are finished
      if (step > 0) release_last();
      advance();
    }
    wgmma_wait<0>();
    release_last();
    if (t < BN) shifts[warpgroup][t] = ahead;

    const auto store = [&](auto activation) {
#pragma unroll
      for (int c = 0; c < BN; c += 64, side ^= 1) {
        const uint32_t buffer = out + side * BOX_BYTES;
        if (t == 0) tma_store_wait_read<1>();  // the store before last has left this buffer
        warpgroup_barrier(warpgroup + 1);
#pragma unroll
        for (int j = c; j < c + 64; j += 16) {
          uint32_t four[4];
#pragma unroll
          for (int e = 0; e < 4;
               ++e) {  // matrices: 8 filters of 8 pixels, of 8 more, the next 8, …
            const float* z = &d[j / 2 + e * 2];
            const T* shift = &shifts[warpgroup][j + e / 2 * 8 + lane % 4 * 2];
            const T pair[] = {T(activate<activation.value>(z[0] + static_cast<float>(shift[0]))),
                              T(activate<activation.value>(z[1] + static_cast<float>(shift[1])))};
            four[e] = reinterpret_cast<const uint32_t&>(pair);
          }
          const int piece = ((j - c) / 8 + lane / 16) ^ (out_row % 8);  // swizzled
          stmatrix_x4(buffer + out_row * ROW_BYTES + piece * 16, four);
        }
        fence_proxy_async();
        warpgroup_barrier(warpgroup + 1);
        if (t == 0) tma_store(&y_map, k + c, pixel, buffer);
      }
    };
    // Asked for each number, the same question would cost 1 x 1 layers a good part of their time.
    if (v.activation == 0) store(std::integral_constant<int, 0>());
    if (v.activation == 1) store(std::integral_constant<int, 1>());
    if (v.activation == 2) store(std::integral_constant<int, 2>());
  }
  if (t == 0) tma_store_wait_read<0>();
#endif
}

template <typename Function>
Function* driver(const char* name) {  // a function of the driver, which nobody links with
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<Function*>(function);
}

// An array without gaps, of which boxes are copied. Sizes begin with the innermost.
bool make_map(CUtensorMap* map, CUtensorMapDataType type, const void* data, int rank,
              const cuuint64_t* size, const cuuint32_t* box) {
  static const auto encode = driver<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t stride[] = {size[0] * 2, size[0] * size[1] * 2};
  const cuuint32_t every[] = {1, 1, 1};
  return encode && encode(map, type, rank, const_cast<void*>(data), size, stride, box, every,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The image. In a row or column the first window begins at `first`, before the image, and the last
// at `last`, as seen from its last pixel; from one to the next there are `every` pixels.
bool make_im2col_map(CUtensorMap* map, CUtensorMapDataType type, const void* x, const Conv& v,
                     int windows) {
  static const auto encode = driver<decltype(cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  const cuuint64_t c = v.channels, w = v.width, h = v.height, n = v.batch;
  const cuuint64_t size[] = {c, w, h, n}, stride[] = {c * 2, c * w * 2, c * w * h * 2};
  const int first[] = {-v.pad_w, -v.pad_h};
  const int last[] = {v.pad_w - (v.kernel_w - 1) * v.dilation_w,
                      v.pad_h - (v.kernel_h - 1) * v.dilation_h};
  const cuuint32_t right = v.stride_w, down = v.stride_h, every[] = {1, right, down, 1};
  return encode && encode(map, type, 4, const_cast<void*>(x), size, stride, first, last, BK,
                          windows, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int BM, int BN, typename T>
cudaError_t launch(CUtensorMapDataType type, const T* x, const T* weight, const T* bias, T* y,
                   const Conv& v, int sms, cudaStream_t stream) {
  const auto kernel = im2col_kernel<BM, BN, T>;
  constexpr int SIZE = Tile<BM, BN>::SHARED_BYTES;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (attributes.sharedSizeBytes == 0) return cudaErrorNotSupported;  // built without sm_90a
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SIZE);
  if (error != cudaSuccess) return error;
  const cuuint64_t c = v.channels, k = v.filters, taps = v.kernel_h * v.kernel_w;
  const cuuint64_t pixels = cuuint64_t{1} * v.batch * v.out_h * v.out_w;
  const cuuint64_t weight_size[] = {c, taps, k}, y_size[] = {k, pixels};
  const cuuint32_t weight_box[] = {BK, 1, BN}, y_box[] = {64, 64};
  CUtensorMap x_map, weight_map, y_map;
  if (!make_im2col_map(&x_map, type, x, v, BM) ||
      !make_map(&weight_map, type, weight, 3, weight_size, weight_box) ||
      !make_map(&y_map, type, y, 2, y_size, y_box)) {
    return cudaErrorNotSupported;
  }
  const cuuint64_t tiles = (pixels + BM - 1) / BM * ((k + BN - 1) / BN);
  const auto blocks = static_cast<unsigned>(std::min<cuuint64_t>(sms, tiles));
  kernel<<<blocks, Tile<BM, BN>::THREADS, SIZE, stream>>>(x_map, weight_map, y_map, bias, v);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(CUtensorMapDataType type, const T* x, const T* weight, const T* bias, T* y,
                   const Conv& v, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight);
  const int64_t height = int64_t{v.kernel_h - 1} * v.dilation_h;
  const int64_t width = int64_t{v.kernel_w - 1} * v.dilation_w;
  if (!v.channels_last || v.groups != 1 || v.channels % 8 || v.filters % 8 || bits % 16 ||
      std::max(v.stride_h, v.stride_w) > 8 ||
      std::max({int64_t{v.pad_h}, int64_t{v.pad_w}, height, width}) > 127) {
    return cudaErrorNotSupported;
  }
  const int64_t pixels = int64_t{v.batch} * v.out_h * v.out_w;
  if (pixels * ((v.filters + 63) / 64) > INT32_MAX - 1024) return cudaErrorNotSupported;
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);  // a new thread has no context for TMA
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  auto effort = [&](int bm, int bn) {  // rounds of all SMs, each of so many products and loads
    const int64_t tiles = (pixels + bm - 1) / bm * ((v.filters + bn - 1) / bn);
    return (tiles + sms - 1) / sms * bm * (bn + 64);
  };
  int64_t least = effort(192, 128);
  auto chosen = launch<192, 128, T>;
  auto consider = [&](int64_t needed, decltype(chosen) other) {
    if (needed < least) least = needed, chosen = other;
  };
  consider(effort(128, 128), launch<128, 128, T>);
  consider(effort(192, 64), launch<192, 64, T>);
  consider(effort(128, 64), launch<128, 64, T>);
  return chosen(type, x, weight, bias, y, v, sms, stream);
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
  return launch(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, x, weight, bias, y, v, stream);
}
extern "C" cudaError_t conv2d_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                          const __nv_bfloat16* bias, __nv_bfloat16* y, Conv v,
                                          cudaStream_t stream) {
  return launch(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x, weight, bias, y, v, stream);
}
