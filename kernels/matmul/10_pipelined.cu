// 10_pipelined.cu: the operands of the next step leave shared memory while this one is multiplied
// Before : in rung 9 the multiply-adds behind a barrier wait for shared memory, and of A every number
//          is copied, and its address computed, by itself
// Idea   : two sets of operands in registers; the last step of a tile already fetches from the next
//          tile, so its barrier comes before that step. What lies along K comes 16 bytes at a time, by
//          way of registers: four stores transpose it
// Cost   : 2·M·N·K operations                                               Legal: everything
// Result : 0.97 of matmul, 50.61x rung 1, 0.97x eager  (H200, float32 (4096, 4096) @ (4096, 4096))
// Try    : one set: fetch() of step p in front of its multiply-adds; predict first

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BM = 128, BN = 128, BK = 8;
constexpr int WM = 64, WN = 64;
constexpr int LANES_M = 8, LANES_N = 4;
constexpr int TM = WM / LANES_M, TN = WN / LANES_N;  // 8 x 16, in pieces of 4 x 4
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;  // 128, and two blocks an SM
constexpr int STAGES = 4;
constexpr int BAND = 8;        // rows of tiles that are worked on together: they share L2
constexpr int PITCH = BM + 4;  // of a tile's rows, so that a column spreads over the banks
constexpr int HELD = BK * BN / 4 / THREADS;  // pieces of 16 bytes a thread has of a tile
static_assert(BM == BN, "both tiles are BK x 128");

// An operand seen as rows along M or N, one row for each step of K: the element of step p and column
// j is at[p * step + j * next].
struct Operand {
  const float* at;
  int64_t step, next;
};
// WIDE: aligned rows, copied 16 bytes at a time. ALONG_K: aligned along K, 16 bytes are 4 steps of K.
enum Access { WIDE, ALONG_K, ANY };

// cp.async: starts to copy BYTES (4 or 16) from global to shared memory past the registers, or to
// write zeros. Before sm_80, and on the CPU machine, an ordinary copy stands for it.
template <int BYTES>
__device__ void cp_async(float* to, const float* from, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
               "n"(BYTES), "r"(inside ? BYTES : 0));
#else
  using Piece = std::conditional_t<BYTES == 16, float4, float>;
  *reinterpret_cast<Piece*>(to) = inside ? *reinterpret_cast<const Piece*>(from) : Piece{};
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

// Fetches the BK x 128 tile that begins at from.at. Zeros stand for what lies beyond the `depth` x
// `cols` elements that are there. What has to be transposed is held in registers until put_tile().
template <Access ACCESS>
__device__ void fetch_tile(float4 (&held)[HELD], float* tile, Operand from, int depth, int cols) {
  const int t = threadIdx.x;
  if constexpr (ACCESS == ALONG_K) {
    const int p = t % (BK / 4) * 4, j = t / (BK / 4);
    const float* source = from.at + p + j * from.next;
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      const bool inside = p < depth && j + u * BN / HELD < cols;
      held[u] = inside ? *reinterpret_cast<const float4*>(source) : float4{0, 0, 0, 0};
      source += BN / HELD * from.next;
    }
  } else {  // neighbouring threads copy neighbours in memory
    constexpr int WIDTH = ACCESS == WIDE ? 4 : 1;
    const bool along_k = ACCESS == ANY && from.step == 1;
    const int p = along_k ? t % BK : t / (BN / WIDTH);
    const int j = along_k ? t / BK : t % (BN / WIDTH) * WIDTH;
    const int dp = along_k ? 0 : THREADS * WIDTH / BN, dj = along_k ? THREADS / BK : 0;
    const float* source = from.at + p * from.step + j * from.next;
#pragma unroll
    for (int u = 0; u < BK * BN / (THREADS * WIDTH); ++u) {
      cp_async<4 * WIDTH>(tile + (p + u * dp) * PITCH + j + u * dj, source,
                          p + u * dp < depth && j + u * dj < cols);
      source += dp * from.step + dj * from.next;
    }
  }
}
template <Access ACCESS>
__device__ void put_tile(const float4 (&held)[HELD], float* tile) {
  if constexpr (ACCESS == ALONG_K) {
    const int p = threadIdx.x % (BK / 4) * 4, j = threadIdx.x / (BK / 4);
#pragma unroll
    for (int u = 0; u < HELD; ++u) {
      float* to = tile + p * PITCH + j + u * BN / HELD;
      to[0] = held[u].x;
      to[PITCH] = held[u].y;
      to[2 * PITCH] = held[u].z;
      to[3 * PITCH] = held[u].w;
    }
  }
}

