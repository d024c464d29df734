// 7_any_dimension.cu: rows of any length, columns, or everything
// Before : rung 6 sums whole tensors only
// Idea   : x is (outer, n, inner). Rows (inner 1): 1 to 256 threads a row, as it is long. Columns:
//          threads side by side walk down n. Few results: share out n, and finish as in rung 6
// Cost   : outer·n·inner·sizeof(T) bytes read, so bound by memory        Legal: any
// Result : not measured yet
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
  int64_t i = t;
  for (; i + (IN_FLIGHT - 1) * threads < packs; i += IN_FLIGHT * threads) {
    P p[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) p[j] = body[i + j * threads];  // all loads first
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum += static_cast<A>(p[j].at[k]);
    }
  }
  for (; i < packs; i += threads) {
#pragma unroll
    for (int k = 0; k < N; ++k) sum += static_cast<A>(body[i].at[k]);
  }
  for (i = t; i < head; i += threads) sum += static_cast<A>(x[i]);
  for (i = head + packs * N + t; i < n; i += threads) sum += static_cast<A>(x[i]);
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
__global__ void __launch_bounds__(BLOCK)
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
  __shared__ A sums[BLOCK * N];
  __syncthreads();
  const int at = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < N; ++k) sums[k * BLOCK + at] = sum[k];
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    for (int i = at + blockDim.x; i < BLOCK; i += blockDim.x) sum[k] += sums[k * BLOCK + i];
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
  for (int64_t r = blockIdx.y * blockDim.y + threadIdx.y; c < inner && r < n;
       r += IN_FLIGHT * stride) {
    P p[IN_FLIGHT] = {};
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      const int64_t row = r + j * stride;
      if (row < n) p[j] = *reinterpret_cast<const P*>(column + row * inner);
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
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
int64_t parts(int64_t outer, int64_t n, int64_t inner) {
  const int64_t blocks = inner == 1 ? outer : outer * ceil_div(inner, 128);
  const int64_t most = inner == 1 ? n / 4096 : n / 64;
  return std::max<int64_t>(1, std::min({int64_t{BLOCKS} / blocks, most, int64_t{BLOCKS}}));
}

// Bytes of workspace: the tickets (never more than outputs), then parts · outputs sums.
extern "C" int64_t reduce_sum_workspace(int64_t outer, int64_t n, int64_t inner) {
  const int64_t outputs = outer * inner, shares = parts(outer, n, inner);
  return shares == 1 ? 0 : ceil_div(outputs * 4, 16) * 16 + shares * outputs * 8;
}

// x has the shape (outer, n, inner), and n is summed over.
template <typename T>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t outer, int64_t n, int64_t inner,
                   cudaStream_t stream) {
  using A = typename Accumulator<T>::type;
  constexpr int N = 16 / sizeof(T);
  const int64_t outputs = outer * inner, shares = parts(outer, n, inner);
  char* const sums = static_cast<char*>(workspace) + ceil_div(outputs * 4, 16) * 16;
  const Shared<A> shared = {reinterpret_cast<A*>(sums), static_cast<unsigned*>(workspace), outputs};
  if (shares > 1) {
    const cudaError_t error = cudaMemsetAsync(workspace, 0, outputs * 4, stream);
    if (error != cudaSuccess) return error;
  }
  const auto grid_y = static_cast<unsigned>(shares);
  if (inner == 1) {  // a thread for each 4 packs of a row, if there are so many
    unsigned width = power_of_2(ceil_div(n, 4 * N), 32);
    if (shares > 1 || n > 32 * 16 * N) width = BLOCK;
    const dim3 block(width, BLOCK / width);
    const dim3 grid(static_cast<unsigned>(ceil_div(outer, block.y)), grid_y);
    sum_rows<<<grid, block, 0, stream>>>(x, out, shared, outer, n);
    return cudaGetLastError();
  }
  const bool packs = inner % N == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  const unsigned width = power_of_2(inner / (packs ? N : 1), 32);
  const int64_t grid_x = outer * ceil_div(inner / (packs ? N : 1), width);
  auto* kernel = packs ? sum_columns<T, A, N> : sum_columns<T, A, 1>;
  kernel<<<dim3(static_cast<unsigned>(grid_x), grid_y), dim3(width, BLOCK / width), 0, stream>>>(
      x, out, shared, n, inner);
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
