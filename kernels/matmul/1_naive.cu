// 1_naive.cu: one thread computes one element of C
// Before : a triple loop in Python
// Idea   : thread (x, y) owns C[x, y] and walks along a row of A and a column of B
// Cost   : 2·M·N·K operations; 4·(M·K + K·N + M·N) bytes at least, so bound by arithmetic from
//          squares of 70 on; this rung loads 8 bytes for every 2 operations   Legal: everything
// Result : 0.02 of matmul, 0.02x eager  (H200, float32 (4096, 4096) @ (4096, 4096), CUDA 13.0)
// Try    : TILE 16 → 32; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int TILE = 16;  // a block computes TILE x TILE elements

// C is row-major. A and B may have any strides, in elements: A[i, p] is a[i * a_row + p * a_col].
__global__ void matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n,
                              int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                              int64_t b_col) {
  const int64_t tiles_n = (n + TILE - 1) / TILE;
  const int64_t i = blockIdx.x / tiles_n * TILE + threadIdx.x;  // neighbours in a warp differ in
  const int64_t j = blockIdx.x % tiles_n * TILE + threadIdx.y;  // their row: 16 rows a load
  if (i >= m || j >= n) return;
  float sum = 0;
  for (int64_t p = 0; p < k; ++p) {
    sum += a[i * a_row + p * a_col] * b[p * b_row + j * b_col];
  }
  c[i * n + j] = sum;
}

extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream) {
  const int64_t blocks = ((m + TILE - 1) / TILE) * ((n + TILE - 1) / TILE);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  matmul_kernel<<<static_cast<unsigned>(blocks), dim3(TILE, TILE), 0, stream>>>(
      a, b, c, m, n, k, a_row, a_col, b_row, b_col);
  return cudaGetLastError();
}
