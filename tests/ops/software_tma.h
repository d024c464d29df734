// What TMA, mbarriers and wgmma with two operands in shared memory do, in C++: as software_ptx.h, for
// 11_im2col. A copy is made when it is asked for, and a product too: that a fence or a wait for one of
// them is missing only a GPU can tell.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

// ---- tensor maps: what the driver would encode, kept as it is ----
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum { CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum { CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct SoftwareMap {  // of elements of 16 bits
  uint16_t* data;
  int rank;
  int64_t size[4], stride[4];  // in elements, the innermost first
  int box[4], first[2], last[2], every[4];
};
inline CUresult software_map(SoftwareMap* map, int rank, void* data, const uint64_t* size,
                             const uint64_t* stride) {
  *map = {static_cast<uint16_t*>(data), rank, {1, 1, 1, 1}, {1}, {}, {}, {}, {}};
  if (reinterpret_cast<uintptr_t>(data) % 16) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < rank; ++i) {
    map->size[i] = static_cast<int64_t>(size[i]);
    if (i + 1 == rank) break;
    if (stride[i] % 16) return CUDA_ERROR_INVALID_VALUE;
    map->stride[i + 1] = static_cast<int64_t>(stride[i] / 2);
  }
  return CUDA_SUCCESS;
}
inline CUresult software_encode_Tiled(SoftwareMap* map, CUtensorMapDataType, uint32_t rank,
                                      void* data, const uint64_t* size, const uint64_t* stride,
                                      const uint32_t* box, const uint32_t*, int, int, int, int) {
  for (uint32_t i = 0; i < rank; ++i) {
    if (box[i] == 0 || box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
  }
  const CUresult result = software_map(map, static_cast<int>(rank), data, size, stride);
  for (uint32_t i = 0; i < rank; ++i) map->box[i] = static_cast<int>(box[i]);
  return result;
}
inline CUresult software_encode_Im2col(SoftwareMap* map, CUtensorMapDataType, uint32_t rank,
                                       void* data, const uint64_t* size, const uint64_t* stride,
                                       const int* first, const int* last, uint32_t channels,
                                       uint32_t pixels, const uint32_t* every, int, int, int, int) {
  const CUresult result = software_map(map, static_cast<int>(rank), data, size, stride);
  map->box[0] = static_cast<int>(channels), map->box[1] = static_cast<int>(pixels);
  for (int i = 0; i < 2; ++i) {
    map->first[i] = first[i], map->last[i] = last[i];
    map->every[i] = static_cast<int>(every[i + 1]);
    const bool inside = first[i] >= -128 && first[i] < 128 && last[i] >= -128 && last[i] < 128;
    if (!inside || every[i + 1] < 1 || every[i + 1] > 8) return CUDA_ERROR_INVALID_VALUE;
  }
  return result;
}
inline void software_driver(const char* name, void** function, int, int,
                            cudaDriverEntryPointQueryResult*) {
  const bool im2col = strcmp(name, "software_encode_Im2col") == 0;
  *function = im2col ? reinterpret_cast<void*>(&software_encode_Im2col)
                     : reinterpret_cast<void*>(&software_encode_Tiled);
}

// ---- mbarriers ----
struct SoftwareBarrier {  // 8 bytes, as the real one
  uint8_t arrivals, pending;
  uint16_t phase;
  int32_t bytes;  // that were announced and have not arrived; may be negative in between
};
SIMT_UNWATCHED inline SoftwareBarrier& software_barrier(uint32_t at) {
  return *reinterpret_cast<SoftwareBarrier*>(simt::shared_variable(at));
}
SIMT_UNWATCHED inline void software_arrive(uint32_t at, int arrivals, int bytes) {
  SoftwareBarrier& b = software_barrier(at);
  b.pending = static_cast<uint8_t>(b.pending - arrivals);
  b.bytes += bytes;
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.arrivals;
  ++b.phase;
}
__device__ inline int* software_counts() {  // of arrivals, for warpgroup_barrier()
  __shared__ int counts[8];
  return counts;
}
__device__ inline void mbarrier_init(uint32_t at, int arrivals) {
  const auto n = static_cast<uint8_t>(arrivals);
  software_barrier(at) = {n, n, 0, 0};
  for (int i = 0; i < 8; ++i) software_counts()[i] = 0;
}
SIMT_UNWATCHED inline void mbarrier_arrive_expect_tx(uint32_t at, int bytes) {
  software_arrive(at, 1, bytes);
}
SIMT_UNWATCHED inline void mbarrier_arrive(uint32_t at) { software_arrive(at, 1, 0); }
SIMT_UNWATCHED inline void mbarrier_wait(uint32_t at, uint32_t parity) {
  while (software_barrier(at).phase % 2 == parity) __nanosleep(1);
}
// Of a warpgroup's 128 threads; a fence and atomics are what the race checker understands.
__device__ inline void warpgroup_barrier(int id) {
  __threadfence_block();
  const int round = atomicAdd(&software_counts()[id], 1) / 128;
  while (atomicAdd(&software_counts()[id], 0) / 128 == round) __nanosleep(1);
}

// ---- copies; the box lies in rows of 128 bytes, whose 16-byte pieces are permuted ----
SIMT_UNWATCHED inline uint16_t& software_shared(uint32_t at) {
  return *reinterpret_cast<uint16_t*>(simt::shared_variable(at ^ (at >> 7 & 7) << 4));
}
SIMT_UNWATCHED inline uint16_t* software_element(const SoftwareMap& map, const int64_t (&at)[4]) {
  int64_t offset = 0;
  for (int i = 0; i < map.rank; ++i) {
    if (at[i] < 0 || at[i] >= map.size[i]) return nullptr;
    offset += at[i] * map.stride[i];
  }
  return map.data + offset;
}
SIMT_UNWATCHED inline void tma_load_im2col(uint32_t to, const SoftwareMap* map, int c, int w, int h,
                                           int n, int right, int down, uint32_t barrier) {
  const int64_t end[] = {map->size[1] + map->last[0], map->size[2] + map->last[1]};
  for (int pixel = 0; pixel < map->box[1]; ++pixel) {
    for (int i = 0; i < map->box[0]; ++i) {
      const uint16_t* from = software_element(*map, {c + i, w + right, h + down, n});
      software_shared(to + (pixel * map->box[0] + i) * 2) = from ? *from : 0;
    }
    if ((w += map->every[0]) < end[0]) continue;
    w = map->first[0];
    if ((h += map->every[1]) < end[1]) continue;
    h = map->first[1];
    ++n;
  }
  software_arrive(barrier, 0, -map->box[0] * map->box[1] * 2);
}
SIMT_UNWATCHED inline void tma_load_weights(uint32_t to, const SoftwareMap* map, int c, int tap,
                                            int k, uint32_t barrier) {
  for (int row = 0; row < map->box[2]; ++row) {
    for (int i = 0; i < map->box[0]; ++i) {
      const uint16_t* from = software_element(*map, {c + i, tap, k + row, 0});
      software_shared(to + (row * map->box[0] + i) * 2) = from ? *from : 0;
    }
  }
  software_arrive(barrier, 0, -map->box[0] * map->box[2] * 2);
}
SIMT_UNWATCHED inline void tma_store(const SoftwareMap* map, int x, int y, uint32_t from) {
  for (int row = 0; row < map->box[1]; ++row) {
    for (int i = 0; i < map->box[0]; ++i) {
      uint16_t* to = software_element(*map, {x + i, y + row, 0, 0});
      if (to) *to = software_shared(from + (row * map->box[0] + i) * 2);
    }
  }
}
template <int PENDING>
inline void tma_store_wait_read() {}
inline void fence_proxy_async() {}

// Lane l names row l % 8 of the 8 x 8 matrix l / 8; lane l has elements 2·(l % 4) and the next of row
// l / 4 of each.
SIMT_UNWATCHED inline void stmatrix_x4(uint32_t to, const uint32_t (&r)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(~0u, to, i * 8 + lane / 4);
    *reinterpret_cast<uint32_t*>(simt::shared_variable(row + lane % 4 * 4)) = r[i];
  }
}

// ---- wgmma ----
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
__device__ inline void wgmma_wait() {
  __syncwarp();  // .sync.aligned: no lane goes on and gives a stage back that another still reads
}

// Element k of row i of an operand in rows of 128 bytes; bits 32 to 45 of the descriptor say how far
// 8 rows are from the next 8.
template <typename T>
SIMT_UNWATCHED float software_operand(uint64_t descriptor, int i, int k) {
  const uint32_t start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
  const uint16_t bits = software_shared(start + i / 8 * stride + i % 8 * 128 + k * 2);
  return static_cast<float>(__builtin_bit_cast(T, bits));
}
// Lane l holds rows l / 4 and l / 4 + 8 of its warp's 16, of each 8 columns l % 4 · 2 and the next.
template <typename T, int N>
SIMT_UNWATCHED void wgmma(float (&d)[N], uint64_t a, uint64_t b, int accumulate) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const int column = threadIdx.x % 4 * 2;
  float from_a[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int e = 0; e < 2; ++e) from_a[e][k] = software_operand<T>(a, row + e * 8, k);
  }
  for (int i = 0; i < N; i += 4) {
    for (int e = 0; e < 2; ++e) {
      float sum[2] = {accumulate ? d[i + e] : 0.0f, accumulate ? d[i + e + 2] : 0.0f};
      for (int k = 0; k < 16; ++k) {
        const float from_b = software_operand<T>(b, i * 2 + column + e, k);
        for (int r = 0; r < 2; ++r) sum[r] += from_a[r][k] * from_b;
      }
      d[i + e] = sum[0], d[i + e + 2] = sum[1];
    }
  }
}
