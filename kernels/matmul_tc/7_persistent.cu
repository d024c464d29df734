// 7_persistent.cu: one block an SM, which works through many tiles
// Before : in rung 6 nothing is loaded while a block starts, or while it writes its results
// Idea   : as many blocks as SMs; the producer goes on to the next tile while the consumers still
//          write the last one. Tiles go in bands, so that what runs together shares A and B in L2
// Cost   : 2·M·N·K operations; 2·(M·K + K·N + M·N) bytes at least
//          Legal: sm_90a; each operand has one unit stride, the other a multiple of 8; N even;
//          pointers aligned to 16 bytes
// Result : 0.90 of matmul, 25.45x rung 1, 0.90x eager  (H200, bfloat16 (4096, 4096) @ (4096, 4096))
// Try    : BAND 16 → 1; predict first

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

constexpr int BM = 128, BN = 256, BK = 64;
constexpr int BAND = 16;      // rows of tiles that are worked on together
constexpr int CONSUMERS = 2;  // warpgroups; each computes 64 x BN
constexpr int THREADS = (1 + CONSUMERS) * 128;
constexpr int STAGES = 4;
constexpr int BOX = 64;                   // everything moves in boxes of 64 x 64 elements,
constexpr int BOX_BYTES = BOX * BOX * 2;  // whose rows of 128 bytes are swizzled by TMA
constexpr int A_BYTES = BM / BOX * BOX_BYTES, B_BYTES = BN / BOX * BOX_BYTES;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + 1024;  // 1024: to align

// What only Hopper has stays out of other builds, and the launcher then refuses.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER 1
#else
#define HOPPER 0
#endif

#if HOPPER
__device__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier: counts arrivals and bytes; a phase ends when both are complete

__device__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
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
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- TMA: one thread asks for a box, and the copy engine moves it

__device__ void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// ---- wgmma

// Describes an operand in boxes. Along K-major rows (128 bytes) 8 rows are 1024 bytes apart. Where
// the rows run along M or N, 8 steps of K are 1024 bytes apart, and the next 64 of M or N one box.
__device__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t LEADING = BOX_BYTES >> 4, STRIDE = 1024 >> 4, SWIZZLE_128 = 1;
  return (address & 0x3FFFF) >> 4 | LEADING << 16 | STRIDE << 32 | SWIZZLE_128 << 62;
}
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d (64 x 256) = A (64 x 16) · B (16 x 256) + (accumulate ? d : 0), by the 128 threads of a
// warpgroup. TRANS 1: the rows of the operand run along M or N in memory, not along K.
// clang-format off
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
#define WGMMA_M64N256K16(type)                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {"                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "          \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "          \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "          \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "\
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "\
      "%128, %129, p, 1, 1, %131, %132;\n}"                                                      \
      : F64(0), F64(64)                                                                          \
      : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B))
// clang-format on

template <typename T, int TRANS_A, int TRANS_B>
__device__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    WGMMA_M64N256K16("f16");
  } else {
    WGMMA_M64N256K16("bf16");
  }
}

