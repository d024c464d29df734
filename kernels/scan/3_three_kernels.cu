// 3_three_kernels.cu: many blocks a row
// Before : rungs 1 and 2 give a row one block: one long row keeps one SM busy, of 132
// Idea   : kernel 1 sums each tile, kernel 2 scans the sums, kernel 3 scans each tile, from
//          the sum of all tiles before it
// Cost   : moves 3·n·sizeof(T) bytes, as kernels 1 and 3 both read x; 2·n are needed   Legal: any
// Result : 0.54 of copy, 893.57x rung 1, 0.89x eager  (H200, float32 (268435456,), CUDA 13.0)
// Try    : 100 rows of 2^20; what would rung 2 need there?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifndef BLOCK
#define BLOCK 256
#endif
#ifndef PACKS
#define PACKS 4
#endif

template <typename T>
struct Accumulator {
  using type = float;  // 16-bit types are stored, never added up in
};
template <>
struct Accumulator<double> {
  using type = double;
};

// What a block scans at a time. A warp has PACKS strips of 32 packs of 16 bytes, one after another
// in memory; a lane has one pack of each.
template <typename T>
struct Tile {
  static constexpr int N = 16 / sizeof(T);
  static constexpr int STRIP = 32 * N;
  static constexpr int SIZE = BLOCK * PACKS * N;
  typename Accumulator<T>::type at[PACKS][N];
};

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// The first element of this lane, counted from the start of the tile.
template <typename T>
__device__ int first_element() {
  return threadIdx.x / 32 * (PACKS * Tile<T>::STRIP) + threadIdx.x % 32 * Tile<T>::N;
}

// Elements begin … begin + SIZE - 1 of a row; what lies outside 0 … n-1 is 0. x + begin is aligned
// to 16 bytes, so that all packs are, also in rows that are not.
template <typename T>
__device__ void load(Tile<T>& tile, const T* x, int64_t begin, int64_t n) {
  constexpr int N = Tile<T>::N;
  using P = Pack<T, N>;
  const int64_t first = begin + first_element<T>();
  P p[PACKS];
  if (begin >= 0 && begin + Tile<T>::SIZE <= n) {
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
      p[j] = *reinterpret_cast<const P*>(x + first + j * Tile<T>::STRIP);
  } else {  // the first and the last tile of a row
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int64_t i = first + j * Tile<T>::STRIP + k;
        p[j].at[k] = i >= 0 && i < n ? x[i] : static_cast<T>(0.0f);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      tile.at[j][k] = static_cast<typename Accumulator<T>::type>(p[j].at[k]);
    }
  }
}

template <typename T, typename A>
__device__ void store(const Tile<T>& tile, A before, T* out, int64_t begin, int64_t n) {
  constexpr int N = Tile<T>::N;
  using P = Pack<T, N>;
  const int64_t first = begin + first_element<T>();
  const bool aligned = reinterpret_cast<uintptr_t>(out + begin) % 16 == 0;
  const bool packs = aligned && begin >= 0 && begin + Tile<T>::SIZE <= n;
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
    const int64_t i = first + j * Tile<T>::STRIP;
    P p;
#pragma unroll
    for (int k = 0; k < N; ++k) p.at[k] = static_cast<T>(before + tile.at[j][k]);
    if (packs) {
      *reinterpret_cast<P*>(out + i) = p;
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (i + k >= 0 && i + k < n) out[i + k] = p.at[k];
      }
    }
  }
}

