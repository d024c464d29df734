// 7_any_dimension.cu: rows of any length, columns, or everything
// Before : rung 6 sums whole tensors only
// Idea   : x is (outer, n, inner). Rows (inner 1): 1 to 256 threads a row, as it is long. Columns:
//          threads side by side walk down n. Few results: share out n, and finish as in rung 6
// Cost   : outer·n·inner·sizeof(T) bytes read, so bound by memory        Legal: any
// Result : 1.01 of read, 1887.15x rung 1, 1.00x eager  (H200, float32 (268435456,) contiguous dim=None)
// Try    : sum (2^20, 3) along either dimension; what would make the slower one faster?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

constexpr int BLOCK = 256;
#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
#ifndef BLOCKS
#define BLOCKS 1056  // to keep busy: 8 for each of 132 SMs
#endif

template <typename T>
struct Accumulator {
  using type = float;  // 16-bit types are stored, never added up in
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// Adds up what thread `t` of `threads` has of x[0 … n-1]. Packs begin at multiples of 16 bytes; the
// elements before the first and after the last are added one by one.
template <typename A, typename T>
__device__ A thread_sum(const T* x, int64_t n, int64_t t, int64_t threads) {
  constexpr int N = 16 / sizeof(T);
  using P = Pack<T, N>;
  const int64_t offset = reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T);
  const int64_t head = offset == 0 ? 0 : (N - offset < n ? N - offset : n);
  const int64_t packs = (n - head) / N;
  const P* body = reinterpret_cast<const P*>(x + head);
  A sum = 0;
#pragma unroll 1  // unrolling this one as well would only take registers
  for (int64_t i = t; i < packs; i += IN_FLIGHT * threads) {
    P p[IN_FLIGHT] = {};
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {  // all loads first
      if (i + j * threads < packs) p[j] = body[i + j * threads];
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum += static_cast<A>(p[j].at[k]);
    }
  }
  for (int64_t i = t; i < n - packs * N; i += threads) {  // what is left, of both ends
    sum += static_cast<A>(x[i < head ? i : i + packs * N]);
  }
  return sum;
}

// What a block knows about the result that it shares with other blocks.
template <typename A>
struct Shared {
  A* sums;            // [part][output]
  unsigned* tickets;  // one for each block in x
  int64_t outputs;
};

// True in every thread of the block that comes last to its outputs, once all have left their sums.
template <typename A>
__device__ bool is_last(Shared<A> shared) {
  __shared__ bool last;
  __threadfence();  // whoever sees the ticket taken sees the sums as well
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    last = atomicAdd(shared.tickets + blockIdx.x, 1) == gridDim.y - 1;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// The sum of v over the row's threads (threadIdx.x), in the first of them.
template <typename A>
__device__ A row_sum(A v) {
  for (int step = min(blockDim.x, 32u) / 2; step > 0; step /= 2) {
    v += __shfl_down_sync(0xffffffff, v, step, 2 * step);
  }
  if (blockDim.x <= 32) return v;  // the same for the whole block: it is one row then
  __shared__ A warps[BLOCK / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < BLOCK / 32; ++w) v += warps[w];
  }
  return v;
}

template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK, 8)  // 8 blocks an SM, so at most 32 registers a thread
    sum_rows(const T* x, T* out, Shared<A> shared, int64_t rows, int64_t n) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  A sum = 0;
  if (row < rows) {
    const int64_t t = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
    sum = thread_sum<A>(x + row * n, n, t, int64_t{gridDim.y} * blockDim.x);
  }
  sum = row_sum(sum);
  if (gridDim.y > 1) {  // blockDim.y is 1 then
    if (threadIdx.x == 0) shared.sums[blockIdx.y * shared.outputs + row] = sum;
    if (!is_last(shared)) return;
    sum = 0;
    for (unsigned part = threadIdx.x; part < gridDim.y; part += BLOCK) {
      sum += __ldcg(shared.sums + part * shared.outputs + row);
    }
    sum = row_sum(sum);
  }
  if (threadIdx.x == 0 && row < rows) out[row] = static_cast<T>(sum);
}

// Adds sum[k] over threadIdx.y: the result is in the threads with threadIdx.y = 0.
template <typename A, int N>
__device__ void column_sums(A (&sum)[N]) {
  __shared__ A sums[N][BLOCK];
  const int at = threadIdx.y * blockDim.x + threadIdx.x;
  for (unsigned step = blockDim.y / 2; step > 0; step /= 2) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k][at] = sum[k];
    __syncthreads();
    if (threadIdx.y < step) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += sums[k][at + step * blockDim.x];
    }
  }
}

