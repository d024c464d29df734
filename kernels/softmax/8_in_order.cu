// 8_in_order.cu: long rows, handed out one by one to clusters that work on three at once
// Before : in rung 6 a block reads, waits for the others, and writes, one after the other. To deal
//          out all rows to clusters that stay is no cure: the slowest SM then ends the kernel
// Idea   : as many clusters as the chip takes at once. While one row is written and the next one
//          added up, the copy engine fetches a third into shared memory (cp.async.bulk). Which one,
//          a counter says: first come, first served. Warps send their sums to all blocks of the
//          cluster, and mbarriers count the bytes (st.async): no barrier, which would also wait for
//          all that was stored
// Cost   : 2·rows·cols·sizeof(T) bytes; the exponentials twice
// Legal  : cols·sizeof(T) a multiple of 16, up to 2^20; pointers on 16 bytes; a chip, or a slice of
//          one, that has room for such a cluster (sm_90 and newer); 4 bytes of the device's pool
// Result : 0.96 of copy, 13.32x rung 1, 1.59x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : deal out all rows, with ticket = next + STAGES · clusters; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int PACKS = 8;              // of a row, a thread
constexpr int PER_WARP = PACKS * 32;  // 4 KB
constexpr int STAGES = 3;             // rows in shared memory

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

template <typename W>
struct Part {  // of a row: Σ exp(x) = sum · exp(largest)
  W largest, sum;
};

template <typename W>
constexpr W LOWEST = std::numeric_limits<W>::lowest();

template <typename W>
constexpr W LOG2E = static_cast<W>(1.4426950408889634);  // log₂ e

// 2^x to 22 bits.
#ifdef __SIMT_CPU__
__device__ float fast_exp2(float x) { return exp2f(x); }
#else
__device__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
__device__ double fast_exp2(double x) { return exp2(x); }

template <typename W>
__device__ W fast_exp(W x) {
  return fast_exp2(x * LOG2E<W>);
}

template <typename W>
__device__ W largest_of_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value = fmax(value, __shfl_xor_sync(~0u, value, d));
  return value;
}

template <typename W>
__device__ W sum_of_warp(W value) {
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

#ifdef __SIMT_CPU__  // it has neither: copies at once, and all blocks wait for each other
__device__ void init(uint64_t*) {}
__device__ void expect(uint64_t*, int) {}
__device__ void copy(void* to, const void* from, int bytes, uint64_t*) {
  for (int i = 0; i < bytes / 16; ++i) {
    static_cast<int4*>(to)[i] = static_cast<const int4*>(from)[i];
  }
}
template <typename P>
__device__ void send(P part, P* to, uint64_t*, int block) {
  *cooperative_groups::this_cluster().map_shared_rank(to, block) = part;
}
__device__ void wait(uint64_t*, int) { cooperative_groups::this_cluster().sync(); }
#else
__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// An mbarrier waits for one arrival, which says how many bytes are to come, and for those bytes.
__device__ void init(uint64_t* barrier) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
      : "memory");
}
__device__ void expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// From global memory, by the copy engine.
__device__ void copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// To the same place in a block of the cluster, whose barrier counts it.
template <typename P>
__device__ void send(P part, P* to, uint64_t* barrier, int block) {
  uint64_t bits[sizeof(P) / 8];
  memcpy(bits, &part, sizeof(P));
  for (unsigned i = 0; i < sizeof(P) / 8; ++i) {
    asm volatile(
        "{\n.reg .b32 to, barrier;\n"
        "mapa.shared::cluster.u32 to, %0, %3;\n"
        "mapa.shared::cluster.u32 barrier, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [barrier];\n"
        "}" ::"r"(shared_address(to) + 8 * i),
        "l"(bits[i]), "r"(shared_address(barrier)), "r"(block)
        : "memory");
  }
}
// Returns once the phase of this parity has ended.
__device__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
#endif

