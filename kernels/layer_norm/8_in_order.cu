// 8_in_order.cu: long rows, handed out one by one to clusters that work on three at once
// Before : in rung 7 all rows are dealt out beforehand, and the slowest SM ends the kernel. And a
//          barrier of the cluster waits for all that a thread has stored to global memory, too
// Idea   : a counter says which row is next: first come, first served. While one row is written and
//          the next one added up, the copy engine fetches a third into shared memory
//          (cp.async.bulk). Warps send their sums to all blocks of the cluster, and mbarriers count
//          the bytes (st.async). Weight and bias are in registers, as narrow as they came
// Cost   : 2·rows·cols·sizeof(T) bytes (with a residual 4, one more from the L2); short rows wait
// Legal  : cols·sizeof(T) a multiple of 16, up to 2^20; pointers on 16 bytes; a chip, or a slice of
//          one, that has room for such a cluster (sm_90 and newer); 4 bytes of the device's pool
// Result : 0.24 of copy, 0.28x rung 1, 0.33x eager  (H200, float32 (32768, 4096), CUDA 13.0)
// Try    : leave keep_narrow out, and see what ptxas says; predict first

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int MAX_BLOCK = 512;
constexpr int MAX_CLUSTER = 16;
constexpr int PACKS = 8;   // of a row, a thread, at most
constexpr int STAGES = 3;  // rows in shared memory

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

// Without it the compiler widens weight and bias before the loop, and runs out of registers.
template <typename T>
__device__ void keep_narrow(Pack<T>& pack) {
#ifndef __SIMT_CPU__
  unsigned bits[4];
  memcpy(bits, &pack, 16);
  for (unsigned& word : bits) asm volatile("" : "+r"(word));
  memcpy(&pack, bits, 16);
#endif
}

template <typename W>
struct Part {  // of a row
  W mean, m2;  // m2 = Σ (x − mean)²
};

template <typename W>
__device__ W sum_warp(W value) {
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

// As few as keep MAX_BLOCK threads of each of `size` blocks busy.
__host__ __device__ int packs_per_warp(int packs, int size) {
  return ((packs - 1) / (size * MAX_BLOCK) + 1) * 32;
}

// FULL: every thread has PACKS packs of the row.
template <typename T, typename W, bool FULL>
__global__ void __launch_bounds__(MAX_BLOCK, 1)
    layer_norm_kernel(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                      W* mean_out, W* rstd_out, int64_t rows, int cols, W eps, unsigned* counter) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older chips have no clusters
  extern __shared__ int4 stages[];                   // STAGES rows' piece of this block
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

  // A warp takes per_warp packs side by side, a thread every 32nd: the distances are constants.
  const int packs = cols / N<T>, per_warp = FULL ? PACKS * 32 : packs_per_warp(packs, size);
  const int first = warp_in_all * per_warp, left = min(packs - first, per_warp) - lane;
  const auto inside = [&](int p) { return FULL || p * 32 < left; };
  const auto staged = [&](int i) {  // where row i of this cluster lies
    return reinterpret_cast<Pack<T>*>(stages) + (i % STAGES * warps + warp) * per_warp + lane;
  };
  const auto fetch = [&](int64_t row, int i) {
    __syncwarp();  // all have read what is there
    if (lane > 0 || row >= rows) return;
    const int bytes = 16 * max(0, left);
    expect(&loaded[i % STAGES][warp], bytes);
    if (bytes == 0) return;
    copy(staged(i), x + row * cols + first * N<T>, bytes, &loaded[i % STAGES][warp]);
  };
  // The first three rows are dealt out.
  const int64_t clusters = gridDim.x / size;
  int64_t row = -1, next = blockIdx.x / size, after = next + clusters, third = after + clusters;
  fetch(next, 0);
  fetch(after, 1);

  const int column = (first + lane) * N<T>;
  Pack<T> w[PACKS], b[PACKS];  // indexed by constants only, or they would not be registers
  int mine = 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    if (!inside(p)) continue;
    w[p] = reinterpret_cast<const Pack<T>*>(weight + column)[p * 32];
    b[p] = reinterpret_cast<const Pack<T>*>(bias + column)[p * 32];
    mine += N<T>;
  }
  const W count = mine, of_warp = sum_warp(count);

