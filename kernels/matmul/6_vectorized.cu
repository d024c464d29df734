// 6_vectorized.cu: loads and stores of 16 bytes, from global and from shared memory
// Before : rung 5 moves 4 bytes an instruction; its loads compete with the multiply-adds
// Idea   : float4 everywhere. A's tile is transposed on its way in, so that the TM numbers a thread
//          needs for one p lie side by side
// Cost   : 2·M·N·K operations; 4 shared loads for 64 multiply-adds
//          Legal: A and B row-major, K and N multiples of 4, all pointers aligned to 16 bytes
// Result : 0.68 of matmul, 35.79x rung 1, 0.69x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : PAD 4 → 0 (bank conflicts when A is transposed); predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = (BM / TM) * (BN / TN);
constexpr int PAD = 4;
static_assert(BM * BK == 4 * THREADS && BK * BN == 4 * THREADS, "one float4 of each tile a thread");

__global__ void __launch_bounds__(THREADS)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t b_row) {
  __shared__ alignas(16) float a_tile[BK][BM + PAD];  // transposed
  __shared__ alignas(16) float b_tile[BK][BN];
  const int t = threadIdx.x;
  const int64_t tiles_n = (n + BN - 1) / BN;
  const int64_t i0 = blockIdx.x / tiles_n * BM;
  const int64_t j0 = blockIdx.x % tiles_n * BN;
  const int ai = t / (BK / 4), ap = t % (BK / 4) * 4;  // the float4 of A that this thread loads
  const int bp = t / (BN / 4), bj = t % (BN / 4) * 4;
  const int row = t / (BN / TN) * TM, col = t % (BN / TN) * TN;
  const float4 zero = {0, 0, 0, 0};

  float sum[TM][TN] = {};
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    // K and N are multiples of 4: a float4 lies inside or outside as a whole.
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
            *reinterpret_cast<const float4*>(&a_tile[p][row + i]);
      }
#pragma unroll
      for (int j = 0; j < TN; j += 4) {
        *reinterpret_cast<float4*>(&from_b[j]) =
            *reinterpret_cast<const float4*>(&b_tile[p][col + j]);
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
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      if (i0 + row + i < m && j0 + col + j < n) {
        reinterpret_cast<float4*>(c)[((i0 + row + i) * n + j0 + col + j) / 4] = {
            sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
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