template <Access A, Access B>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(Operand a, Operand b, float* c, int64_t m, int64_t n, int64_t k, float one) {
  __shared__ alignas(16) float a_tile[STAGES][BK * PITCH];
  __shared__ alignas(16) float b_tile[STAGES][BK * PITCH];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Tiles are numbered band by band, and within a band column by column.
  const int64_t tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  const int64_t band = blockIdx.x / (BAND * tiles_n), in_band = blockIdx.x % (BAND * tiles_n);
  const int64_t height = min(int64_t{BAND}, tiles_m - band * BAND);
  const int64_t i0 = (band * BAND + in_band % height) * BM;
  const int64_t j0 = in_band / height * BN;
  // Shared memory serves 16-byte loads to 8 lanes at a time, but to 16 if lanes l and l ^ 1, or l and
  // l ^ 2, want the same. So bit 0 of the lane moves only the row, and bit 1 only the column.
  const int row = warp / (BN / WN) * WM + ((lane & 1) | (lane >> 2 & 6)) * 4;
  const int col = warp % (BN / WN) * WN + (lane >> 1 & 3) * 4;

  a.at += i0 * a.next;
  b.at += j0 * b.next;
  int64_t left = k;  // steps of K that have not been asked for
  const int rows = static_cast<int>(min(m - i0, int64_t{BM}));
  const int cols = static_cast<int>(min(n - j0, int64_t{BN}));
  float4 held_a[HELD], held_b[HELD];
  auto load = [&](int stage) {
    const int depth = static_cast<int>(min(left, int64_t{BK}));
    fetch_tile<A>(held_a, a_tile[stage], a, depth, rows);
    fetch_tile<B>(held_b, b_tile[stage], b, depth, cols);
    cp_async_commit();
    a.at += BK * a.step;
    b.at += BK * b.step;
    left -= BK;
  };

  auto put = [&](int stage) {
    put_tile<A>(held_a, a_tile[stage]);
    put_tile<B>(held_b, b_tile[stage]);
  };
  alignas(16) float from_a[2][TM], from_b[2][TN];
  auto fetch = [&](int to, int stage, int p) {  // this thread's operands for a step
#pragma unroll
    for (int i = 0; i < TM; i += 4) {
      *reinterpret_cast<float4*>(&from_a[to][i]) =
          *reinterpret_cast<const float4*>(&a_tile[stage][p * PITCH + row + i * LANES_M]);
    }
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      *reinterpret_cast<float4*>(&from_b[to][j]) =
          *reinterpret_cast<const float4*>(&b_tile[stage][p * PITCH + col + j * LANES_N]);
    }
  };

  float sum[TM][TN] = {};
  for (int s = 0; s < STAGES - 1; ++s) {
    load(s);
    put(s);
  }
  cp_async_wait<STAGES - 2>();  // all but the latest groups: the first stage has arrived
  __syncthreads();
  fetch(0, 0, 0);
  int stage = 0,
      last = STAGES - 1;  // `last` was read, and gets the tile that comes after the others
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    const int next = stage + 1 == STAGES ? 0 : stage + 1;
    load(last);  // zeros beyond k
#pragma unroll
    for (int p = 0; p < BK; ++p) {
      if (p == BK - 2) put(last);
      if (p == BK - 1) {  // all operands of this stage are in registers
        cp_async_wait<STAGES - 2>();
        __syncthreads();
      }
      fetch((p + 1) % 2, p == BK - 1 ? next : stage, (p + 1) % BK);
#pragma unroll
      for (int j = 0; j < TN; ++j) {
#pragma unroll
        for (int u = 0; u < TM; ++u) {
          const int i = j % 2 == 0 ? u : TM - 1 - u;  // down one column, up the next
          sum[i][j] += from_a[p % 2][i] * from_b[p % 2][j];
        }
      }
    }
    last = stage;
    stage = next;
  }
#pragma unroll
  for (int i = 0; i < TM; ++i) {
    const int64_t ci = i0 + row + i / 4 * 4 * LANES_M + i % 4;
#pragma unroll
    for (int j = 0; j < TN; j += 4) {
      const int64_t cj = j0 + col + j * LANES_N;
      float* to = c + ci * n + cj;
      if (B != ANY && n % 4 == 0 && ci < m && cj < n) {
        // A store of 16 bytes wants its sums in four registers in a row, whose banks do not suit the
        // loop. A multiplication by what the compiler does not know to be 1 sets the sums free.
        reinterpret_cast<float4*>(c)[(ci * n + cj) / 4] = {
            one * sum[i][j], one * sum[i][j + 1], one * sum[i][j + 2], one * sum[i][j + 3]};
      } else if (ci < m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (cj + e < n) to[e] = sum[i][j + e];
        }
      }
    }
  }
}

Access access(Operand x, int64_t length, int64_t k) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.at) % 16 == 0;
  if (aligned && x.next == 1 && x.step % 4 == 0 && length % 4 == 0) return WIDE;
  return aligned && x.step == 1 && x.next % 4 == 0 && k % 4 == 0 ? ALONG_K : ANY;
}

extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream) {
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  const Operand x = {a, a_col, a_row}, y = {b, b_row, b_col};
  const Access of_a = access(x, m, k), of_b = access(y, n, k);
  auto kernel = matmul_kernel<ANY, ANY>;
  if (reinterpret_cast<uintptr_t>(c) % 16 == 0) {
    if (of_a == ALONG_K && of_b == WIDE) kernel = matmul_kernel<ALONG_K, WIDE>;  // both row-major
    if (of_a == ALONG_K && of_b == ALONG_K) kernel = matmul_kernel<ALONG_K, ALONG_K>;
    if (of_a == WIDE && of_b == WIDE) kernel = matmul_kernel<WIDE, WIDE>;
    if (of_a == WIDE && of_b == ALONG_K) kernel = matmul_kernel<WIDE, ALONG_K>;
  }
  kernel<<<grid, THREADS, 0, stream>>>(x, y, c, m, n, k, 1.0f);
  return cudaGetLastError();
}
