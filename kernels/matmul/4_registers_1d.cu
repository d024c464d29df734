// 4_registers_1d.cu: one thread computes a column of TM elements
// Before : rung 3 loads two numbers from shared memory for each multiply-add
// Idea   : hold one element of B in a register and use it for TM rows of A
// Cost   : 2·M·N·K operations; TM + 1 shared loads for TM multiply-adds     Legal: everything
// Result : 0.17 of matmul, 8.69x rung 1, 0.17x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : TM 8 → 4 (then BM = 32); predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 64, BN = 64, BK = 8;  // the tile of C, and the depth of the tiles of A and B
constexpr int TM = 8;
constexpr int THREADS = BM * BN / TM;  // 512
static_assert(BM * BK == THREADS && BK * BN == THREADS, "each thread loads one element of a tile");

__global__ void __launch_bounds__(THREADS)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col) {
  __shared__ float a_tile[BM][BK];
  __shared__ float b_tile[BK][BN];
  const int t = threadIdx.x;
  const int64_t tiles_n = (n + BN - 1) / BN;
  const int64_t i0 = blockIdx.x / tiles_n * BM;  // the corner of the block's tile of C
  const int64_t j0 = blockIdx.x % tiles_n * BN;
  const int ai = t / BK, ap = t % BK;         // the element of a_tile that this thread loads
  const int bp = t / BN, bj = t % BN;         // and of b_tile
  const int row = t / BN * TM, col = t % BN;  // it computes rows row … row + TM - 1 of column col

  float sum[TM] = {};
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    a_tile[ai][ap] = i0 + ai < m && p0 + ap < k ? a[(i0 + ai) * a_row + (p0 + ap) * a_col] : 0.0f;
    b_tile[bp][bj] = p0 + bp < k && j0 + bj < n ? b[(p0 + bp) * b_row + (j0 + bj) * b_col] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int p = 0; p < BK; ++p) {
      const float from_b = b_tile[p][col];
#pragma unroll
      for (int i = 0; i < TM; ++i) sum[i] += a_tile[row + i][p] * from_b;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    if (i0 + row + i < m && j0 + col < n) c[(i0 + row + i) * n + j0 + col] = sum[i];
  }
}

extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream) {
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  matmul_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(a, b, c, m, n, k, a_row,
                                                                       a_col, b_row, b_col);
  return cudaGetLastError();
}
