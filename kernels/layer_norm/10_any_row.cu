// 10_any_row.cu: every row length and every alignment
// Before : the rungs with packs want rows that begin on 16-byte boundaries
// Idea   : a row is a head of single values, packs of 16 bytes on boundaries of x, and a tail.
//          Several rows a warp, a warp a row or a block a row, by the length
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4); rows over 16384 values (float64: 8192)
//          are read twice
// Legal  : everything
// Result : 0.95 of copy, 1.12x rung 1, 1.32x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : SHORT 8 → 32 for rows of 256 values; predict first

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int SHORT = 8, LONG = 32;  // registers that hold values of the row, a thread

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

// Reads past L1, which is left to weight and bias: all rows need those.
template <typename T>
__device__ Pack<T> load_once(const T* from) {
  const int4 bits = __ldcg(reinterpret_cast<const int4*>(from));
  Pack<T> pack;
  memcpy(&pack, &bits, 16);
  return pack;
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

template <typename T>
__device__ T add(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
}

template <typename T, typename W>
__device__ void add_up(Pack<T> pack, W& sum) {
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += value[k];
}

template <typename T, typename W>
__device__ void add_up_squares(Pack<T> pack, W mean, W& sum) {  // of distances from the mean
  W value[N<T>];
  widen(pack, value);
  for (int k = 0; k < N<T>; ++k) sum += (value[k] - mean) * (value[k] - mean);
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

// Sums over `width` neighbouring lanes, a power of two.
template <typename W>
__device__ W sum_lanes(W value, int width) {
  for (int d = 16; d > 0; d /= 2) {
    if (d < width) value += __shfl_xor_sync(~0u, value, d);
  }
  return value;
}

// Joins the parts of 32 lanes: the mean first, then the distances from it. Joining two by two would
// divide in every step.
template <typename W>
__device__ Part<W> join_lanes(Part<W> part) {
  const W count = sum_lanes(part.count, 32), mean = sum_lanes(part.count * part.mean, 32) / count;
  const W distance = part.count > 0 ? part.mean - mean : 0;
  return {count, mean, sum_lanes(part.m2 + part.count * distance * distance, 32)};
}

// And those of a block's warps.
template <typename W>
__device__ Part<W> join_warps(Part<W> part, Part<W>* found) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warps <= 1) return part;
  if (lane == 0) found[threadIdx.x / 32] = part;
  __syncthreads();
  return join_lanes(lane < warps ? found[lane] : Part<W>{0, 0, 0});
}

// A block is blockDim.x threads along a row, times blockDim.y rows.
template <typename T, typename W, int VALUES>
__global__ void __launch_bounds__(MAX_BLOCK, 2)
    keep_row(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
             W* mean_out, W* rstd_out, int64_t rows, int cols, W eps) {
  constexpr int PACKS = VALUES / N<T>;
  __shared__ Part<W> found[MAX_BLOCK / 32];
  const int t = threadIdx.x, threads = blockDim.x;
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, first = row * cols;
  const int length = row < rows ? cols : 0;  // past the end: join, do no more
  // The row is: head · packs on 16-byte boundaries of x · tail. A thread keeps one of the singles.
  const int before = (16 - reinterpret_cast<uintptr_t>(x + first) % 16) % 16 / sizeof(T);
  const int head = min(length, before), packs = (length - head) / N<T>;
  const int singles = length - packs * N<T>;
  const int single = t < head ? t : packs * N<T> + t;
  const int64_t body = first + head;

  Pack<T> pack[PACKS];  // indexed by constants only, or it would not be kept in registers
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) pack[p] = load_once(x + body + i * N<T>);
  }
  T rest = t < singles ? x[first + single] : static_cast<T>(0.f);
  if (residual != nullptr) {
    const bool alike = on16(residual + body) && on16(sum + body);
    for (int p = 0; p < PACKS; ++p) {
      const int i = p * threads + t;
      if (i < packs) {
        W a[N<T>], b[N<T>];
        widen(pack[p], a);
        widen(load(residual + body + i * N<T>, alike), b);
        for (int k = 0; k < N<T>; ++k) pack[p].at[k] = static_cast<T>(a[k] + b[k]);
        store(sum + body + i * N<T>, pack[p], alike);
      }
    }
    if (t < singles) sum[first + single] = rest = add(rest, residual[first + single]);
  }

  W count = cols;  // of the lanes that share a row in this warp
  if (threads > 32) {
    int mine = t < singles;
    for (int p = 0; p < PACKS; ++p) mine += p * threads + t < packs ? N<T> : 0;
    count = sum_lanes(static_cast<W>(mine), 32);
  }
  W total = static_cast<W>(rest);
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t < packs) add_up(pack[p], total);
  }
  // Distances from the mean of the warp: no barrier before them, and no cancellation.
  const int width = min(threads, 32);
  Part<W> part = {count, count > 0 ? sum_lanes(total, width) / count : 0, 0};
  for (int p = 0; p < PACKS; ++p) {
    if (p * threads + t < packs) add_up_squares(pack[p], part.mean, part.m2);
  }
  const W distance = static_cast<W>(rest) - part.mean;
  if (t < singles) part.m2 += distance * distance;
  part.m2 = sum_lanes(part.m2, width);
  part = join_warps(part, found);
  const W mean = part.mean, rstd = rsqrt(part.m2 / cols + eps);

  const bool alike = on16(weight + head) && on16(bias + head);
  for (int p = 0; p < PACKS; ++p) {
    const int i = p * threads + t;
    if (i < packs) {
      const Pack<T> w = load(weight + head + i * N<T>, alike);
      const Pack<T> b = load(bias + head + i * N<T>, alike);
      store(out + body + i * N<T>, normalize(pack[p], mean, rstd, w, b), on16(out + body));
    }
  }
  if (t < singles) {
    const W normal = (static_cast<W>(rest) - mean) * rstd;
    out[first + single] =
        static_cast<T>(normal * static_cast<W>(weight[single]) + static_cast<W>(bias[single]));
  }
  if (t == 0 && length > 0) {  // the gradient needs both
    mean_out[row] = mean;
    rstd_out[row] = rstd;
  }
}

