// 8_any_row.cu: every row length and every alignment
// Before : the rungs with packs want rows that begin on 16-byte boundaries
// Idea   : a row is a head of single values, packs of 16 bytes on boundaries of x, and a tail. Weight
//          and bias lie differently: a pack of theirs is cut out of the two that it touches.
//          Welford's rule, pack by pack: a division for 4 or 8 values, and no limit to the length
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4), and a second read that finds the row in
//          L1 or L2, or if it is too long for that, in memory
// Legal  : everything
// Result : not measured yet
// Try    : read weight and bias value by value, with load(…, false); predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int PACKS = 4;  // of a row, a thread, while the block is large enough

template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

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

template <typename T>
__device__ T add(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
}

template <typename T, typename W>
__device__ Pack<T> normalize(Pack<T> pack, W mean, W rstd, Pack<T> weight, Pack<T> bias) {
  W value[N<T>], w[N<T>], b[N<T>];
  widen(pack, value);
  widen(weight, w);
  widen(bias, b);
  for (int k = 0; k < N<T>; ++k) value[k] = (value[k] - mean) * rstd * w[k] + b[k];
  for (int k = 0; k < N<T>; ++k) pack.at[k] = static_cast<T>(value[k]);
  return pack;
}

template <typename W>
struct Part {         // of a row
  W count, mean, m2;  // m2 = Σ (x − mean)²
};

template <typename T, typename W>
__device__ Part<W> join(Part<W> part, Pack<T> pack) {
  W value[N<T>], mean = 0, m2 = 0;
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) mean += value[k] / N<T>;
  for (int k = 0; k < N<T>; ++k) m2 += (value[k] - mean) * (value[k] - mean);
  const W count = part.count + N<T>, distance = mean - part.mean, share = N<T> / count;
  return {count, part.mean + distance * share,
          part.m2 + m2 + distance * distance * part.count * share};
}

template <typename W>
__device__ W sum_lanes(W value, int lanes) {  // of neighbours, a power of two
  for (int d = lanes / 2; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

// The mean first, then the distances from it. Joining two by two would divide in every step.
template <typename W>
__device__ Part<W> join_lanes(Part<W> part, int lanes) {
  const W count = sum_lanes(part.count, lanes), sum = sum_lanes(part.count * part.mean, lanes);
  const W mean = count > 0 ? sum / count : 0, distance = part.mean - mean;
  return {count, mean, sum_lanes(part.m2 + part.count * distance * distance, lanes)};
}

// A block is blockDim.x threads along a row, times blockDim.y rows.
template <typename T, typename W>
__global__ void __launch_bounds__(MAX_BLOCK)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int64_t rows, int64_t cols, W eps) {
  const int t = threadIdx.x, threads = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, first = row * cols;
  const int64_t length = row < rows ? cols : 0;  // past the end: join, do no more
  const int64_t before = (16 - reinterpret_cast<uintptr_t>(x + first) % 16) % 16 / sizeof(T);
  const int64_t head = min(length, before), packs = (length - head) / N<T>, body = first + head;
  const int64_t singles = length - packs * N<T>, single = t < head ? t : packs * N<T> + t;

  Part<W> part = {0, 0, 0};
  T rest = static_cast<T>(0.f);
  if (t < singles) {
    rest = x[first + single];
    if (residual != nullptr) sum[first + single] = rest = add(rest, residual[first + single]);
    part = {1, static_cast<W>(rest), 0};
  }
#pragma unroll PACKS
  for (int64_t i = body + t * N<T>; i < body + packs * N<T>; i += threads * N<T>) {
    Pack<T> pack = load(x + i, true);
    if (residual != nullptr) {
      const Pack<T> more = cut_out(residual + i, residual, residual + rows * cols);
      for (int k = 0; k < N<T>; ++k) pack.at[k] = add(pack.at[k], more.at[k]);
      store(sum + i, pack, on16(sum + i));
    }
    part = join(part, pack);
  }
  part = join_lanes(part, min(threads, 32));
  if (threads > 32) {
    __shared__ Part<W> found[MAX_BLOCK / 32];
    if (t % 32 == 0) found[t / 32] = part;
    __syncthreads();
    part = join_lanes(t % 32 < threads / 32 ? found[t % 32] : Part<W>{0, 0, 0}, 32);
  }
  const W rstd = rsqrt(part.m2 / cols + eps);

  if (residual != nullptr) x = sum;  // each thread reads what it wrote itself
#pragma unroll PACKS
  for (int64_t i = t * N<T>; i < packs * N<T>; i += threads * N<T>) {
    const Pack<T> w = cut_out(weight + head + i, weight, weight + cols);
    const Pack<T> b = cut_out(bias + head + i, bias, bias + cols);
    const Pack<T> pack = load(x + body + i, on16(x + body));
    store(out + body + i, normalize(pack, part.mean, rstd, w, b), on16(out + body));
  }
  if (t < singles) {
    const W normal = (static_cast<W>(rest) - part.mean) * rstd;
    out[first + single] =
        static_cast<T>(normal * static_cast<W>(weight[single]) + static_cast<W>(bias[single]));
  }
  if (t == 0 && row < rows) {  // the gradient needs both
    mean_out[row] = part.mean;
    rstd_out[row] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  int threads = 2 * N<T>;  // a row: enough for the singles of head and tail
  while (threads < MAX_BLOCK && threads * PACKS * N<T> < cols) threads *= 2;
  const dim3 block(threads, threads > 32 ? 1 : 256 / threads);
  const int64_t grid = (rows + block.y - 1) / block.y;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  layer_norm_kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(
      x, residual, weight, bias, sum, out, mean, rstd, rows, cols, static_cast<W>(eps));
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T, W)                                                                \
  extern "C" cudaError_t layer_norm_launch_##SUFFIX(                                          \
      const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out, W* mean, \
      W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {                 \
    return launch(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);  \
  }
LAUNCHER(f32, float, float)
LAUNCHER(f64, double, double)
LAUNCHER(f16, __half, float)
LAUNCHER(bf16, __nv_bfloat16, float)