template <typename T>
__global__ void __launch_bounds__(MAX_BLOCK, 1)
    softmax_kernel(const T* x, T* out, int64_t rows, int packs, unsigned* counter) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  using W = Wide<T>;
  extern __shared__ int4 stages[];  // STAGES · PACKS · blockDim.x of them
  __shared__ Part<W> parts[2][MAX_CLUSTER * MAX_BLOCK / 32];
  __shared__ int64_t tickets[2];
  __shared__ uint64_t sent[2], loaded[STAGES][MAX_BLOCK / 32];
  const auto cluster = cooperative_groups::this_cluster();
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int all_warps = size * warps, warp_in_all = rank * warps + warp;
  if (threadIdx.x < 2) init(&sent[threadIdx.x]);
  if (lane < STAGES) init(&loaded[lane][warp]);
  cluster.sync();  // all blocks of the cluster run, and their barriers are initialized

  // A warp takes PER_WARP packs side by side, a thread every 32nd: the distances are constants.
  const int first = warp_in_all * PER_WARP, left = packs - first - lane;
  const auto staged = [&](int i) {  // where row i of this cluster lies
    return reinterpret_cast<Pack<T>*>(stages) + (i % STAGES * warps + warp) * PER_WARP;
  };
  const auto fetch = [&](int64_t row, int i) {
    __syncwarp();  // all have read what is there
    if (lane > 0 || row >= rows) return;
    const int bytes = 16 * max(0, min(left, PER_WARP));
    expect(&loaded[i % STAGES][warp], bytes);
    if (bytes == 0) return;
    copy(staged(i), reinterpret_cast<const Pack<T>*>(x) + row * packs + first, bytes,
         &loaded[i % STAGES][warp]);
  };
  for (int p = 0; p < PACKS; ++p) {  // past the row's end, where nothing is copied to
    if (p * 32 < left) continue;
    for (int i = 0; i < STAGES; ++i) {
      for (int k = 0; k < N<T>; ++k) staged(i)[p * 32 + lane].at[k] = static_cast<T>(-INFINITY);
    }
  }

  // The first three rows are dealt out.
  const int64_t clusters = gridDim.x / size;
  int64_t row = -1, next = blockIdx.x / size, after = next + clusters, third = after + clusters;
  fetch(next, 0);
  fetch(after, 1);
#pragma unroll 1
  for (int i = 0; i == 0 || row < rows; ++i) {  // adds up row i, writes row i - 1
    const int turn = i % 2;
    Part<W> part = {LOWEST<W>, 0};
    int64_t ticket = 0;
    W value[N<T>];
    if (next < rows) {
      if (rank == 0 && threadIdx.x == 0) ticket = STAGES * clusters + atomicAdd(counter, 1);
      wait(&loaded[i % STAGES][warp], i / STAGES % 2);
      W most = LOWEST<W>;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        widen(staged(i)[p * 32 + lane], value);
        for (int k = 0; k < N<T>; ++k) most = fmax(most, value[k]);
      }
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        widen(staged(i)[p * 32 + lane], value);
        for (int k = 0; k < N<T>; ++k) part.sum += fast_exp(value[k] - most);
      }
      part.largest = largest_of_warp(most);
      part.sum = sum_of_warp(part.sum * fast_exp(most - part.largest));
    }
    W largest = LOWEST<W>, log2_sum = 0;
    if (i > 0) {
      wait(&sent[turn ^ 1], (i - 1) / 2 % 2);
      third = tickets[turn ^ 1];  // before this warp allows the next one to come
      const Part<W>* row_parts = parts[turn ^ 1];
      for (int j = lane; j < all_warps; j += 32) largest = fmax(largest, row_parts[j].largest);
      largest = largest_of_warp(largest);
      W sum = 0;
      for (int j = lane; j < all_warps; j += 32) {
        sum += row_parts[j].sum * fast_exp(row_parts[j].largest - largest);
      }
      log2_sum = log2(sum_of_warp(sum));
    }
    // All have sent their parts of row i - 1, so all have read those of row i - 2.
    if (next < rows) {
      if (threadIdx.x == 0) {
        expect(&sent[turn], all_warps * static_cast<int>(sizeof(part)) + 8);  // and a ticket
      }
      if (warp_in_all == 0) {
        ticket = __shfl_sync(~0u, ticket, 0);
        if (lane < size) send(ticket, &tickets[turn], &sent[turn], lane);
      }
      if (lane < size) send(part, &parts[turn][warp_in_all], &sent[turn], lane);
    }
    if (i > 0) {
      auto* to = reinterpret_cast<Pack<T>*>(out) + row * packs + first + lane;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        widen(staged(i - 1)[p * 32 + lane], value);
        Pack<T> pack;
        for (int k = 0; k < N<T>; ++k) {
          pack.at[k] = static_cast<T>(fast_exp2((value[k] - largest) * LOG2E<W> - log2_sum));
        }
        if (p * 32 < left) to[p * 32] = pack;
      }
    }
    fetch(third, i + 2);  // to where row i - 1 was
    row = next, next = after, after = third;
  }
