// 7_tile_order.cu: tiles in an order that memory likes, and any shape
// Before : the blocks of rung 6 that run together lie side by side: they read whole rows of `in`,
//          and write 128 bytes here and there all over `out`
// Idea   : blocks go down the columns, so that those running together write whole rows of `out`;
//          tiles have rows of 256 bytes. What fits no packs goes by elements, as in rung 4
// Cost   : 2·n·sizeof(T) bytes moved, no arithmetic         Legal: any; packs where they fit
// Result : 0.96 of copy, 7.51x rung 1, 3.54x eager  (H200, float32 (16384, 16384), CUDA 13.0)
// Try    : ROW_BYTES 256 → 128, then 64; predict first

#include <cuda_runtime.h>

#include <cstdint>

#ifndef ROW_BYTES
#define ROW_BYTES 256
#endif

struct Position {
  int64_t row, col, matrix;  // of the first element of a tile; where its matrix begins
};

// Tile number `block`, counted down the columns.
__device__ Position position(unsigned block, int64_t rows, int64_t cols, int side) {
  const unsigned tile_cols = (cols + side - 1) / side, tile_rows = (rows + side - 1) / side;
  const unsigned tile_col = block / tile_rows, matrix = tile_col / tile_cols;
  return {int64_t{block - tile_col * tile_rows} * side,
          int64_t{tile_col - matrix * tile_cols} * side, matrix * rows * cols};
}

template <typename T>
struct Tile {
  static constexpr int N = 16 / sizeof(T);  // elements of a pack of 16 bytes
  static constexpr int SIDE = sizeof(T) == 1 ? 128 : ROW_BYTES / sizeof(T);  // rows and columns
  static constexpr int PACKS = SIDE / N;                                     // of a row of the tile
  static constexpr int THREADS = PACKS * PACKS;
};

// Thread t loads N packs, then has the N×N elements where row of packs t % PACKS meets column of
// packs t / PACKS: it turns them round in registers and writes N packs.
template <typename T>
__global__ void __launch_bounds__(Tile<T>::THREADS)
    transpose_packs(const T* in, T* out, int64_t rows, int64_t cols) {
  constexpr int N = Tile<T>::N, SIDE = Tile<T>::SIDE, PACKS = Tile<T>::PACKS;
  __shared__ uint4 tile[SIDE * PACKS];
  const Position at = position(blockIdx.x, rows, cols, SIDE);
  const int64_t r0 = at.row, c0 = at.col, matrix = at.matrix;
  uint4 pack[N];
#pragma unroll
  for (int k = 0; k < N; ++k) {  // all loads first, as in rung 4
    const int i = k * Tile<T>::THREADS + threadIdx.x;
    const int64_t r = min(r0 + i / PACKS, rows - 1), c = min(c0 + i % PACKS * N, cols - N);
    pack[k] = *reinterpret_cast<const uint4*>(in + matrix + r * cols + c);
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int i = k * Tile<T>::THREADS + threadIdx.x, r = i / PACKS, p = i % PACKS;
    tile[r * PACKS + (p ^ (r / N))] = pack[k];
  }
  __syncthreads();
  const int q = threadIdx.x % PACKS, p = threadIdx.x / PACKS;
  const int64_t r = r0 + q * N, c = c0 + p * N;
  if (r >= rows || c >= cols) return;
  alignas(16) T block[N][N];
#pragma unroll
  for (int k = 0; k < N; ++k)
    *reinterpret_cast<uint4*>(block[k]) = tile[(q * N + k) * PACKS + (p ^ q)];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    alignas(16) T turned[N];
#pragma unroll
    for (int k = 0; k < N; ++k) turned[k] = block[k][j];
    // Written as an assignment, the compiler makes four stores of this one.
    __stcs(reinterpret_cast<uint4*>(out + matrix + (c + j) * rows + r),
           *reinterpret_cast<uint4*>(turned));
  }
}

// For what does not fit packs: rung 4 with larger tiles.
constexpr int SIDE = 64, STEP = 8;

template <typename T>
__global__ void transpose_elements(const T* in, T* out, int64_t rows, int64_t cols) {
  constexpr int PADDING = sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // an odd number of 4-byte words a row
  __shared__ T tile[SIDE][SIDE + PADDING];
  const Position at = position(blockIdx.x, rows, cols, SIDE);
  T element[SIDE / STEP];
#pragma unroll
  for (int k = 0; k < SIDE / STEP; ++k) {
    const int64_t r = min(at.row + threadIdx.y + k * STEP, rows - 1);
    element[k] = in[at.matrix + r * cols + min(at.col + threadIdx.x, cols - 1)];
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < SIDE / STEP; ++k) tile[threadIdx.y + k * STEP][threadIdx.x] = element[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < SIDE / STEP; ++k) {
    const int64_t c = at.col + threadIdx.y + k * STEP, r = at.row + threadIdx.x;
    if (c < cols && r < rows) {
      out[at.matrix + c * rows + r] = tile[threadIdx.x][threadIdx.y + k * STEP];
    }
  }
}

template <typename T>
cudaError_t launch(const T* in, T* out, int64_t batch, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  constexpr int N = Tile<T>::N;
  const auto bits = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out);
  const bool packs = rows % N == 0 && cols % N == 0 && bits % 16 == 0;
  const int64_t side = packs ? Tile<T>::SIDE : SIDE;
  const int64_t blocks = batch * ((rows + side - 1) / side) * ((cols + side - 1) / side);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const auto grid = static_cast<unsigned>(blocks);
  if (packs) {
    transpose_packs<<<grid, Tile<T>::THREADS, 0, stream>>>(in, out, rows, cols);
  } else {
    transpose_elements<<<grid, dim3(SIDE, STEP), 0, stream>>>(in, out, rows, cols);
  }
  return cudaGetLastError();
}

// Transposing moves bits and never looks at them: one launcher for each size of element.
extern "C" cudaError_t transpose_launch_b8(const uint8_t* in, uint8_t* out, int64_t batch,
                                           int64_t rows, int64_t cols, cudaStream_t stream) {
  return launch(in, out, batch, rows, cols, stream);
}
extern "C" cudaError_t transpose_launch_b16(const uint16_t* in, uint16_t* out, int64_t batch,
                                            int64_t rows, int64_t cols, cudaStream_t stream) {
  return launch(in, out, batch, rows, cols, stream);
}
extern "C" cudaError_t transpose_launch_b32(const uint32_t* in, uint32_t* out, int64_t batch,
                                            int64_t rows, int64_t cols, cudaStream_t stream) {
  return launch(in, out, batch, rows, cols, stream);
}
extern "C" cudaError_t transpose_launch_b64(const uint64_t* in, uint64_t* out, int64_t batch,
                                            int64_t rows, int64_t cols, cudaStream_t stream) {
  return launch(in, out, batch, rows, cols, stream);
}
