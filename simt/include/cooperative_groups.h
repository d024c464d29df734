// Cooperative groups: the block, tiles of a warp, the lanes that are together, clusters of blocks.
// Grid-wide synchronisation is not here: the rewriter refuses it.
#pragma once
#include <type_traits>

#include "simt/launch.h"
#include "simt/machine.h"
#include "simt/warp.h"

namespace cooperative_groups {

namespace details {
SIMT_UNWATCHED inline simt::Thread& me() { return *simt::thread; }
SIMT_UNWATCHED inline unsigned linear(const dim3& at, const dim3& size) {
  return at.x + size.x * (at.y + size.y * at.z);
}
SIMT_UNWATCHED inline dim3 as_dim3(const uint3& v) { return dim3(v.x, v.y, v.z); }
}  // namespace details

// ---- the block ----

class thread_block {
 public:
  static SIMT_UNWATCHED void sync(SIMT_HERE) { simt::block_barrier("thread_block::sync()", here); }
  static SIMT_UNWATCHED unsigned thread_rank() { return details::me().rank; }
  static SIMT_UNWATCHED unsigned size() { return details::me().block->size; }
  static SIMT_UNWATCHED unsigned num_threads() { return size(); }
  static SIMT_UNWATCHED dim3 thread_index() { return details::as_dim3(details::me().index); }
  static SIMT_UNWATCHED dim3 group_index() { return details::as_dim3(details::me().block->index); }
  static SIMT_UNWATCHED dim3 group_dim() { return blockDim; }
  static SIMT_UNWATCHED dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

class thread_group_of_one {
 public:
  static void sync() {}
  static unsigned thread_rank() { return 0; }
  static unsigned size() { return 1; }
  static unsigned num_threads() { return 1; }
};
inline thread_group_of_one this_thread() { return {}; }

// ---- lanes of one warp ----

namespace details {

// What tiles and coalesced groups have in common: a set of lanes. A rank is a position in the set.
class lanes {
 public:
  explicit SIMT_UNWATCHED lanes(unsigned mask) : mask_(mask) {}

  SIMT_UNWATCHED unsigned thread_rank() const {
    return static_cast<unsigned>(__builtin_popcount(mask_ & ((1u << me().lane) - 1)));
  }
  SIMT_UNWATCHED unsigned num_threads() const {
    return static_cast<unsigned>(__builtin_popcount(mask_));
  }
  SIMT_UNWATCHED unsigned size() const { return num_threads(); }
  SIMT_UNWATCHED void sync(SIMT_HERE) const {
    simt::warp_wait("sync() of a tile", &simt::compute_nothing, mask_, here);
  }

  template <class T>
  SIMT_FN T shfl(T value, unsigned rank, SIMT_HERE) const {
    return simt::shuffle("shfl()", mask_, value, lane_of(rank % num_threads()), here);
  }
  template <class T>
  SIMT_FN T shfl_down(T value, unsigned by, SIMT_HERE) const {
    const unsigned to = thread_rank() + by;
    return simt::shuffle("shfl_down()", mask_, value,
                         to < num_threads() ? lane_of(to) : simt::lane(), here);
  }
  template <class T>
  SIMT_FN T shfl_up(T value, unsigned by, SIMT_HERE) const {
    const unsigned rank = thread_rank();
    return simt::shuffle("shfl_up()", mask_, value, rank >= by ? lane_of(rank - by) : simt::lane(),
                         here);
  }
  template <class T>
  SIMT_FN T shfl_xor(T value, unsigned bits, SIMT_HERE) const {
    const unsigned to = thread_rank() ^ bits;
    return simt::shuffle("shfl_xor()", mask_, value,
                         to < num_threads() ? lane_of(to) : simt::lane(), here);
  }

  SIMT_UNWATCHED unsigned ballot(int predicate, SIMT_HERE) const {
    return pack(__ballot_sync(mask_, predicate, here));
  }
  SIMT_UNWATCHED int any(int predicate, SIMT_HERE) const {
    return __any_sync(mask_, predicate, here);
  }
  SIMT_UNWATCHED int all(int predicate, SIMT_HERE) const {
    return __all_sync(mask_, predicate, here);
  }
  template <class T>
  SIMT_FN unsigned match_any(T value, SIMT_HERE) const {
    return pack(__match_any_sync(mask_, value, here));
  }
  template <class T>
  SIMT_FN unsigned match_all(T value, int& all, SIMT_HERE) const {
    return pack(__match_all_sync(mask_, value, &all, here));
  }

  SIMT_UNWATCHED unsigned mask() const { return mask_; }

 private:
  // The lane that has a rank.
  SIMT_UNWATCHED int lane_of(unsigned rank) const {
    unsigned rest = mask_;
    for (unsigned i = 0; i < rank; i++) rest &= rest - 1;
    return __builtin_ctz(rest);
  }
  // From one bit per lane to one bit per rank.
  SIMT_UNWATCHED unsigned pack(unsigned of_lanes) const {
    unsigned packed = 0, rank = 0;
    for (unsigned rest = mask_; rest; rest &= rest - 1, rank++) {
      if (of_lanes >> __builtin_ctz(rest) & 1) packed |= 1u << rank;
    }
    return packed;
  }