#else
  __trap();
#endif
}

// A counter of this launch's own: others may run on other streams, or be replayed from a graph. The
// process keeps 32 MB of the device's pool from now on; all of it would go at each synchronization.
cudaError_t make_counter(unsigned** counter, cudaStream_t stream) {
#ifndef __SIMT_CPU__
  int device = 0;
  cudaMemPool_t pool = nullptr;
  uint64_t kept = 0, wanted = 1 << 25;
  const auto threshold = cudaMemPoolAttrReleaseThreshold;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetMemPool(&pool, device);
  if (error == cudaSuccess) error = cudaMemPoolGetAttribute(pool, threshold, &kept);
  if (error == cudaSuccess && kept < wanted) {
    error = cudaMemPoolSetAttribute(pool, threshold, &wanted);
  }
  if (error != cudaSuccess) return error;
#endif
  return cudaMallocAsync(counter, sizeof(unsigned), stream);
}

template <typename T>
cudaError_t start(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out);
  int64_t size = 2;  // of the cluster: a power of two; sanitizers refuse st.async in one block
  while (cols > size * MAX_BLOCK * PACKS * N<T>) size *= 2;
  if (bits % 16 != 0 || cols % N<T> != 0 || rows > INT32_MAX || size > MAX_CLUSTER) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = softmax_kernel<T>;
  const int64_t per_warp = size * PER_WARP * N<T>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(size);
  config.blockDim = static_cast<unsigned>(32 * ((cols + per_warp - 1) / per_warp));
  config.dynamicSmemBytes = STAGES * PACKS * 16 * config.blockDim.x;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int fitting = 0;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           STAGES * PACKS * 16 * MAX_BLOCK);
  if (error == cudaSuccess) {  // 8 blocks are usually granted, 16 on request
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&fitting, kernel, &config);
  if (error != cudaSuccess || fitting == 0) {
    return cudaErrorNotSupported;  // an error, too, of a chip that knows no clusters of this size
  }
  config.gridDim = static_cast<unsigned>(size * std::min<int64_t>(rows, fitting));
  unsigned* counter = nullptr;
  error = make_counter(&counter, stream);
  if (error != cudaSuccess) return cudaErrorNotSupported;  // other rungs need no memory
  error = cudaMemsetAsync(counter, 0, sizeof(unsigned), stream);
  if (error == cudaSuccess)
    error =
        cudaLaunchKernelEx(&config, kernel, x, out, rows, static_cast<int>(cols / N<T>), counter);
  const cudaError_t freed = cudaFreeAsync(counter, stream);
  return error != cudaSuccess ? error : freed;
}

// While a graph is captured, CUDA refuses what its replays would not do again, unless the thread
// says that they need not: to ask for what a kernel may have, and to keep the pool's memory.
template <typename T>
cudaError_t launch(const T* x, T* out, int64_t rows, int64_t cols, cudaStream_t stream) {
#ifdef __SIMT_CPU__
  const cudaError_t error = start(x, out, rows, cols, stream);
#else
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = start(x, out, rows, cols, stream);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error == cudaSuccess) error = restored;
#endif
  if (error != cudaSuccess) cudaGetLastError();  // told here: the next launch shall not hear of it
  return error;
}

extern "C" cudaError_t softmax_launch_f32(const float* x, float* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f64(const double* x, double* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_f16(const __half* x, __half* out, int64_t rows, int64_t cols,
                                          cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
extern "C" cudaError_t softmax_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, int64_t rows,
                                           int64_t cols, cudaStream_t stream) {
  return launch(x, out, rows, cols, stream);
}
