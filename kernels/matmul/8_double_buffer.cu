// 8_double_buffer.cu: the next tiles arrive while these are being multiplied
// Before : in rung 7 all warps wait for global memory, then all compute, then all wait again
// Idea   : two buffers, and cp.async, which copies from global to shared memory past the registers.
//          It cannot transpose, so A's tile keeps its rows and a thread reads 4 steps of K at once;
//          a row's 16-byte pieces are permuted (swizzled), or 8 rows would meet in few banks
// Cost   : 2·M·N·K operations; as many shared loads as rung 7
//          Legal: A and B row-major, K and N multiples of 4, all pointers aligned to 16 bytes
// Result : 0.76 of matmul, 39.55x rung 1, 0.76x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : swizzle() { return 0; }; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 128, BN = 128, BK = 16;
constexpr int WM = 64, WN = 32;
constexpr int LANES_M = 8, LANES_N = 4;
constexpr int TM = WM / LANES_M, TN = WN / LANES_N;  // 8 x 8
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;

// A row of a_tile is 64 bytes, so rows i and i + 2 begin in the same bank. Column j of row i is
// stored in column j ^ swizzle(i): then a 16-byte piece of each of 8 rows takes all 32 banks once.
__device__ int swizzle(int i) { return (i & 6) * 2; }

// cp.async: starts to copy 16 bytes from global to shared memory past the registers, or to write
// zeros. Before sm_80, and on the CPU machine, an ordinary copy stands for it.
__device__ void cp_async(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(inside ? 16 : 0));
#else
  *reinterpret_cast<float4*>(to) =
      inside ? *reinterpret_cast<const float4*>(from) : float4{0, 0, 0, 0};
#endif
}
__device__ void cp_async_commit() {  // what was asked for since the last commit is one group
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
__device__ void cp_async_wait() {  // until all groups of this thread have arrived
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                  int64_t a_row, int64_t b_row) {
  __shared__ alignas(16) float a_tile[2][BM][BK];
  __shared__ alignas(16) float b_tile[2][BK][BN];
  const unsigned t = threadIdx.x, warp = t / 32, lane = t % 32;
  const int64_t tiles_n = (n + BN - 1) / BN;
  const int64_t i0 = blockIdx.x / tiles_n * BM;
  const int64_t j0 = blockIdx.x % tiles_n * BN;
  const int row = warp / (BN / WN) * WM + lane / LANES_N;  // rows row + i * LANES_M
  const int col = warp % (BN / WN) * WN + lane % LANES_N * 4;

  auto load = [&](int buffer, int64_t p0) {
#pragma unroll
    for (unsigned e = t; e < BM * BK / 4; e += THREADS) {
      const int i = e / (BK / 4), p = e % (BK / 4) * 4;
      const bool inside = i0 + i < m && p0 + p < k;
      cp_async(&a_tile[buffer][i][p ^ swizzle(i)], a + (i0 + i) * a_row + p0 + p, inside);
    }
#pragma unroll
    for (unsigned e = t; e < BK * BN / 4; e += THREADS) {
      const int p = e / (BN / 4), j = e % (BN / 4) * 4;
      const bool inside = p0 + p < k && j0 + j < n;
      cp_async(&b_tile[buffer][p][j], b + (p0 + p) * b_row + j0 + j, inside);
    }
    cp_async_commit();
  };

  float sum[TM][TN] = {};
  load(0, 0);
  int buffer = 0;
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    cp_async_wait();  // this thread's copies are there
    __syncthreads();  // everybody's are, and nobody reads the other buffer any more
    load(buffer ^ 1, p0 + BK);
#pragma unroll
    for (int piece = 0; piece < BK / 4; ++piece) {
      alignas(16) float from_a[TM][4];
#pragma unroll
      for (int i = 0; i < TM; ++i) {  // 8 rows on, the permutation is the same
        *reinterpret_cast<float4*>(from_a[i]) = *reinterpret_cast<const float4*>(
            &a_tile[buffer][row + i * LANES_M][piece * 4 ^ swizzle(row)]);
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        alignas(16) float from_b[TN];
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
          *reinterpret_cast<float4*>(&from_b[j]) =
              *reinterpret_cast<const float4*>(&b_tile[buffer][piece * 4 + p][col + j * LANES_N]);
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
          for (int j = 0; j < TN; ++j) sum[i][j] += from_a[i][p] * from_b[j];
        }
      }
    }
    buffer ^= 1;
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t ci = i0 + row + i * LANES_M;
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int64_t cj = j0 + col + j * LANES_N;
      if (ci < m && cj < n) {
        reinterpret_cast<float4*>(c)[(ci * n + cj) / 4] = {sum[i][j], sum[i][j + 1], sum[i][j + 2],
                                                           sum[i][j + 3]};
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
