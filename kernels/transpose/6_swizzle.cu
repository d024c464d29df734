// 6_swizzle.cu: no bank conflicts without padding, and tiles in an order that memory likes
// Before : in rung 5, eight threads that read a pack each from eight rows meet in the same banks;
//          and the blocks that run together write to everywhere in `out`
// Idea   : pack p of row r lies at p XOR (r / N); blocks walk down strips STRIP tiles wide, so that
//          those running together read and write a square: long pieces of few rows on both sides
// Cost   : 2·n·sizeof(T) bytes moved, no arithmetic         Legal: any; packs where they fit
// Result : not measured yet
// Try    : STRIP 16 → 1, then 1000000; predict first

#include <cuda_runtime.h>

#include <cstdint>

#ifndef STRIP
#define STRIP 16
#endif

struct Position {
  int64_t row, col, matrix;  // of the first element of a tile; where its matrix begins
};

// Tile number `block`. Strips are STRIP tiles wide (the last may be narrower); a strip is walked
// row by row, one strip after another.
__device__ Position position(int64_t block, int64_t rows, int64_t cols, int side) {
  const int64_t tile_cols = (cols + side - 1) / side, tile_rows = (rows + side - 1) / side;
  const int64_t matrix = block / (tile_cols * tile_rows);
  const int64_t tile = block - matrix * (tile_cols * tile_rows);
  const int64_t strip = tile / (STRIP * tile_rows), in_strip = tile - strip * STRIP * tile_rows;
  const int64_t left = tile_cols - strip * STRIP, width = left < STRIP ? left : STRIP;
  const int64_t row = in_strip / width, col = strip * STRIP + in_strip - row * width;
  return {row * side, col * side, matrix * rows * cols};
}

template <typename T>
struct Tile {
  static constexpr int N = 16 / sizeof(T);  // elements of a pack of 16 bytes
  static constexpr int SIDE = sizeof(T) == 1 ? 128 : 256 / sizeof(T);  // rows and columns
  static constexpr int PACKS = SIDE / N;                               // of a row of the tile
  static constexpr int THREADS = PACKS * PACKS;
};

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// Thread t loads N packs, then has the N×N elements where row of packs t % PACKS meets column of
// packs t / PACKS: it turns them round in registers and writes N packs.
template <typename T>
__global__ void __launch_bounds__(Tile<T>::THREADS)
    transpose_packs(const T* in, T* out, int64_t rows, int64_t cols) {
  constexpr int N = Tile<T>::N, SIDE = Tile<T>::SIDE, PACKS = Tile<T>::PACKS;
  using P = Pack<T, N>;
  __shared__ P tile[SIDE * PACKS];
  const Position at = position(blockIdx.x, rows, cols, SIDE);
  const int64_t r0 = at.row, c0 = at.col, matrix = at.matrix;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int i = k * Tile<T>::THREADS + threadIdx.x, r = i / PACKS, p = i % PACKS;
    if (r0 + r < rows && c0 + p * N < cols) {
      tile[r * PACKS + (p ^ (r / N))] =
          *reinterpret_cast<const P*>(in + matrix + (r0 + r) * cols + c0 + p * N);
    }
  }
  __syncthreads();
  const int q = threadIdx.x % PACKS, p = threadIdx.x / PACKS;
  const int64_t r = r0 + q * N, c = c0 + p * N;
  if (r >= rows || c >= cols) return;
  P block[N];
#pragma unroll
  for (int k = 0; k < N; ++k) block[k] = tile[(q * N + k) * PACKS + (p ^ q)];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    P turned;
#pragma unroll
    for (int k = 0; k < N; ++k) turned.at[k] = block[k].at[j];
    *reinterpret_cast<P*>(out + matrix + (c + j) * rows + r) = turned;
  }
}

// For what does not fit packs: rung 4 with larger tiles.
constexpr int SIDE = 64, STEP = 8;

template <typename T>
__global__ void transpose_elements(const T* in, T* out, int64_t rows, int64_t cols) {
  constexpr int PADDING = sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // an odd number of 4-byte words a row
  __shared__ T tile[SIDE][SIDE + PADDING];
  const Position at = position(blockIdx.x, rows, cols, SIDE);
  const int x = threadIdx.x;
#pragma unroll
  for (int y = threadIdx.y; y < SIDE; y += STEP) {
    if (at.row + y < rows && at.col + x < cols) {
      tile[y][x] = in[at.matrix + (at.row + y) * cols + at.col + x];
    }
  }
  __syncthreads();
#pragma unroll
  for (int y = threadIdx.y; y < SIDE; y += STEP) {
    if (at.col + y < cols && at.row + x < rows) {
      out[at.matrix + (at.col + y) * rows + at.row + x] = tile[x][y];
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
