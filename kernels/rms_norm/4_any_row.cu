// 4_any_row.cu: every row length and every alignment
// Before : rungs 2 and 3 want rows that begin on 16-byte boundaries, and give a short one a whole warp
// Idea   : a row is a head of single values, packs of 16 bytes on boundaries of x, and a tail. Weight
//          lies differently: a pack of its is cut out of the two that it touches. A short row has a
//          few lanes, and a long one is walked
// Cost   : 2·rows·cols·sizeof(T) bytes, and a second read that finds the row in L1 or L2, or if it is
//          too long for that, in memory
// Legal  : everything
// Result : not measured yet
// Try    : read weight value by value, with load(…, false); predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int PACKS = 4;  // of a row, a thread, while the block is large enough

template <typename T>
constexpr int N = 16 / sizeof(T);

template <typename T>
struct alignas(16) Pack {
  T at[N<T>];
};

// The 16 bits of a bfloat16 are the high half of a float: one shift or mask a value, where the cast
// takes two instructions.
template <typename T, typename W>
__device__ void widen(Pack<T> pack, W (&value)[N<T>]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    unsigned bits[4];
    memcpy(bits, &pack, 16);
    for (int k = 0; k < 8; ++k) {
      value[k] = __uint_as_float(k % 2 == 0 ? bits[k / 2] << 16 : bits[k / 2] & 0xffff0000u);
    }
  } else {
    for (int k = 0; k < N<T>; ++k) value[k] = static_cast<W>(pack.at[k]);
  }
}

template <typename T>
__device__ Pack<T> load(const T* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Pack<T>*>(from);
  Pack<T> pack;
  for (int k = 0; k < N<T>; ++k) pack.at[k] = from[k];
  return pack;
}

template <typename T>
__device__ void store(T* to, Pack<T> pack, bool aligned) {
  if (aligned) *reinterpret_cast<Pack<T>*>(to) = pack;
  for (int k = 0; k < N<T> && !aligned; ++k) to[k] = pack.at[k];
}

__device__ bool on16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// The 16 bytes at `from`, out of the two aligned packs that they touch: 32 bytes are shifted by 8, by
// 4 and by 2. Value by value where one of the two would reach out of [first, end).
template <typename T>
__device__ Pack<T> cut_out(const T* from, const T* first, const T* end) {
  const unsigned skew = reinterpret_cast<uintptr_t>(from) % 16;
  const T* low = from - skew / sizeof(T);
  if (skew == 0 || low < first || low + 2 * N<T> > end) return load(from, skew == 0);
  const uint4* both = reinterpret_cast<const uint4*>(low);
  const uint4 a = both[0], b = both[1];
  unsigned words[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  for (int k = 0; k < 6 && skew & 8; ++k) words[k] = words[k + 2];
  for (int k = 0; k < 5 && skew & 4; ++k) words[k] = words[k + 1];
  for (int k = 0; k < 4 && sizeof(T) == 2; ++k) {
    words[k] = __funnelshift_r(words[k], words[k + 1], skew % 4 * 8);
  }
  Pack<T> pack;
  memcpy(&pack, words, 16);
  return pack;
}

template <typename T, typename W>
__device__ void add_up_squares(Pack<T> pack, W& sum) {
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += value[k] * value[k];
}

template <typename T, typename W>
__device__ Pack<T> normalize(Pack<T> pack, W rstd, Pack<T> weight) {
  W value[N<T>], w[N<T>];
  widen(pack, value);
  widen(weight, w);
  for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k] * rstd * w[k]);
  return pack;
}

template <typename W>
__device__ W sum_lanes(W value, int lanes) {  // of neighbours, a power of two
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// A block is blockDim.x threads along a row, times blockDim.y rows.
template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    rms_norm_kernel(const T* x, const T* weight, T* out, W* rstd_out, int64_t rows, int64_t cols,
                    W eps) {
  const int t = threadIdx.x, threads = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, first = row * cols;
  const int64_t length = row < rows ? cols : 0;  // past the end: join, do no more
  const int64_t before = (16 - reinterpret_cast<uintptr_t>(x + first) % 16) % 16 / sizeof(T);
  const int64_t head = min(length, before), packs = (length - head) / N<T>, body = first + head;
  const int64_t singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;

  const W rest = t < singles ? static_cast<W>(x[first + single]) : 0;
  W sum = rest * rest;
#pragma unroll PACKS
  for (int64_t i = body + t * N<T>; i < body + packs * N<T>; i += threads * N<T>) {
    add_up_squares(load(x + i, true), sum);
  }
  sum = sum_lanes(sum, min(threads, 32));
  if (threads > 32) {
    __shared__ W found[MAX_BLOCK / 32];
    if (t % 32 == 0) found[t / 32] = sum;
    __syncthreads();
    sum = sum_lanes(t % 32 < threads / 32 ? found[t % 32] : 0, 32);
  }
  const W rstd = rsqrt(sum / cols + eps);

#pragma unroll PACKS
  for (int64_t i = t * N<T>; i < packs * N<T>; i += threads * N<T>) {
    const Pack<T> w = cut_out(weight + head + i, weight, weight + cols);
    store(out + body + i, normalize(load(x + body + i, true), rstd, w), on16(out + body));
  }
  if (t < singles) {
    out[first + single] = static_cast<T>(rest * rstd * static_cast<W>(weight[single]));
  }
  if (t == 0 && row < rows) rstd_out[row] = rstd;  // the gradient needs it
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* weight, T* out, W* rstd, int64_t rows, int64_t cols,
                   double eps, cudaStream_t stream) {
  int threads = 2 * N<T>;  // a row: enough for the singles of head and tail
  while (threads < MAX_BLOCK && threads * PACKS * N<T> < cols) threads *= 2;
  const dim3 block(threads, threads > 32 ? 1 : 256 / threads);
  const int64_t grid = (rows + block.y - 1) / block.y;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  rms_norm_kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(x, weight, out, rstd, rows,
                                                                     cols, static_cast<W>(eps));
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                  \
  extern "C" cudaError_t rms_norm_launch_##SUFFIX(const T* x, const T* weight, T* out, W* rstd, \
                                                  int64_t rows, int64_t cols, double eps,       \
                                                  cudaStream_t stream) {                        \
    return launch(x, weight, out, rstd, rows, cols, eps, stream);                               \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
