// 6_last_block.cu: the block that finishes last adds up the others, in order
// Before : the atomic additions of rung 5 come in any order, so totals may differ from run to run,
//          and a second kernel has to wait for the first
// Idea   : each block leaves its sum and takes a ticket; who draws the last one adds all sums, in one
//          order always: the same bits each time
// Cost   : n·sizeof(T) bytes read, so bound by memory      Legal: the whole tensor, any n
// Result : 1.01 of read, 1894.74x rung 1, 1.01x eager  (H200, float32 (268435456,) contiguous dim=None)
// Try    : remove the __threadfence. Does a test notice? Why is it needed all the same?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

constexpr int BLOCK = 256;
#ifndef IN_FLIGHT
#define IN_FLIGHT 4
#endif
#ifndef BLOCKS
#define BLOCKS 1056  // 8 for each of 132 SMs
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

// The sum of v over the block, in thread 0. Within a warp, registers are exchanged directly.
template <typename A>
__device__ A block_sum(A v) {
  __shared__ A warps[BLOCK / 32];
  for (int step = 16; step > 0; step /= 2) v += __shfl_down_sync(0xffffffff, v, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < BLOCK / 32; ++w) v += warps[w];
  }
  return v;
}

template <typename T, typename A>
__global__ void __launch_bounds__(BLOCK)
    sum_kernel(const T* x, T* out, A* sums, unsigned* tickets, int64_t n) {
  __shared__ bool last;
  const int64_t t = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  A sum = block_sum(thread_sum<A>(x, n, t, int64_t{gridDim.x} * BLOCK));
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = sum;
    __threadfence();  // whoever sees the ticket taken sees the sum as well
    last = atomicAdd(tickets, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += BLOCK) sum += __ldcg(sums + i);
  sum = block_sum(sum);
  if (threadIdx.x == 0) *out = static_cast<T>(sum);
}

// Bytes of workspace: the tickets, then a sum for each block.
extern "C" int64_t reduce_sum_workspace(int64_t, int64_t, int64_t) {
  return 16 + BLOCKS * sizeof(double);
}

// x has the shape (outer, n, inner), and n is summed over.
template <typename T>
cudaError_t launch(const T* x, T* out, void* workspace, int64_t outer, int64_t n, int64_t inner,
                   cudaStream_t stream) {
  if (outer != 1 || inner != 1) return cudaErrorNotSupported;
  const cudaError_t error = cudaMemsetAsync(workspace, 0, sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  using A = typename Accumulator<T>::type;
  auto* sums = reinterpret_cast<A*>(static_cast<char*>(workspace) + 16);
  const int64_t wanted = (n + BLOCK - 1) / BLOCK;
  const auto grid = static_cast<unsigned>(wanted < BLOCKS ? wanted : BLOCKS);
  sum_kernel<<<grid, BLOCK, 0, stream>>>(x, out, sums, static_cast<unsigned*>(workspace), n);
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
