// 1_wmma.cu: one warp multiplies 16 x 16 tiles on the Tensor Cores
// Before : the float32 ladder, whose best rung is bound by the rate of single multiply-adds
// Idea   : a Tensor Core multiplies two 16 x 16 tiles in one go, for a whole warp; nvcuda::wmma is
//          its interface in C++. Tiles come straight from global memory
// Cost   : 2·M·N·K operations; 1 KB loaded for 8192 of them: far too much for L2
//          Legal: row-major, M, N, K and row strides multiples of 16; float16 from sm_70, bfloat16
//          from sm_80; pointers aligned to 32 bytes
// Result : 0.04 of matmul, 0.04x eager  (H200, bfloat16 (4096, 4096) @ (4096, 4096), CUDA 13.0)
// Try    : WARPS 4 → 1; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cstdint>
#include <type_traits>

using namespace nvcuda;

constexpr int TILE = 16;
constexpr int WARPS = 4;  // a block computes WARPS tiles side by side

__device__ __half to(float x, __half) { return __float2half(x); }
__device__ __nv_bfloat16 to(float x, __nv_bfloat16) { return __float2bfloat16(x); }

template <typename T>
__global__ void matmul_kernel(const T* a, const T* b, T* c, int64_t m, int64_t n, int64_t k,
                              int64_t a_row, int64_t b_row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr bool SUPPORTED = std::is_same_v<T, __half>;
#else
  constexpr bool SUPPORTED = true;
#endif
  if constexpr (SUPPORTED) {
    __shared__ alignas(32) float results[WARPS][TILE * TILE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t tiles_m = m / TILE;
    const int64_t i = blockIdx.x % tiles_m * TILE;
    const int64_t j = (blockIdx.x / tiles_m * WARPS + warp) * TILE;
    if (j >= n) return;  // the whole warp: no lane may be missing below
    wmma::fragment<wmma::matrix_a, TILE, TILE, TILE, T, wmma::row_major> from_a;
    wmma::fragment<wmma::matrix_b, TILE, TILE, TILE, T, wmma::row_major> from_b;
    wmma::fragment<wmma::accumulator, TILE, TILE, TILE, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int64_t p = 0; p < k; p += TILE) {
      wmma::load_matrix_sync(from_a, a + i * a_row + p, static_cast<unsigned>(a_row));
      wmma::load_matrix_sync(from_b, b + p * b_row + j, static_cast<unsigned>(b_row));
      wmma::mma_sync(sum, from_a, from_b, sum);
    }
    // Which lane holds which element is not specified, so the way to T leads through memory.
    wmma::store_matrix_sync(results[warp], sum, TILE, wmma::mem_row_major);
    __syncwarp();
    for (int e = lane; e < TILE * TILE; e += 32) {
      c[(i + e / TILE) * n + j + e % TILE] = to(results[warp][e], T());
    }
  } else {
    __trap();
  }
}

template <typename T>
cudaError_t launch(int capability, const T* a, const T* b, T* c, int64_t m, int64_t n, int64_t k,
                   int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  if (a_col != 1 || b_col != 1 || m % 16 || n % 16 || k % 16 || a_row % 16 || b_row % 16 ||
      bits % 32 || a_row > INT32_MAX || b_row > INT32_MAX) {
    return cudaErrorNotSupported;
  }
  int device = 0, major = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < capability) return cudaErrorNotSupported;
  const int64_t blocks = m / TILE * ((n / TILE + WARPS - 1) / WARPS);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  matmul_kernel<<<static_cast<unsigned>(blocks), WARPS * 32, 0, stream>>>(a, b, c, m, n, k, a_row,
                                                                          b_row);
  return cudaGetLastError();
}

extern "C" cudaError_t matmul_tc_launch_f16(const __half* a, const __half* b, __half* c, int64_t m,
                                            int64_t n, int64_t k, int64_t a_row, int64_t a_col,
                                            int64_t b_row, int64_t b_col, cudaStream_t stream) {
  return launch(7, a, b, c, m, n, k, a_row, a_col, b_row, b_col, stream);
}
extern "C" cudaError_t matmul_tc_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                             __nv_bfloat16* c, int64_t m, int64_t n, int64_t k,
                                             int64_t a_row, int64_t a_col, int64_t b_row,
                                             int64_t b_col, cudaStream_t stream) {
  return launch(8, a, b, c, m, n, k, a_row, a_col, b_row, b_col, stream);
}