// Replaces each element by the sum of the tile up to it. Returns the tile's sum, to all threads.
template <typename T, typename A = typename Accumulator<T>::type>
__device__ A scan_tile(Tile<T>& tile) {
  constexpr int N = Tile<T>::N;
  __shared__ A warps[BLOCK / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  A before = 0;  // the sum of the strips so far
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
#pragma unroll
    for (int k = 1; k < N; ++k) tile.at[j][k] += tile.at[j][k - 1];
    A sum = tile.at[j][N - 1];  // becomes the sum of this lane's packs and those of lower lanes
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const A left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    A left = __shfl_up_sync(0xffffffff, sum, 1);
    if (lane == 0) left = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) tile.at[j][k] += before + left;
    before += __shfl_sync(0xffffffff, sum, 31);
  }
  __syncthreads();  // warps is free again, if this is called in a loop
  if (lane == 0) warps[warp] = before;
  __syncthreads();
  A total = 0, left = 0;
#pragma unroll
  for (int w = 0; w < BLOCK / 32; ++w) {
    if (w == warp) left = total;
    total += warps[w];
  }
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) tile.at[j][k] += left;
  }
  return total;
}

// Elements by which the row starts after a multiple of 16 bytes: its first tile begins there.
template <typename T>
__device__ int64_t misalignment(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
}

// Tile t of row r has its sum at sums[r · tiles + t].
template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK) sum_tiles(const T* x, A* sums, int64_t tiles, int64_t n) {
  const int64_t row = blockIdx.x / tiles, t = blockIdx.x - row * tiles;
  x += row * n;
  Tile<T> tile;
  load(tile, x, t * Tile<T>::SIZE - misalignment(x), n);
  const A total = scan_tile(tile);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// One block a row: the sums become those of all tiles before.
template <typename A>
__global__ void __launch_bounds__(BLOCK) scan_sums(A* sums, int64_t tiles) {
  __shared__ A warps[BLOCK / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  sums += blockIdx.x * tiles;
  A carry = 0;
  for (int64_t begin = 0; begin < tiles; begin += BLOCK) {
    const int64_t i = begin + threadIdx.x;
    const A own = i < tiles ? sums[i] : A(0);
    A sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const A left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    A left = carry;
    for (int w = 0; w < BLOCK / 32; ++w) {
      if (w < warp) left += warps[w];
      carry += warps[w];
    }
    if (i < tiles) sums[i] = left + sum - own;
  }
}

template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK)
    scan_tiles(const T* x, T* out, const A* sums, int64_t tiles, int64_t n) {
  const int64_t row = blockIdx.x / tiles, t = blockIdx.x - row * tiles;
  x += row * n;
  const int64_t begin = t * Tile<T>::SIZE - misalignment(x);
  Tile<T> tile;
  load(tile, x, begin, n);
  scan_tile(tile);
  store(tile, sums[blockIdx.x], out + row * n, begin, n);
}

// Tiles of a row, wherever it starts.
template <typename T>
int64_t tiles_of(int64_t n) {
  return (n + Tile<T>::N - 1 + Tile<T>::SIZE - 1) / Tile<T>::SIZE;
}

// Bytes of workspace: a sum for each tile. Tiles of float64 are the smallest, and most.
extern "C" int64_t scan_workspace(int64_t rows, int64_t n) {
  return rows * tiles_of<double>(n) * sizeof(double);
}

template <typename T>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t rows, int64_t n,
                   cudaStream_t stream) {
  const int64_t tiles = tiles_of<T>(n);
  if (rows * tiles > INT32_MAX) return cudaErrorNotSupported;
  const auto grid = static_cast<unsigned>(rows * tiles);
  auto* sums = static_cast<typename Accumulator<T>::type*>(workspace);
  sum_tiles<<<grid, BLOCK, 0, stream>>>(x, sums, tiles, n);
  scan_sums<<<static_cast<unsigned>(rows), BLOCK, 0, stream>>>(sums, tiles);
  scan_tiles<<<grid, BLOCK, 0, stream>>>(x, out, sums, tiles, n);
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T)                                                                      \
  extern "C" cudaError_t scan_launch_##SUFFIX(const T* x, T* out, void* workspace, int64_t rows, \
                                              int64_t n, cudaStream_t stream) {                  \
    return launch(x, out, workspace, rows, n, stream);                                           \
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
