// What the PTX instructions of the Tensor Core rungs do, in C++, so that the CPU machine can run them:
// the tests put this in place of the rung's own functions, which have the same names.
// cp.async arrives here as late as it may: when a wait asks for it.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace software_ptx {

struct Copy {
  void* to;
  const void* from;
  bool inside;
};
struct Thread {  // groups of copies under way; the newest collects. A block must wait for all
  Copy copies[4][64];
  int sizes[4], groups;
};
// Blocks that run at the same time have numbers close together. Not thread_local: that would be
// allocated at the first use, where a nudge of the supervisor may come at any moment.
SIMT_UNWATCHED inline Thread& mine() {
  static Thread threads[64][256];
  return threads[blockIdx.x % 64][threadIdx.x];
}
SIMT_UNWATCHED inline void ask(const Copy& copy) {
  Thread& t = mine();
  t.copies[t.groups][t.sizes[t.groups]++] = copy;
}
SIMT_UNWATCHED inline void commit() {
  Thread& t = mine();
  if (t.groups == 3) __trap();  // nobody waits for them
  t.sizes[++t.groups] = 0;
}
// The next copy that must arrive before at most `pending` groups are left; false if none must.
SIMT_UNWATCHED inline bool next(int pending, Copy& copy) {
  Thread& t = mine();
  while (t.groups > pending) {
    if (t.sizes[0] > 0) {
      copy = t.copies[0][--t.sizes[0]];
      return true;
    }
    memmove(t.copies, t.copies + 1, sizeof t.copies - sizeof t.copies[0]);
    memmove(t.sizes, t.sizes + 1, sizeof t.sizes - sizeof t.sizes[0]);
    --t.groups;
  }
  return false;
}

template <typename T>
__device__ float product(uint32_t a, uint32_t b) {  // of two pairs
  struct Pair {
    T x, y;
  };
  const auto p = __builtin_bit_cast(Pair, a), q = __builtin_bit_cast(Pair, b);
  return float(p.x) * float(q.x) + float(p.y) * float(q.y);
}

}  // namespace software_ptx

__device__ void cp_async(void* to, const void* from, bool inside) {
  software_ptx::ask({to, from, inside});
}
__device__ void cp_async_commit() { software_ptx::commit(); }
template <int PENDING>
__device__ void cp_async_wait() {
  software_ptx::Copy copy;
  while (software_ptx::next(PENDING, copy)) {
    const float4 zero = {0, 0, 0, 0};
    *static_cast<float4*>(copy.to) = copy.inside ? *static_cast<const float4*>(copy.from) : zero;
  }
}

// Register i of lane l: two elements of row l / 4 of the matrix whose rows lanes 8i … 8i + 7 name.
__device__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const auto from = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), i * 8 + lane / 4);
    r[i] = reinterpret_cast<const uint32_t*>(from)[lane % 4];
  }
}

// m16n8k16. Lane l holds rows l / 4 and l / 4 + 8 of a, column l / 4 of b, each at k = l % 4 · 2, the
// next, and both 8 further; of d it holds rows l / 4 and l / 4 + 8, columns l % 4 · 2 and the next.
template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
  for (int k = 0; k < 4; ++k) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t b = half ? b1 : b0;
      const uint32_t top = __shfl_sync(~0u, a[2 * half], row + k);
      const uint32_t bottom = __shfl_sync(~0u, a[2 * half + 1], row + k);
      for (int n = 0; n < 2; ++n) {
        const uint32_t right = __shfl_sync(~0u, b, column + n * 4 + k);
        d[n] += software_ptx::product<T>(top, right);
        d[2 + n] += software_ptx::product<T>(bottom, right);
      }
    }
  }
}

// wgmma runs here when it is asked for, so the fences and waits around it have nothing to do: that
// one of them is missing only a GPU can tell.
inline void fence_proxy_async() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
__device__ void wgmma_wait() {}

// m64n64k16, of which a warp computes 16 rows. b is found as the descriptor says: rows of 128, 64 or
// 32 bytes (bits 62 and 63: 1, 2, 3), 8 of them as far from the next 8 as bits 32 to 45 say, in 16
// bytes. Swizzled, bits 4 to 6 of an address are changed by the bits three further up, as many of
// them as number the 16-byte pieces of a row.
template <typename T>
__device__ void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  const int lane = threadIdx.x % 32;
  const uint32_t start = (b & 0x3FFF) << 4, stride = (b >> 32 & 0x3FFF) << 4,
                 row = 256 >> (b >> 62);
  for (int n = 0; n < 8; ++n) {
    uint32_t pair[2];
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = start + n * stride + lane / 4 * row + lane % 4 * 4 + half * 16;
      const uint32_t swizzled = at ^ (at >> 7 & (row / 16 - 1)) << 4;
      pair[half] = *reinterpret_cast<const uint32_t*>(simt::shared_variable(swizzled));
    }
    mma<T>(d[n], a, pair[0], pair[1]);
  }
}
