// 3_swizzle.cu: 16-byte pieces change places, and ldmatrix meets no bank twice
// Before : in rung 2 the 8 rows that ldmatrix reads at once are 64 or 256 bytes apart: they share 8
//          or even 4 of the 32 banks, and take 4 or 8 turns
// Idea   : piece j of row i is stored at j XOR a number made from i; nothing else changes. Padding
//          each row would do too, and cost shared memory
// Cost   : 2·M·N·K operations
//          Legal: row-major, N, K and row strides multiples of 8, pointers aligned to 16 bytes;
//          float16 from sm_75, bfloat16 from sm_80
// Result : 0.09 of matmul, 2.50x rung 1, 0.09x eager  (H200, bfloat16 (4096, 4096) @ (4096, 4096))
// Try    : place() for rows of 64 bytes with i % 4; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

constexpr int BM = 128, BN = 128, BK = 32;
constexpr int WM = 64, WN = 64;
constexpr int THREADS = (BM / WM) * (BN / WN) * 32;  // 128

// Where element (i, j) of a tile of COLS columns lies: 16-byte pieces are permuted within their
// row, so that the 8 rows that ldmatrix reads at once begin in different banks.
template <int COLS>
__device__ int place(int i, int j) {
  const int twist = COLS * 2 >= 128 ? i % 8 : i / 2 % 4;  // rows of 256 or of 64 bytes
  return i * COLS + (j ^ twist * 8);
}

// Copies the ROWS x COLS tile that begins at `from`. Zeros stand for what lies beyond `rows` x `cols`
// elements.
template <int ROWS, int COLS, typename T>
__device__ void load_tile(T* tile, const T* from, int64_t row_stride, int rows, int cols) {
#pragma unroll
  for (unsigned e = threadIdx.x; e < ROWS * COLS / 8; e += THREADS) {
    const int i = e / (COLS / 8), j = e % (COLS / 8) * 8;
    const float4 piece = i < rows && j < cols
                             ? *reinterpret_cast<const float4*>(from + i * row_stride + j)
                             : float4{0, 0, 0, 0};
    *reinterpret_cast<float4*>(tile + place<COLS>(i, j)) = piece;
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

template <typename T>
__global__ void __launch_bounds__(THREADS, 2)
    matmul_kernel(const T* a, const T* b, T* c, int64_t m, int64_t n, int64_t k, int64_t a_row,
                  int64_t b_row) {
  __shared__ alignas(128) T a_tile[BM * BK];
  __shared__ alignas(128) T b_tile[BK * BN];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tiles_m = (m + BM - 1) / BM;
  const int64_t i0 = blockIdx.x % tiles_m * BM, j0 = blockIdx.x / tiles_m * BN;
  const int row = warp / (BN / WN) * WM, col = warp % (BN / WN) * WN;  // the warp's corner

  const int rows = static_cast<int>(min(m - i0, int64_t{BM}));
  const int cols = static_cast<int>(min(n - j0, int64_t{BN}));

  float sum[WM / 16][WN / 8][4] = {};
  for (int64_t p0 = 0; p0 < k; p0 += BK) {
    const int depth = static_cast<int>(min(k - p0, int64_t{BK}));
    load_tile<BM, BK>(a_tile, a + i0 * a_row + p0, a_row, rows, depth);
    load_tile<BK, BN>(b_tile, b + p0 * b_row + j0, b_row, depth, cols);
    __syncthreads();
    const int low = lane % 16, high = lane / 16 * 8;  // the row and column that this lane names
#pragma unroll
    for (int p = 0; p < BK; p += 16) {
      uint32_t from_a[WM / 16][4];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
        ldmatrix_x4<false>(from_a[i], a_tile + place<BK>(row + i * 16 + low, p + high));
      }
#pragma unroll
      for (int j = 0; j < WN / 16; ++j) {
        uint32_t from_b[4];
        ldmatrix_x4<true>(from_b, b_tile + place<BN>(p + low, col + j * 16 + high));
#pragma unroll
        for (int i = 0; i < WM / 16; ++i) {
          mma<T>(sum[i][2 * j], from_a[i], from_b[0], from_b[1]);
          mma<T>(sum[i][2 * j + 1], from_a[i], from_b[2], from_b[3]);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // two columns of row lane / 4, and two of the eighth row below
        const int64_t ci = i0 + row + i * 16 + e / 2 * 8 + lane / 4;
        const int64_t cj = j0 + col + j * 8 + lane % 4 * 2 + e % 2;
        if (ci < m && cj < n) c[ci * n + cj] = T(sum[i][j][e]);
      }
    }
  }
}

template <typename T>
cudaError_t launch(int capability, const T* a, const T* b, T* c, int64_t m, int64_t n, int64_t k,
                   int64_t a_row, int64_t a_col, int64_t b_row, int64_t b_col,
                   cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  if (a_col != 1 || b_col != 1 || a_row % 8 || b_row % 8 || n % 8 || k % 8 || bits % 16) {
    return cudaErrorNotSupported;
  }
  int device = 0, major = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major < capability) return cudaErrorNotSupported;
  const int64_t blocks = ((m + BM - 1) / BM) * ((n + BN - 1) / BN);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  matmul_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(a, b, c, m, n, k, a_row,
                                                                       b_row);
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
