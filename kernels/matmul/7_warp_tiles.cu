// 7_warp_tiles.cu: each warp owns a compact tile, each thread four pieces of 4 x 4 in it
// Before : in rung 6 a warp is a strip of 2 x 16 threads, whose float4 loads of B lie 32 bytes
//          apart: two of them meet in one bank
// Idea   : a warp computes 32 x 64 with 4 x 8 threads; what one load of a warp reads lies together
// Cost   : 2·M·N·K operations; as many loads as rung 6, without conflicts
//          Legal: A and B row-major, K and N multiples of 4, all pointers aligned to 16 bytes
// Result : 0.73 of matmul, 38.41x rung 1, 0.74x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : WM = 64, WN = 32; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 128, BN = 128, BK = 8;            // the block's tile
constexpr int WM = 32, WN = 64;                      // a warp's
constexpr int LANES_M = 4, LANES_N = 8;              // how its 32 lanes are arranged
constexpr int TM = WM / LANES_M, TN = WN / LANES_N;  // 8 x 8 elements a thread, in pieces of 4 x 4
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;
constexpr int PAD = 4;
static_assert(BM * BK == 4 * THREADS && BK * BN == 4 * THREADS, "one float4 of each tile a thread");

__global__ void __launch_bounds__(THREADS)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t b_row) {
  __shared__ alignas(16) float a_tile[BK][BM + PAD];
  __shared__ alignas(16) float b_tile[BK][BN];
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  const int64_t tiles_n = (n + BN - 1) / BN;
  const int64_t i0 = blockIdx.x / tiles_n * BM;
  const int64_t j0 = blockIdx.x % tiles_n * BN;
  const int ai = t / (BK / 4), ap = t % (BK / 4) * 4;
  const int bp = t / (BN / 4), bj = t % (BN / 4) * 4;
  // Piece u of the thread's rows starts at row + u * 4·LANES_M, piece v of its columns at
  // col + v * 4·LANES_N.
  const int row = warp / (BN / WN) * WM + lane / LANES_N * 4;
  const int col = warp % (BN / WN) * WN + lane % LANES_N * 4;
  const float4 zero = {0, 0, 0, 0};

  float sum[TM][TN] = {};
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    const float4 va = i0 + ai < m && p0 + ap < k
                          ? *reinterpret_cast<const float4*>(a + (i0 + ai) * a_row + p0 + ap)
                          : zero;
    const float4 vb = p0 + bp < k && j0 + bj < n
                          ? *reinterpret_cast<const float4*>(b + (p0 + bp) * b_row + j0 + bj)
                          : zero;
    a_tile[ap + 0][ai] = va.x;
    a_tile[ap + 1][ai] = va.y;
    a_tile[ap + 2][ai] = va.z;
    a_tile[ap + 3][ai] = va.w;
    *reinterpret_cast<float4*>(&b_tile[bp][bj]) = vb;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < BK; ++p) {
      alignas(16) float from_a[TM], from_b[TN];
#pragma unroll
      for (int i = 0; i < TM; i += 4) {
        *reinterpret_cast<float4*>(&from_a[i]) =
            *reinterpret_cast<const float4*>(&a_tile[p][row + i * LANES_M]);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&from_b[j]) =
            *reinterpret_cast<const float4*>(&b_tile[p][col + j * LANES_N]);
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += from_a[i] * from_b[j];
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t ci = i0 + row + i / 4 * 4 * LANES_M + i % 4;
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int64_t cj = j0 + col + j * LANES_N;
      if (ci < m && cj < n) {
        const float4 v = {sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
        *reinterpret_cast<float4*>(c + ci * n + cj) = v;
      }
    }
  }
}

extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                    reinterpret_cast<uintptr_t>(c);
  if (a_col != 1 || b_col != 1 || a_row % 4 || b_row % 4 || k % 4 || n % 4 || bits % 16) {
    return cudaErrorNotSupported;
  }
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  matmul_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(a, b, c, m, n, k, a_row,
                                                                       b_row);
  return cudaGetLastError();
}
