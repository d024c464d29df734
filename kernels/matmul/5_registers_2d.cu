// 5_registers_2d.cu: one thread computes a square of TM x TN elements
// Before : rung 4 still loads 9 numbers from shared memory for 8 multiply-adds
// Idea   : TM numbers of A and TN numbers of B in registers give TM·TN products
// Cost   : 2·M·N·K operations; 16 shared loads for 64 multiply-adds         Legal: everything
// Result : 0.44 of matmul, 23.00x rung 1, 0.44x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : TM = TN = 4; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN);  // 256

__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col) {
  __shared__ float a_tile[BM][BK];
  __shared__ float b_tile[BK][BN];
  const int t = threadIdx.x;
  const int64_t tiles_n = (n + BN - 1) / BN;
  const int64_t i0 = blockIdx.x / tiles_n * BM;
  const int64_t j0 = blockIdx.x % tiles_n * BN;
  const int row = t / (BN / TN) * TM, col = t % (BN / TN) * TN;

  float sum[TM][TN] = {};
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
#pragma unroll
    for (int e = t; e < BM * BK; e += THREADS) {  // a tile has more elements than the block threads
      const int64_t i = i0 + e / BK, p = p0 + e % BK;
      a_tile[e / BK][e % BK] = i < m && p < k ? a[i * a_row + p * a_col] : 0.0f;
    }
#pragma unroll
    for (int e = t; e < BK * BN; e += THREADS) {
      const int64_t p = p0 + e / BN, j = j0 + e % BN;
      b_tile[e / BN][e % BN] = p < k && j < n ? b[p * b_row + j * b_col] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < BK; ++p) {
      float from_a[TM], from_b[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) from_a[i] = a_tile[row + i][p];
#pragma unroll
      for (int j = 0; j < TN; ++j) from_b[j] = b_tile[p][col + j];
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
#pragma unroll
    for (int j = 0; j < TN; ++j) {
      if (i0 + row + i < m && j0 + col + j < n) {
        c[(i0 + row + i) * n + j0 + col + j] = sum[i][j];
      }
    }
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
