// 3_shared.cu: a block copies tiles of A and B into shared memory and reads them from there
// Before : rung 2 asks the caches for each element of A and of B 2·TILE times per block
// Idea   : load a TILE x TILE tile of each once, use every element TILE times, go on along K
// Cost   : 2·M·N·K operations; global loads 1/32 of rung 2's, and two shared loads for every
//          fused multiply-add: now shared memory is the limit              Legal: everything
// Result : 0.17 of matmul, 8.87x rung 1, 0.17x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : TILE 32 → 16; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int TILE = 32;  // 32 x 32 = 1024 threads, the most a block may have

__global__ void __launch_bounds__(TILE* TILE)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col) {
  __shared__ float a_tile[TILE][TILE];
  __shared__ float b_tile[TILE][TILE];
  const int x = threadIdx.x, y = threadIdx.y;
  const int64_t tiles_n = (n + TILE - 1) / TILE;
  const int64_t i = blockIdx.x / tiles_n * TILE + y;
  const int64_t j = blockIdx.x % tiles_n * TILE + x;
  float sum = 0;
  for (int64_t p0 = 0; p0 < k; p0 += TILE) {
    // What lies outside is filled with zeros: they add nothing, and the loop below needs no test.
    a_tile[y][x] = i < m && p0 + x < k ? a[i * a_row + (p0 + x) * a_col] : 0.0f;
    b_tile[y][x] = p0 + y < k && j < n ? b[(p0 + y) * b_row + j * b_col] : 0.0f;
    __syncthreads();  // the tiles are complete
#pragma unroll
    for (int p = 0; p < TILE; ++p) sum += a_tile[y][p] * b_tile[p][x];
    __syncthreads();  // and nobody reads them any more
  }
  if (i < m && j < n) c[i * n + j] = sum;
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