#pragma unroll 1
  for (int i = 0; i == 0 || row < rows; ++i) {  // adds up row i, writes row i - 1
    const int turn = i % 2;
    Part<W> part = {0, 0};
    int64_t ticket = 0;
    if (next < rows) {
      if (rank == 0 && threadIdx.x == 0) ticket = STAGES * clusters + atomicAdd(counter, 1);
      wait(&loaded[i % STAGES][warp], i / STAGES % 2);
      // Distances from one of the values: little cancellation, and one pass.
      const int64_t start = next * cols + column;
      W pivot = 0, total = 0, squares = 0;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        if (!inside(p)) continue;
        Pack<T> pack = staged(i)[p * 32];
        if (residual != nullptr) {
          const Pack<T> more = reinterpret_cast<const Pack<T>*>(residual + start)[p * 32];
          for (int k = 0; k < N<T>; ++k) pack.at[k] = add(pack.at[k], more.at[k]);
          reinterpret_cast<Pack<T>*>(sum + start)[p * 32] = pack;
        }
        W value[N<T>];
        widen(pack, value);
        if (p == 0) pivot = value[0];
        for (int k = 0; k < N<T>; ++k) {
          const W distance = value[k] - pivot;
          total += distance;
          squares += distance * distance;
        }
      }
      const W shift = mine > 0 ? total / count : 0;
      part.mean = of_warp > 0 ? sum_warp(count * (pivot + shift)) / of_warp : 0;
      const W distance = pivot + shift - part.mean;
      part.m2 = sum_warp(squares - total * shift + count * distance * distance);
    }
    W mean = 0, rstd = 0;
    if (i > 0) {
      wait(&sent[turn ^ 1], (i - 1) / 2 % 2);
      third = tickets[turn ^ 1];  // before this warp allows the next one to come
      const Part<W>* row_parts = parts[turn ^ 1];
      const auto values_of = [&](int j) {  // of a warp
        return static_cast<W>(max(0, min(packs - j * per_warp, per_warp)) * N<T>);
      };
      for (int j = lane; j < all_warps; j += 32) mean += values_of(j) * row_parts[j].mean;
      mean = sum_warp(mean) / cols;
      W m2 = 0;
      for (int j = lane; j < all_warps; j += 32) {
        const W distance = row_parts[j].mean - mean;
        m2 += row_parts[j].m2 + values_of(j) * distance * distance;
      }
      rstd = rsqrt(sum_warp(m2) / cols + eps);
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
      const int64_t start = row * cols + column;
#pragma unroll
      for (int p = 0; p < PACKS; ++p) {
        if (!inside(p)) continue;
        keep_narrow(w[p]);
        keep_narrow(b[p]);
        Pack<T> pack = staged(i - 1)[p * 32];
        if (residual != nullptr) pack = reinterpret_cast<Pack<T>*>(sum + start)[p * 32];  // its own
        reinterpret_cast<Pack<T>*>(out + start)[p * 32] = normalize(pack, mean, rstd, w[p], b[p]);
      }
      if (rank == 0 && threadIdx.x == 0) {  // the gradient needs both
        mean_out[row] = mean;
        rstd_out[row] = rstd;
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

template <typename T, typename W>
cudaError_t start(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                  W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
  uintptr_t bits = cols % N<T> * sizeof(T);
  for (const T* pointer :
       {x, residual, weight, bias, static_cast<const T*>(sum), static_cast<const T*>(out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  int64_t size = 2;  // of the cluster: a power of two; sanitizers refuse st.async in one block
  while (cols > size * MAX_BLOCK * PACKS * N<T>) size *= 2;
  if (bits % 16 != 0 || rows > INT32_MAX || size > MAX_CLUSTER) return cudaErrorInvalidValue;
  const int packs = static_cast<int>(cols / N<T>), blocks = static_cast<int>(size);
  const int per_warp = packs_per_warp(packs, blocks), of_all = blocks * per_warp;
  const bool full = per_warp == PACKS * 32 && packs % of_all == 0;
  const auto kernel = full ? layer_norm_kernel<T, W, true> : layer_norm_kernel<T, W, false>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(size);
  config.blockDim = static_cast<unsigned>(32 * ((packs + of_all - 1) / of_all));
  config.dynamicSmemBytes = STAGES * per_warp * 16 * config.blockDim.x / 32;
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
    error = cudaLaunchKernelEx(&config, kernel, x, residual, weight, bias, sum, out, mean, rstd,
                               rows, static_cast<int>(cols), static_cast<W>(eps), counter);
  const cudaError_t freed = cudaFreeAsync(counter, stream);
  return error != cudaSuccess ? error : freed;
}

// While a graph is captured, CUDA refuses what its replays would not do again, unless the thread
// says that they need not: to ask for what a kernel may have, and to keep the pool's memory.
template <typename T, typename W>
cudaError_t launch(const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* out,
                   W* mean, W* rstd, int64_t rows, int64_t cols, double eps, cudaStream_t stream) {
#ifdef __SIMT_CPU__
  const cudaError_t error =
      start(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
#else
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  error = start(x, residual, weight, bias, sum, out, mean, rstd, rows, cols, eps, stream);
  const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error == cudaSuccess) error = restored;
#endif
  if (error != cudaSuccess) cudaGetLastError();  // told here: the next launch shall not hear of it
  return error;
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