__device__ void store(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ void store(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}
#endif

struct Tiles {  // of BM x BN; steps of BK
  int rows, cols, steps;
};

// The corner of tile u: bands of BAND rows, within a band column by column.
__device__ void locate(Tiles tiles, int u, int* row, int* col) {
  const int band = u / (BAND * tiles.cols), in_band = u % (BAND * tiles.cols);
  const int height = min(BAND, tiles.rows - band * BAND);
  *row = (band * BAND + in_band % height) * BM;
  *col = in_band / height * BN;
}

template <typename T, int TRANS_A, int TRANS_B>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_kernel(const __grid_constant__ CUtensorMap a_map,
                  const __grid_constant__ CUtensorMap b_map, T* c, int m, int n, Tiles tiles) {
#if HOPPER
  extern __shared__ char dynamic[];
  __shared__ uint64_t barriers[2 * STAGES];
  const uint32_t base = (shared_address(dynamic) + 1023) & ~1023u;  // a swizzle spans 1024 bytes
  const uint32_t full = shared_address(barriers), empty = full + STAGES * 8;
  const int warpgroup = threadIdx.x / 128, t = threadIdx.x % 128;
  const int count = tiles.rows * tiles.cols;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full + s * 8, 1);               // the producer, and then the bytes
      mbarrier_init(empty + s * 8, CONSUMERS * 4);  // every warp that reads the stage
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  int stage = 0;
  uint32_t phase = 0;
  auto advance = [&] {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  };
  if (warpgroup == 0) {  // the producer: one thread keeps the stages full
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int u = blockIdx.x; u < count; u += gridDim.x) {
        int row, col;
        locate(tiles, u, &row, &col);
        for (int k = 0; k < tiles.steps * BK; k += BK, advance()) {
          const uint32_t barrier = full + stage * 8, a = base + stage * STAGE_BYTES;
          mbarrier_wait(empty + stage * 8, phase ^ 1);
          mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
          for (int i = 0; i < BM / BOX; ++i) {
            const int at = row + i * BOX;
            tma_load(a + i * BOX_BYTES, &a_map, TRANS_A ? at : k, TRANS_A ? k : at, barrier);
          }
          for (int i = 0; i < BN / BOX; ++i) {
            const int at = col + i * BOX;
            tma_load(a + A_BYTES + i * BOX_BYTES, &b_map, TRANS_B ? at : k, TRANS_B ? k : at,
                     barrier);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = warpgroup - 1, warp = t / 32, lane = t % 32;
    auto release = [&](int s) {  // this warp has read stage s
      if (lane == 0) mbarrier_arrive(empty + s * 8);
    };
    float d[128];
    for (int u = blockIdx.x; u < count; u += gridDim.x) {
      int row, col;
      locate(tiles, u, &row, &col);
      for (int k = 0; k < tiles.steps; ++k) {
        mbarrier_wait(full + stage * 8, phase);
        const uint32_t a = base + stage * STAGE_BYTES + consumer * BOX_BYTES;
        const uint32_t b = base + stage * STAGE_BYTES + A_BYTES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; ++i) {  // 16 steps of K are 32 bytes of a row, or 16 rows
          wgmma<T, TRANS_A, TRANS_B>(d, wgmma_descriptor(a + i * (TRANS_A ? 2048 : 32)),
                                     wgmma_descriptor(b + i * (TRANS_B ? 2048 : 32)), k + i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the products of the stage before are finished
        if (k > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
        advance();
      }
      wgmma_wait<0>();
      release(stage == 0 ? STAGES - 1 : stage - 1);

#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {  // d[4·j …]: two columns of row r, and two of row r + 8
        const int64_t r = row + consumer * 64 + warp * 16 + lane / 4;
        const int at = col + j * 8 + lane % 4 * 2;
        if (at < n) {
          if (r < m) store(c + r * n + at, d[j * 4], d[j * 4 + 1]);
          if (r + 8 < m) store(c + (r + 8) * n + at, d[j * 4 + 2], d[j * 4 + 3]);
        }
      }
    }
  }
#endif
}

// ---- host

// A matrix in device memory, of which boxes of 64 x 64 are copied. TMA wants one stride to be 1 and
// the other to be whole 16 bytes; if it is the rows' stride that is 1, the transpose is described.
cudaError_t make_map(CUtensorMap* map, CUtensorMapDataType type, const void* data, int64_t rows,
                     int64_t cols, int64_t row, int64_t col) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  // The driver works in the thread's current context. A thread of autograd's has none yet; since
  // CUDA 12 cudaSetDevice() makes one current.
  int device;
  cudaGetDevice(&device);
  cudaSetDevice(device);
  if (col != 1) {
    std::swap(rows, cols);
    std::swap(row, col);
  }
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && row % 8 == 0;
  if (col != 1 || !aligned || encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[] = {static_cast<cuuint64_t>(row) * 2};
  const cuuint32_t box[] = {BOX, BOX}, every[] = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(data), size, stride, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

template <typename T>
cudaError_t launch(CUtensorMapDataType type, const T* a, const T* b, T* c, int64_t m, int64_t n,
                   int64_t k, int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                   cudaStream_t stream) {
  if (k == 0) return cudaMemsetAsync(c, 0, m * n * sizeof(T), stream);
  if (std::max({m, n, k}) > INT32_MAX - 1024) return cudaErrorInvalidValue;
  if (n % 2) return cudaErrorNotSupported;  // two columns are stored at once
  CUtensorMap a_map, b_map;
  cudaError_t error = make_map(&a_map, type, a, m, k, a_row, a_col);
  if (error == cudaSuccess) error = make_map(&b_map, type, b, k, n, b_row, b_col);
  if (error != cudaSuccess) return error;

  const bool trans_a = a_col != 1, trans_b = b_col == 1;
  const auto kernel = trans_a ? (trans_b ? matmul_kernel<T, 1, 1> : matmul_kernel<T, 1, 0>)
                              : (trans_b ? matmul_kernel<T, 0, 1> : matmul_kernel<T, 0, 0>);
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (attributes.sharedSizeBytes == 0) return cudaErrorNotSupported;  // built without sm_90a
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  if (error != cudaSuccess) return error;

  const int64_t rows = (m + BM - 1) / BM, cols = (n + BN - 1) / BN;
  if (rows * cols > INT32_MAX) return cudaErrorInvalidValue;
  int device = 0, sms = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const Tiles tiles = {static_cast<int>(rows), static_cast<int>(cols),
                       static_cast<int>((k + BK - 1) / BK)};
  const int grid = static_cast<int>(std::min<int64_t>(sms, rows * cols));
  kernel<<<grid, THREADS, SHARED_BYTES, stream>>>(a_map, b_map, c, static_cast<int>(m),
                                                  static_cast<int>(n), tiles);
  return cudaGetLastError();
}

extern "C" cudaError_t matmul_tc_launch_f16(const __half* a, const __half* b, __half* c, int64_t m,
                                            int64_t n, int64_t k, int64_t a_row, int64_t a_col,
                                            int64_t b_row, int64_t b_col, cudaStream_t stream) {
  return launch(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, a, b, c, m, n, k, a_row, a_col, b_row, b_col,
                stream);
}
extern "C" cudaError_t matmul_tc_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                             __nv_bfloat16* c, int64_t m, int64_t n, int64_t k,
                                             int64_t a_row, int64_t a_col, int64_t b_row,
                                             int64_t b_col, cudaStream_t stream) {
  return launch(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a, b, c, m, n, k, a_row, a_col, b_row, b_col,
                stream);
}
