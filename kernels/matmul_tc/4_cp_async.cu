// 4_cp_async.cu: three stages in flight; any shape, any strides
// Before : rung 3 waits for its loads, then computes, then waits again
// Idea   : cp.async fills two stages while the third is multiplied. Operands whose rows run along
//          M or N instead of K keep their layout in shared memory: ldmatrix transposes on request
// Cost   : 2·M·N·K operations    Legal: everything; float16 from sm_75, bfloat16 from sm_80
// Result : 0.54 of matmul, 15.49x rung 1, 0.55x eager  (H200, bfloat16 (4096, 4096) @ (4096, 4096))
// Try    : STAGES 3 → 2; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BM = 128, BN = 128, BK = 32;
constexpr int WM = 64, WN = 64;
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;  // 128
constexpr int STAGES = 3;                            // 48 KB
constexpr int BAND = 16;                             // rows of tiles that are worked on together

template <typename T>
struct Matrix {  // element (i, j) is at[i * row + j * col]
  const T* at;
  int64_t row, col;
};

// Where element (i, j) of a tile of COLS columns lies: 16-byte pieces are permuted within their
// row, so that the 8 rows that ldmatrix reads at once begin in different banks.
template <int COLS>
__device__ int place(int i, int j) {
  const int twist = COLS * 2 >= 128 ? i % 8 : i / 2 % 4;  // rows of 256 or of 64 bytes
  return i * COLS + (j ^ twist * 8);
}

// Starts to copy 16 bytes from global to shared memory past the registers, or to write zeros.
// Turing has no cp.async: there it is an ordinary copy.
__device__ void cp_async(void* to, const void* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(inside ? 16 : 0));
#else
  *static_cast<float4*>(to) = inside ? *static_cast<const float4*>(from) : float4{0, 0, 0, 0};
#endif
}
__device__ void cp_async_commit() {  // what was asked for since the last commit is one group
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int PENDING>
__device__ void cp_async_wait() {  // until all groups of this thread but the latest PENDING arrived
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Starts to copy the ROWS x COLS tile that begins at from.at; zeros stand for what lies beyond
// `rows` x `cols`. WIDE: aligned rows, 16 bytes at a time; else single elements, as they lie.
template <int ROWS, int COLS, bool WIDE, typename T>
__device__ void load_tile(T* tile, Matrix<T> from, int rows, int cols) {
  const unsigned t = threadIdx.x;
  if (WIDE) {
    constexpr int STEP = THREADS * 8 / COLS;  // rows from one piece of a thread to its next
    const int i = t / (COLS / 8), j = t % (COLS / 8) * 8;
    const T* source = from.at + i * from.row + j;
#pragma unroll
    for (int u = 0; u < ROWS; u += STEP) {
      T* to = tile + place<COLS>(i + u, j);
      cp_async(to, source + u * from.row, i + u < rows && j < cols);
    }
  } else {
    const bool by_rows = from.row != 1;
    int i = by_rows ? t / COLS : t % ROWS, j = by_rows ? t % COLS : t / ROWS;
    const int di = by_rows ? THREADS / COLS : 0, dj = by_rows ? 0 : THREADS / ROWS;
    const T* source = from.at + i * from.row + j * from.col;
    const int64_t step = di * from.row + dj * from.col;
#pragma unroll 16
    for (int u = 0; u < ROWS * COLS; u += THREADS, i += di, j += dj, source += step) {
      tile[place<COLS>(i, j)] = i < rows && j < cols ? *source : T(0.0f);
    }
  }
}

// ldmatrix: lane l names row l % 8 of the 8 x 8 matrix l / 8; each lane gets two elements of each.
template <bool TRANS>
__device__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if (TRANS) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  }
}

// d (16 x 8) += a (16 x 16) · b (16 x 8)
template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#else  // Turing multiplies 8 steps of K at once, and float16 only
  if constexpr (std::is_same_v<T, __half>) {
    for (int half = 0; half < 2; ++half) {
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half ? b1 : b0));
    }
  } else {
    __trap();
  }
#endif
}