// A thread has N neighbouring columns. Block x is (outer, group of columns), block y a part of n.
template <typename T, typename A, int N>
__global__ void __launch_bounds__(BLOCK)
    sum_columns(const T* x, T* out, Shared<A> shared, int64_t n, int64_t inner) {
  using P = Pack<T, N>;
  const int64_t groups = (inner / N + blockDim.x - 1) / blockDim.x;
  const int64_t outer = blockIdx.x / groups;
  const int64_t c = ((blockIdx.x - outer * groups) * blockDim.x + threadIdx.x) * N;
  const T* column = x + outer * n * inner + c;
  const int64_t output = outer * inner + c;
  const int64_t stride = int64_t{gridDim.y} * blockDim.y;
  A sum[N] = {};
  constexpr int ROWS = N > 1 ? IN_FLIGHT : 2 * IN_FLIGHT;
  for (int64_t r = blockIdx.y * blockDim.y + threadIdx.y; c < inner && r < n; r += ROWS * stride) {
    P p[ROWS] = {};
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int64_t row = r + j * stride;
      if (row < n) p[j] = *reinterpret_cast<const P*>(column + row * inner);
    }
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += static_cast<A>(p[j].at[k]);
    }
  }
  column_sums(sum);
  if (gridDim.y > 1) {
    A* sums = shared.sums + output;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (threadIdx.y == 0 && c < inner) sums[blockIdx.y * shared.outputs + k] = sum[k];
      sum[k] = 0;
    }
    if (!is_last(shared)) return;
    for (unsigned part = threadIdx.y; c < inner && part < gridDim.y; part += blockDim.y) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += __ldcg(sums + part * shared.outputs + k);
    }
    column_sums(sum);
  }
  if (threadIdx.y != 0 || c >= inner) return;
#pragma unroll
  for (int k = 0; k < N; ++k) out[output + k] = static_cast<T>(sum[k]);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned power_of_2(int64_t wanted, unsigned most) {
  unsigned p = 1;
  while (p < wanted && p < most) p *= 2;
  return p;
}

// Into how many parts n is shared out: enough to keep the GPU busy, none smaller than is worth it.
int64_t parts_of(int64_t blocks, int64_t n, int64_t smallest) {
  return std::max<int64_t>(1, std::min(BLOCKS / blocks, n / smallest));
}

constexpr int64_t ROW_PART = 4096, COLUMN_PART = 64;  // elements of n
constexpr int64_t WIDEST = 32 * 8;                    // columns of a block: 32 packs of 8

// Bytes of workspace: the tickets (never more than outputs), then a sum for each part and output.
extern "C" int64_t reduce_sum_workspace(int64_t outer, int64_t n, int64_t inner) {
  const int64_t outputs = outer * inner;
  const int64_t parts = inner == 1 ? parts_of(outer, n, ROW_PART)
                                   : parts_of(outer * ceil_div(inner, WIDEST), n, COLUMN_PART);
  return parts == 1 ? 0 : ceil_div(outputs * 4, 16) * 16 + parts * outputs * 8;
}

// x has the shape (outer, n, inner), and n is summed over.
template <typename T>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t outer, int64_t n, int64_t inner,
                   cudaStream_t stream) {
  using A = typename Accumulator<T>::type;
  constexpr int N = 16 / sizeof(T);
  const int64_t outputs = outer * inner;
  char* const sums = static_cast<char*>(workspace) + ceil_div(outputs * 4, 16) * 16;
  const Shared<A> shared = {reinterpret_cast<A*>(sums), static_cast<unsigned*>(workspace), outputs};
  const bool packs = inner % N == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  unsigned width = 1;  // threads side by side, in a row or over columns
  int64_t blocks, parts;
  if (inner == 1) {
    parts = parts_of(outer, n, ROW_PART);
    width = power_of_2(ceil_div(n, 4 * N), 32);  // 4 packs of a row for each
    if (parts > 1 || n > 32 * 16 * N) width = BLOCK;
    blocks = ceil_div(outer, BLOCK / width);
  } else {
    const int64_t columns = inner / (packs ? N : 1);
    width = power_of_2(columns, 32);
    blocks = outer * ceil_div(columns, width);
    parts = parts_of(blocks, n, COLUMN_PART);
  }
  if (parts > 1) {
    const cudaError_t error = cudaMemsetAsync(workspace, 0, outputs * 4, stream);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  const dim3 block(width, BLOCK / width);
  if (inner == 1) {
    sum_rows<<<grid, block, 0, stream>>>(x, out, shared, outer, n);
  } else {
    auto* kernel = packs ? sum_columns<T, A, N> : sum_columns<T, A, 1>;
    kernel<<<grid, block, 0, stream>>>(x, out, shared, n, inner);
  }
  return cudaGetLastError();
}

#define LAUNCHER(SUFFIX, T)                                                                  \
  extern "C" cudaError_t reduce_sum_launch_##SUFFIX(const T* x, T* out, void* workspace,     \
                                                    int64_t outer, int64_t n, int64_t inner, \
                                                    cudaStream_t stream) {                   \
    return launch(x, out, workspace, outer, n, inner, stream);                               \
  }
LAUNCHER(f32, float)
LAUNCHER(f64, double)
LAUNCHER(f16, __half)
LAUNCHER(bf16, __nv_bfloat16)
