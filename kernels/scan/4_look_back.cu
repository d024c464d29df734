// 4_look_back.cu: one pass
// Before : rung 3 reads x twice, because a tile has to know the sum of all tiles before it
// Idea   : a block scans its tile and publishes the sum at once; then one warp looks back over the
//          predecessors' sums until one has published the sum of all before it as well (Merrill and
//          Garland, 2016); nobody waits for a whole kernel
// Cost   : 2·n·sizeof(T) bytes moved, so bound by memory          Legal: rows · tiles < 2^31
// Result : 0.71 of copy, 1173.93x rung 1, 1.17x eager  (H200, float32 (268435456,), CUDA 13.0)
// Try    : MOST_PACKS 16 → 8, twice as many tiles to look back at; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#ifndef BLOCK
#define BLOCK 128
#endif
#ifndef MOST_PACKS
#define MOST_PACKS 16
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
template <typename T, int PACKS>
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
template <typename T, int PACKS>
__device__ int first_element() {
  return threadIdx.x / 32 * (PACKS * Tile<T, PACKS>::STRIP) + threadIdx.x % 32 * Tile<T, PACKS>::N;
}

// Elements begin … begin + SIZE - 1 of a row; what lies outside 0 … n-1 is 0. x + begin is aligned
// to 16 bytes, so that all packs are, also in rows that are not.
template <typename T, int PACKS>
__device__ void load(Tile<T, PACKS>& tile, const T* x, int64_t begin, int64_t n) {
  constexpr int N = Tile<T, PACKS>::N;
  using P = Pack<T, N>;
  const int64_t first = begin + first_element<T, PACKS>();
  P p[PACKS];
  if (begin >= 0 && begin + Tile<T, PACKS>::SIZE <= n) {
#pragma unroll
    for (int j = 0; j < PACKS; ++j)
      p[j] = *reinterpret_cast<const P*>(x + first + j * Tile<T, PACKS>::STRIP);
  } else {  // the first and the last tile of a row
#pragma unroll
    for (int j = 0; j < PACKS; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int64_t i = first + j * Tile<T, PACKS>::STRIP + k;
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

template <typename T, int PACKS, typename A>
__device__ void store(const Tile<T, PACKS>& tile, A before, T* out, int64_t begin, int64_t n) {
  constexpr int N = Tile<T, PACKS>::N;
  using P = Pack<T, N>;
  const int64_t first = begin + first_element<T, PACKS>();
  const bool aligned = reinterpret_cast<uintptr_t>(out + begin) % 16 == 0;
  const bool packs = aligned && begin >= 0 && begin + Tile<T, PACKS>::SIZE <= n;
#pragma unroll
  for (int j = 0; j < PACKS; ++j) {
    const int64_t i = first + j * Tile<T, PACKS>::STRIP;
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
template <typename T, int PACKS, typename A = typename Accumulator<T>::type>
__device__ A scan_tile(Tile<T, PACKS>& tile) {
  constexpr int N = Tile<T, PACKS>::N;
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

// How far a tile is. A float and its flag share one word of 8 bytes, so that they become visible
// together. A double takes two such words, half of it in each: they belong together if their flags
// agree. So nobody needs a fence, or a second trip to memory for the value.
enum Flag : unsigned { NOTHING = 0, SUM = 1, PREFIX = 2 };  // of the tile; of all tiles up to it

template <typename A>
struct Progress;
template <>
struct Progress<float> {
  unsigned long long word;
  __device__ void publish(Flag flag, float value) {
    const unsigned long long bits = __float_as_uint(value);
    *static_cast<volatile unsigned long long*>(&word) = (bits << 32) | flag;
  }
  __device__ unsigned read(float& value) const {
    const unsigned long long seen = *static_cast<const volatile unsigned long long*>(&word);
    value = __uint_as_float(static_cast<unsigned>(seen >> 32));
    return static_cast<unsigned>(seen);
  }
};
template <>
struct alignas(16) Progress<double> {
  unsigned long long words[2];
  __device__ void publish(Flag flag, double value) {
    const auto bits = static_cast<unsigned long long>(__double_as_longlong(value));
    static_cast<volatile unsigned long long*>(words)[0] = (bits << 32) | flag;
    static_cast<volatile unsigned long long*>(words)[1] = (bits & ~0xffffffffull) | flag;
  }
  __device__ unsigned read(double& value) const {
    const auto* seen = static_cast<const volatile unsigned long long*>(words);
    const unsigned long long low = seen[0], high = seen[1];
    value = __longlong_as_double(static_cast<long long>((high & ~0xffffffffull) | (low >> 32)));
    const unsigned flag = static_cast<unsigned>(low);
    return flag == static_cast<unsigned>(high) ? flag : NOTHING;
  }
};

// The sum of all tiles before `t` of this row, found by one warp. progress[0] is the row's first.
template <typename A>
__device__ A look_back(const Progress<A>* progress, int64_t t) {
  const int lane = threadIdx.x % 32;
  A before = 0;
  for (int64_t last = t - 1; last >= 0; last -= 32) {
    A value = 0;
    unsigned prefixes, waiting;
    do {  // lane i looks at tile last - i; before the first tile there is nothing to add
      const unsigned flag = lane <= last ? progress[last - lane].read(value) : PREFIX;
      prefixes = __ballot_sync(0xffffffff, flag == PREFIX);
      waiting = __ballot_sync(0xffffffff, flag == NOTHING);
      if (prefixes) waiting &= prefixes ^ (prefixes - 1);  // only up to the first prefix
    } while (waiting);
    if (prefixes && lane > __ffs(prefixes) - 1) value = 0;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    before += value;
    if (prefixes) break;
  }
  return before;
}

template <typename T, int PACKS, typename A>
__global__ void __launch_bounds__(BLOCK)
    scan_kernel(const T* x, T* out, unsigned* ticket, Progress<A>* progress, int64_t tiles,
                int64_t n) {
  __shared__ unsigned number;
  __shared__ A shared_before;
  // Tiles are taken in the order in which blocks start: all that a tile waits for are running.
  if (threadIdx.x == 0) number = tiles == 1 ? blockIdx.x : atomicAdd(ticket, 1);
  __syncthreads();
  const int64_t row = number / static_cast<unsigned>(tiles), t = number - row * tiles;
  x += row * n;
  const int64_t begin = t * Tile<T, PACKS>::SIZE - misalignment(x);
  Tile<T, PACKS> tile;
  load(tile, x, begin, n);
  const A total = scan_tile(tile);
  A before = 0;
  if (tiles > 1) {
    progress += row * tiles;
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) progress[t].publish(t == 0 ? PREFIX : SUM, total);
      before = look_back(progress, t);
      if (threadIdx.x == 0) {
        if (t > 0) progress[t].publish(PREFIX, before + total);
        shared_before = before;
      }
    }
    __syncthreads();
    before = shared_before;
  }
  store(tile, before, out + row * n, begin, n);
}

// Tiles of a row that starts up to `shift` elements after a multiple of 16 bytes.
int64_t tiles_of(int64_t n, int64_t shift, int64_t size) { return (n + shift + size - 1) / size; }

// Bytes of workspace: the ticket, then what each tile publishes. float64 wants the most.
extern "C" int64_t scan_workspace(int64_t rows, int64_t n) {
  return 16 + rows * tiles_of(n, 1, Tile<double, MOST_PACKS>::SIZE) * sizeof(Progress<double>);
}

template <typename T, int PACKS>
cudaError_t launch_tiles(const T* x, T* out, void* workspace, int64_t rows, int64_t tiles,
                         int64_t n, cudaStream_t stream) {
  using A = typename Accumulator<T>::type;
  if (rows * tiles > INT32_MAX) return cudaErrorInvalidValue;
  if (tiles > 1) {
    const size_t bytes = 16 + rows * tiles * sizeof(Progress<A>);
    const cudaError_t error = cudaMemsetAsync(workspace, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  auto* progress = reinterpret_cast<Progress<A>*>(static_cast<char*>(workspace) + 16);
  scan_kernel<T, PACKS><<<static_cast<unsigned>(rows * tiles), BLOCK, 0, stream>>>(
      x, out, static_cast<unsigned*>(workspace), progress, tiles, n);
  return cudaGetLastError();
}

// The smallest tile that holds a row, else the largest.
template <typename T, int PACKS = 1>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t rows, int64_t n,
                   cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const int64_t shift =
      n % N == 0 || rows == 1 ? reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T) : N - 1;
  const int64_t tiles = tiles_of(n, shift, Tile<T, PACKS>::SIZE);
  if constexpr (PACKS < MOST_PACKS) {
    if (tiles > 1) return launch<T, 2 * PACKS>(x, out, workspace, rows, n, stream);
  }
  return launch_tiles<T, PACKS>(x, out, workspace, rows, tiles, n, stream);
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