// A_ROWS: A's tile is kept in rows along K, else M. B_ROWS: B's tile in rows along N, else K.
template <typename T, bool A_ROWS, bool B_ROWS, bool WIDE>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(Matrix<T> a, Matrix<T> b, T* c, int64_t m, int64_t n, int64_t k) {
  __shared__ alignas(128) T a_tile[STAGES][BM * BK];
  __shared__ alignas(128) T b_tile[STAGES][BK * BN];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  const int64_t band = blockIdx.x / (BAND * tiles_n), in_band = blockIdx.x % (BAND * tiles_n);
  const int64_t height = min(int64_t{BAND}, tiles_m - band * BAND);
  const int64_t i0 = (band * BAND + in_band % height) * BM;
  const int64_t j0 = in_band / height * BN;
  const int row = warp / (BN / WN) * WM, col = warp % (BN / WN) * WN;  // the warp's corner

  a.at += i0 * a.row;
  b.at += j0 * b.col;
  int64_t left = k;
  const int rows = static_cast<int>(min(m - i0, int64_t{BM}));
  const int cols = static_cast<int>(min(n - j0, int64_t{BN}));
  auto load = [&](int stage) {
    const int depth = static_cast<int>(min(left, int64_t{BK}));
    const Matrix<T> a_turned = {a.at, a.col, a.row}, b_turned = {b.at, b.col, b.row};
    if (A_ROWS) load_tile<BM, BK, WIDE>(a_tile[stage], a, rows, depth);
    if (!A_ROWS) load_tile<BK, BM, WIDE>(a_tile[stage], a_turned, depth, rows);
    if (B_ROWS) load_tile<BK, BN, WIDE>(b_tile[stage], b, depth, cols);
    if (!B_ROWS) load_tile<BN, BK, WIDE>(b_tile[stage], b_turned, cols, depth);
    cp_async_commit();
    a.at += BK * a.col;
    b.at += BK * b.row;
    left -= BK;
  };

  float sum[WM / 16][WN / 8][4] = {};
  for (int s = 0; s < STAGES - 1; ++s) load(s);
  int stage = 0, next = STAGES - 1;
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load(next);
    // The row and column of a 16 x 16 piece that this lane names to ldmatrix: 8 lanes for each of
    // its quarters, which come in this order
    const int low = lane % 16, high = lane / 16 * 8;  // down, then right
    const int turned_low = lane % 8 + lane / 16 * 8, turned_high = lane / 8 % 2 * 8;  // right first
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
      uint32_t from_a[WM / 16][4];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
        const int at = row + i * 16;
        ldmatrix_x4<!A_ROWS>(
            from_a[i], a_tile[stage] + (A_ROWS ? place<BK>(at + low, p + high)
                                               : place<BM>(p + turned_low, at + turned_high)));
      }
#pragma unroll
      for (int j = 0; j < WN / 16; ++j) {
        const int at = col + j * 16;
        uint32_t from_b[4];
        ldmatrix_x4<B_ROWS>(from_b,
                            b_tile[stage] + (B_ROWS ? place<BN>(p + low, at + high)
                                                    : place<BK>(at + turned_low, p + turned_high)));
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) {
          mma<T>(sum[i][2 * j], from_a[i], from_b[0], from_b[1]);
          mma<T>(sum[i][2 * j + 1], from_a[i], from_b[2], from_b[3]);
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4;
           e += 2) {  // two columns of row lane / 4, and two of the eighth row below
        const int64_t ci = i0 + row + i * 16 + e / 2 * 8 + lane / 4;
        const int64_t cj = j0 + col + j * 8 + lane % 4 * 2;
        alignas(4) const T pair[] = {T(sum[i][j][e]), T(sum[i][j][e + 1])};
        T* to = c + ci * n + cj;
        if (n % 2 == 0 && ci < m && cj < n) {
          *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(pair);
        } else if (ci < m) {
          if (cj < n) to[0] = pair[0];
          if (cj + 1 < n) to[1] = pair[1];
        }
      }
    }
  }
}

template <typename T>
bool is_wide(Matrix<T> x, int64_t length) {  // x.col is the stride along rows of this length
  return x.col == 1 && x.row % 8 == 0 && length % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.at) % 16 == 0;
}

template <typename T>
cudaError_t launch(int capability, const T* a, const T* b, T* c, int64_t m, int64_t n, int64_t k,
                   int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                   cudaStream_t stream) {
  int device = 0, major = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < capability) return cudaErrorNotSupported;
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const Matrix<T> from_a = {a, a_row, a_col}, from_b = {b, b_row, b_col};
  const Matrix<T> a_turned = {a, a_col, a_row}, b_turned = {b, b_col, b_row};
  auto kernel = matmul_kernel<T, true, true, false>;
  if (is_wide(from_a, k)) {
    if (is_wide(from_b, n)) kernel = matmul_kernel<T, true, true, true>;
    if (is_wide(b_turned, k)) kernel = matmul_kernel<T, true, false, true>;
  } else if (is_wide(a_turned, m)) {
    if (is_wide(from_b, n)) kernel = matmul_kernel<T, false, true, true>;
    if (is_wide(b_turned, k)) kernel = matmul_kernel<T, false, false, true>;
  }
  kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(from_a, from_b, c, m, n, k);
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
