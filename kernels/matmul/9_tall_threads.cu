// 9_tall_threads.cu: 128 elements a thread, three stages; any shape, any strides
// Before : rung 8 issues 4 shared loads for 64 multiply-adds, and wants aligned row-major input
// Idea   : 8 x 16 elements a thread need 6 loads for 128 multiply-adds; each issue slot saved goes
// to
//          a multiply-add. A third stage covers the longer wait of fewer warps. Blocks go through C
//          in bands of rows, whose pieces of A and B stay in L2
// Cost   : 2·M·N·K operations                                               Legal: everything
// Result : not measured yet
// Try    : BAND 8 → 1; predict first

#include <cuda_runtime.h>

#include <cstdint>

constexpr int BM = 128, BN = 128, BK = 16;
constexpr int WM = 64, WN = 64;
constexpr int LANES_M = 8, LANES_N = 4;
constexpr int TM = WM / LANES_M, TN = WN / LANES_N;  // 8 x 16
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;  // 128
constexpr int STAGES = 3;                            // 48 KB, and two blocks an SM
constexpr int BAND = 8;                              // rows of tiles that are worked on together

struct Matrix {  // element (i, j) is at[i * row + j * col]
  const float* at;
  int64_t row, col;
};

// Column j of row i of a tile is stored in column j ^ swizzle(i). Rows of A's tile are 16 long, and
// a thread reads 4 along the row: as in rung 8. B's tile is permuted if its columns arrive element
// by element, or 16 elements of one column would meet in one bank.
enum Order { PLAIN, OF_A, OF_B };
template <Order ORDER>
__device__ int swizzle(int i) {
  return ORDER == OF_A ? (i & 6) * 2 : ORDER == OF_B ? (i & 7) * 4 : 0;
}