  unsigned mask_;
};

SIMT_UNWATCHED inline unsigned tile_mask(unsigned size) {
  const unsigned first = me().lane & ~(size - 1);
  return (size == 32 ? ~0u : (1u << size) - 1) << first;
}

}  // namespace details

template <unsigned Size, class Parent = void>
class thread_block_tile : public details::lanes {
  static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0,
                "on the CPU machine a tile has 1, 2, 4, 8, 16 or 32 threads");

 public:
  SIMT_UNWATCHED thread_block_tile() : lanes(details::tile_mask(Size)) {}
  static constexpr unsigned size() { return Size; }
  static constexpr unsigned num_threads() { return Size; }
  SIMT_UNWATCHED unsigned thread_rank() const { return details::me().lane % Size; }
  SIMT_UNWATCHED unsigned meta_group_rank() const { return details::me().rank / Size; }
  SIMT_UNWATCHED unsigned meta_group_size() const {
    return (details::me().block->size + Size - 1) / Size;
  }
};

template <unsigned Size, class Parent>
SIMT_UNWATCHED thread_block_tile<Size, Parent> tiled_partition(const Parent&) {
  return {};
}

class coalesced_group : public details::lanes {
 public:
  using lanes::lanes;
};
SIMT_UNWATCHED inline coalesced_group coalesced_threads(SIMT_HERE) {
  return coalesced_group(simt::converge(here));
}

template <class Group>
SIMT_UNWATCHED coalesced_group labeled_partition(const Group& group, unsigned label, SIMT_HERE) {
  return coalesced_group(__match_any_sync(group.mask(), label, here));
}
template <class Group>
SIMT_UNWATCHED coalesced_group binary_partition(const Group& group, bool predicate, SIMT_HERE) {
  const unsigned yes = __ballot_sync(group.mask(), predicate, here);
  return coalesced_group(predicate ? yes : group.mask() & ~yes);
}

// ---- clusters of blocks ----

class cluster_group {
 public:
  static SIMT_UNWATCHED void sync(SIMT_HERE) { simt::cluster_barrier(here); }
  // The two halves of sync(). All the waiting is done in the second: a kernel cannot tell.
  static SIMT_UNWATCHED void barrier_arrive() {}
  static SIMT_UNWATCHED void barrier_wait(SIMT_HERE) { simt::cluster_barrier(here); }
  static SIMT_UNWATCHED unsigned block_rank() { return details::me().block->rank; }
  static SIMT_UNWATCHED unsigned num_blocks() { return simt::cluster_blocks(); }
  static SIMT_UNWATCHED unsigned thread_rank() {
    return block_rank() * details::me().block->size + details::me().rank;
  }
  static SIMT_UNWATCHED unsigned num_threads() { return num_blocks() * details::me().block->size; }
  static SIMT_UNWATCHED unsigned size() { return num_threads(); }
  static SIMT_UNWATCHED dim3 dim_blocks() { return simt::cluster_shape(); }
  static SIMT_UNWATCHED dim3 block_index() {
    const dim3 shape = simt::cluster_shape();
    const uint3& block = details::me().block->index;
    return dim3(block.x % shape.x, block.y % shape.y, block.z % shape.z);
  }
  // The same variable in the shared memory of another block of the cluster.
  template <class T>
  static SIMT_UNWATCHED T* map_shared_rank(T* p, unsigned rank, SIMT_HERE) {
    const void* mine = const_cast<const void*>(static_cast<const volatile void*>(p));
    return static_cast<T*>(const_cast<void*>(simt::shared_of_rank(mine, rank, here)));
  }
  template <class T>
  static SIMT_UNWATCHED unsigned query_shared_rank(const T* p) {
    return simt::rank_of_shared(p);
  }
};
inline cluster_group this_cluster() { return {}; }

// ---- functions on groups ----

template <class Group>
SIMT_UNWATCHED void sync(const Group& group, SIMT_HERE) {
  group.sync(here);
}
template <class Group>
SIMT_UNWATCHED unsigned thread_rank(const Group& group) {
  return group.thread_rank();
}
template <class Group>
SIMT_UNWATCHED unsigned group_size(const Group& group) {
  return group.size();
}
template <class Group, class F>
void invoke_one(const Group& group, F&& f) {
  if (group.thread_rank() == 0) f();
}

template <class T>
struct plus {
  T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct less {
  T operator()(T a, T b) const { return b < a ? b : a; }
};
template <class T>
struct greater {
  T operator()(T a, T b) const { return a < b ? b : a; }
};
template <class T>
struct bit_and {
  T operator()(T a, T b) const { return a & b; }
};
template <class T>
struct bit_or {
  T operator()(T a, T b) const { return a | b; }
};
template <class T>
struct bit_xor {
  T operator()(T a, T b) const { return a ^ b; }
};

}  // namespace cooperative_groups