// For rows that no block can keep: rung 2.
template <typename T, typename W>
__global__ void __launch_bounds__(1024)
    read_twice(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
               W* mean_out, W* rstd_out, int64_t cols, W eps) {
  const int64_t first = int64_t{blockIdx.x} * cols;
  Part<W> part = {0, 0, 0};
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    T value = x[first + c];
    if (residual != nullptr) sum[first + c] = value = add(value, residual[first + c]);
    const W distance = static_cast<W>(value) - part.mean;
    part.count += 1;
    part.mean += distance / part.count;
    part.m2 += distance * (static_cast<W>(value) - part.mean);
  }
  __shared__ Part<W> found[32];
  part = join_warps(join_lanes(part), found);
  const W rstd = rsqrt(part.m2 / cols + eps);
  if (residual != nullptr) x = sum;  // each thread reads what it wrote itself
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    const W normal = (static_cast<W>(x[first + c]) - part.mean) * rstd;
    out[first + c] = static_cast<T>(normal * static_cast<W>(weight[c]) + static_cast<W>(bias[c]));
  }
  if (threadIdx.x == 0) {
    mean_out[blockIdx.x] = part.mean;
    rstd_out[blockIdx.x] = rstd;
  }
}

template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double epsilon,
                   cudaStream_t stream) {
  constexpr int SHORT_VALUES = SHORT * 4 / sizeof(W), VALUES = LONG * 4 / sizeof(W);
  const W eps = static_cast<W>(epsilon);
  if (cols > MAX_BLOCK * VALUES) {
    if (rows > INT32_MAX) return cudaErrorInvalidValue;
    read_twice<<<static_cast<unsigned>(rows), 1024, 0, stream>>>(x, residual, weight, bias, sum,
                                                                 out, mean, rstd, cols, eps);
    return cudaGetLastError();
  }
  // A few lanes a row and several rows a block, or several warps a row. Enough lanes for the
  // singles of head and tail.
  const bool is_short = cols <= 32 * SHORT_VALUES;
  int threads = 2 * N<T>;
  while (threads < 32 && threads * SHORT_VALUES < cols) threads *= 2;
  if (cols > 32 * VALUES) threads = static_cast<int>((cols + 32 * VALUES - 1) / (32 * VALUES) * 32);
  const dim3 block(threads, threads > 32 ? 1 : 256 / threads);
  const int64_t grid = (rows + block.y - 1) / block.y;
  if (grid > INT32_MAX) return cudaErrorInvalidValue;
  const auto kernel = is_short ? keep_row<T, W, SHORT_VALUES> : keep_row<T, W, VALUES>;
  kernel<<<static_cast<unsigned>(grid), block, 0, stream>>>(
      x, residual, weight, bias, sum, out, mean, rstd, rows, static_cast<int>(cols), eps);
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