// cp.async: starts to copy BYTES (4 or 16) from global to shared memory past the registers, or
// to write zeros. Before sm_80, and on the CPU machine, an ordinary copy stands for it.
template <int BYTES>
__device__ void cp_async(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if (BYTES == 16) {  // only whole 16 bytes can pass by L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(inside ? BYTES : 0));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(inside ? BYTES : 0));
  }
#else
  for (int e = 0; e < BYTES / 4; ++e) to[e] = inside ? from[e] : 0;
#endif
}
__device__ void cp_async_commit() {  // what was asked for since the last commit is one group
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int PENDING>
__device__ void cp_async_wait() {  // until all groups of this thread but the latest PENDING arrived
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Starts to copy the ROWS x COLS tile that begins at from.at. Zeros stand for what lies beyond the
// `rows` x `cols` elements that are there. WIDE: pieces of 16 bytes of aligned rows; else single
// elements, in the order in which they lie in memory.
template <int ROWS, int COLS, Order ORDER, bool WIDE>
__device__ void load_tile(float* tile, Matrix from, int rows, int cols) {
  const unsigned t = threadIdx.x;
  if (WIDE) {
    constexpr int STEP = THREADS * 4 / COLS;  // rows from one piece of a thread to its next
    static_assert(!WIDE || ORDER == PLAIN || STEP % 8 == 0, "all its pieces are permuted alike");
    const int i = t / (COLS / 4), j = t % (COLS / 4) * 4;
    const float* source = from.at + i * from.row + j;
    float* to = tile + i * COLS + (j ^ swizzle<ORDER>(i));
#pragma unroll
    for (int u = 0; u < ROWS; u += STEP) {
      cp_async<16>(to + u * COLS, source + u * from.row, i + u < rows && j < cols);
    }
  } else {
    const bool by_rows = from.row != 1;
    int i = by_rows ? t / COLS : t % ROWS, j = by_rows ? t % COLS : t / ROWS;
    const int di = by_rows ? THREADS / COLS : 0, dj = by_rows ? 0 : THREADS / ROWS;
    const float* source = from.at + i * from.row + j * from.col;
    const int64_t step = di * from.row + dj * from.col;
#pragma unroll 4
    for (int u = 0; u < ROWS * COLS; u += THREADS, i += di, j += dj, source += step) {
      float* to = tile + i * COLS + (j ^ swizzle<ORDER>(i));
      cp_async<4>(to, source, i < rows && j < cols);
    }
  }
}

template <bool WIDE_A, bool WIDE_B>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(Matrix a, Matrix b, float* c, int64_t m, int64_t n, int64_t k) {
  __shared__ alignas(16) float a_tile[STAGES][BM * BK];
  __shared__ alignas(16) float b_tile[STAGES][BK * BN];
  constexpr Order B_ORDER = WIDE_B ? PLAIN : OF_B;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Tiles are numbered band by band, and within a band column by column.
  const int64_t tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  const int64_t band = blockIdx.x / (BAND * tiles_n), in_band = blockIdx.x % (BAND * tiles_n);
  const int64_t height = min(int64_t{BAND}, tiles_m - band * BAND);
  const int64_t i0 = (band * BAND + in_band % height) * BM;
  const int64_t j0 = in_band / height * BN;
  // Shared memory serves 16-byte loads to 8 lanes at a time, but 16 if lanes l and l ^ 1, or l and
  // l ^ 2, want the same. So neighbours (bit 0) share their columns, and bit 1 does not move the
  // row.
  const int row = warp / (BN / WN) * WM + ((lane & 1) | (lane >> 2 & 6));  // rows row + i * LANES_M
  const int col = warp % (BN / WN) * WN + (lane >> 1 & 3) * 4;

  a.at += i0 * a.row;  // the corners of the next tiles
  b.at += j0 * b.col;
  int64_t left = k;  // rows of B that have not been asked for
  const int rows = static_cast<int>(min(m - i0, int64_t{BM}));
  const int cols = static_cast<int>(min(n - j0, int64_t{BN}));
  auto load = [&](int stage) {
    const int depth = static_cast<int>(min(left, int64_t{BK}));
    load_tile<BM, BK, OF_A, WIDE_A>(a_tile[stage], a, rows, depth);
    load_tile<BK, BN, B_ORDER, WIDE_B>(b_tile[stage], b, depth, cols);
    cp_async_commit();
    a.at += BK * a.col;
    b.at += BK * b.row;
    left -= BK;
  };

  float sum[TM][TN] = {};
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  int stage = 0, next = STAGES - 1;
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    cp_async_wait<STAGES - 2>();  // all but the latest group: this stage has arrived
    __syncthreads();
    load(next);  // zeros beyond k
    const float* a_rows = a_tile[stage] + row * BK;
    const float* b_rows = b_tile[stage];
#pragma unroll 2  // all 4 would make 36 KB of code, more than the instruction cache holds
    for (int piece = 0; piece < BK / 4; ++piece) {
      alignas(16) float from_a[TM][4];
#pragma unroll
      for (int i = 0; i < TM; ++i) {  // 8 rows on, the permutation is the same
        *reinterpret_cast<float4*>(from_a[i]) = *reinterpret_cast<const float4*>(
            a_rows + i * LANES_M * BK + (piece * 4 ^ swizzle<OF_A>(row)));
      }
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        alignas(16) float from_b[TN];
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
          const int r = piece * 4 + p;
          *reinterpret_cast<float4*>(&from_b[j]) = *reinterpret_cast<const float4*>(
              b_rows + r * BN + ((col + j * LANES_N) ^ swizzle<B_ORDER>(r)));
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
          for (int j = 0; j < TN; ++j) sum[i][j] += from_a[i][p] * from_b[j];
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t ci = i0 + row + i * LANES_M;
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int64_t cj = j0 + col + j * LANES_N;
      float* to = c + ci * n + cj;
      if (WIDE_B && ci < m && cj < n) {  // N is a multiple of 4: all 4 are inside
        *reinterpret_cast<float4*>(to) =
            float4{sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
      } else if (ci < m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (cj + e < n) to[e] = sum[i][j + e];
        }
      }
    }
  }
}

bool is_wide(Matrix x, int64_t cols) {
  return x.col == 1 && x.row % 4 == 0 && cols % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.at) % 16 == 0;
}

extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream) {
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  const Matrix from_a = {a, a_row, a_col}, from_b = {b, b_row, b_col};
  const bool wide_a = is_wide(from_a, k);
  const bool wide_b = is_wide(from_b, n) && reinterpret_cast<uintptr_t>(c) % 16 == 0;
  if (wide_a && wide_b) {
    matmul_kernel<true, true><<<grid, THREADS, 0, stream>>>(from_a, from_b, c, m, n, k);
  } else if (wide_a) {
    matmul_kernel<true, false><<<grid, THREADS, 0, stream>>>(from_a, from_b, c, m, n, k);
  } else if (wide_b) {
    matmul_kernel<false, true><<<grid, THREADS, 0, stream>>>(from_a, from_b, c, m, n, k);
  } else {
    matmul_kernel<false, false><<<grid, THREADS, 0, stream>>>(from_a, from_b, c, m, n, k);
  }
  return cudaGetLastError();
}
