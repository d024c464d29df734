// Barriers, shuffles, votes: what the threads of a block and the lanes of a warp do together.
#pragma once
#include "machine.h"

// ---- the whole block ----

inline SIMT_UNWATCHED void __syncthreads(SIMT_HERE) {
  ::simt::block_barrier("__syncthreads()", here);
}
inline SIMT_UNWATCHED int __syncthreads_count(int predicate, SIMT_HERE) {
  return ::simt::block_vote(
      "__syncthreads_count()", [](int a, int b) { return a + b; }, 0, predicate != 0, here);
}
inline SIMT_UNWATCHED int __syncthreads_and(int predicate, SIMT_HERE) {
  return ::simt::block_vote(
      "__syncthreads_and()", [](int a, int b) { return a & b; }, 1, predicate != 0, here);
}
inline SIMT_UNWATCHED int __syncthreads_or(int predicate, SIMT_HERE) {
  return ::simt::block_vote(
      "__syncthreads_or()", [](int a, int b) { return a | b; }, 0, predicate != 0, here);
}

// ---- the lanes of a warp ----

namespace simt {

// Calls f(lane) for every lane in the mask.
template <class F>
SIMT_UNWATCHED void for_lanes(Thread* lanes, unsigned mask, F f) {
  for (unsigned rest = mask; rest; rest &= rest - 1) f(lanes[__builtin_ctz(rest)]);
}

template <class T>
SIMT_UNWATCHED T input_of(const Thread& lane) {
  T value;
  memcpy(static_cast<void*>(&value), lane.in, sizeof value);
  return value;
}

template <class T>
SIMT_UNWATCHED void give(Thread& lane, const T& value) {
  memcpy(lane.out, &value, sizeof value);
}

[[noreturn]] void fail_absent_lane(const Thread& reader);

template <class T>
SIMT_UNWATCHED void compute_shuffle(Thread* lanes, unsigned arrived) {
  for_lanes(lanes, arrived, [&](Thread& lane) {
    if (!(arrived >> lane.source & 1)) fail_absent_lane(lane);
    memcpy(lane.out, lanes[lane.source].in, sizeof(T));
  });
}

template <class T, class Operation>
SIMT_UNWATCHED void compute_reduction(Thread* lanes, unsigned arrived) {
  T total = input_of<T>(lanes[__builtin_ctz(arrived)]);
  for_lanes(lanes, arrived & (arrived - 1),
            [&](Thread& lane) { total = Operation::of(total, input_of<T>(lane)); });
  for_lanes(lanes, arrived, [&](Thread& lane) { give(lane, total); });
}

SIMT_UNWATCHED inline unsigned votes_of(Thread* lanes, unsigned arrived) {
  unsigned votes = 0;
  for_lanes(lanes, arrived, [&](Thread& lane) {
    if (input_of<int>(lane) != 0) votes |= 1u << lane.lane;
  });
  return votes;
}
SIMT_UNWATCHED inline void compute_ballot(Thread* lanes, unsigned arrived) {
  const unsigned votes = votes_of(lanes, arrived);
  for_lanes(lanes, arrived, [&](Thread& lane) { give(lane, votes); });
}
SIMT_UNWATCHED inline void compute_any(Thread* lanes, unsigned arrived) {
  const int any = votes_of(lanes, arrived) != 0;
  for_lanes(lanes, arrived, [&](Thread& lane) { give(lane, any); });
}
SIMT_UNWATCHED inline void compute_all(Thread* lanes, unsigned arrived) {
  const int all = votes_of(lanes, arrived) == arrived;
  for_lanes(lanes, arrived, [&](Thread& lane) { give(lane, all); });
}

template <class T>
SIMT_UNWATCHED void compute_match_any(Thread* lanes, unsigned arrived) {
  for_lanes(lanes, arrived, [&](Thread& lane) {
    unsigned same = 0;
    for_lanes(lanes, arrived, [&](Thread& other) {
      if (memcmp(lane.in, other.in, sizeof(T)) == 0) same |= 1u << other.lane;
    });
    give(lane, same);
  });
}

template <class T>
SIMT_UNWATCHED void compute_match_all(Thread* lanes, unsigned arrived) {
  const Thread& first = lanes[__builtin_ctz(arrived)];
  bool all = true;
  for_lanes(lanes, arrived, [&](Thread& lane) {
    if (memcmp(lane.in, first.in, sizeof(T)) != 0) all = false;
  });
  for_lanes(lanes, arrived, [&](Thread& lane) { give(lane, all ? arrived : 0u); });
}

SIMT_UNWATCHED inline void compute_nothing(Thread*, unsigned) {}

struct Add {
  template <class T>
  static T of(T a, T b) {
    return a + b;
  }
};
struct Min {
  template <class T>
  static T of(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return a < b ? b : a;
  }
};
struct And {
  template <class T>
  static T of(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T of(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T of(T a, T b) {
    return a ^ b;
  }
};

SIMT_UNWATCHED inline int lane() { return static_cast<int>(thread->lane); }
// The first and the last lane of the group of `width` lanes that the caller is in.
SIMT_UNWATCHED inline int first_of(int width) { return lane() & ~(width - 1); }
SIMT_UNWATCHED inline int last_of(int width) { return lane() | (width - 1); }

template <class T>
SIMT_UNWATCHED T shuffle(const char* what, unsigned mask, T value, int source, const Place& here) {
  return warp_operation<T>(what, &compute_shuffle<T>, mask, value, source, here);
}

}  // namespace simt

inline SIMT_UNWATCHED void __syncwarp(unsigned mask = ~0u, SIMT_HERE) {
  ::simt::warp_wait("__syncwarp()", &::simt::compute_nothing, mask, here);
}

inline SIMT_UNWATCHED unsigned __activemask(SIMT_HERE) { return ::simt::converge(here); }

template <class T>
SIMT_FN T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
  return ::simt::shuffle("__shfl_sync()", mask, value,
                         ::simt::first_of(width) | (source & (width - 1)), here);
}
template <class T>
SIMT_FN T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int source = ::simt::lane() - static_cast<int>(by);
  return ::simt::shuffle("__shfl_up_sync()", mask, value,
                         source < ::simt::first_of(width) ? ::simt::lane() : source, here);
}
template <class T>
SIMT_FN T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int source = ::simt::lane() + static_cast<int>(by);
  return ::simt::shuffle("__shfl_down_sync()", mask, value,
                         source > ::simt::last_of(width) ? ::simt::lane() : source, here);
}
template <class T>
SIMT_FN T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_HERE) {
  const int source = ::simt::lane() ^ bits;
  return ::simt::shuffle("__shfl_xor_sync()", mask, value,
                         source > ::simt::last_of(width) ? ::simt::lane() : source, here);
}

inline SIMT_UNWATCHED unsigned __ballot_sync(unsigned mask, int predicate, SIMT_HERE) {
  return ::simt::warp_operation<unsigned>("__ballot_sync()", &::simt::compute_ballot, mask,
                                          predicate, 0, here);
}
inline SIMT_UNWATCHED int __any_sync(unsigned mask, int predicate, SIMT_HERE) {
  return ::simt::warp_operation<int>("__any_sync()", &::simt::compute_any, mask, predicate, 0,
                                     here);
}
inline SIMT_UNWATCHED int __all_sync(unsigned mask, int predicate, SIMT_HERE) {
  return ::simt::warp_operation<int>("__all_sync()", &::simt::compute_all, mask, predicate, 0,
                                     here);
}

template <class T>
SIMT_FN unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
  return ::simt::warp_operation<unsigned>("__match_any_sync()", &::simt::compute_match_any<T>, mask,
                                          value, 0, here);
}
template <class T>
SIMT_FN unsigned __match_all_sync(unsigned mask, T value, int* all, SIMT_HERE) {
  const unsigned same = ::simt::warp_operation<unsigned>(
      "__match_all_sync()", &::simt::compute_match_all<T>, mask, value, 0, here);
  *all = same != 0;
  return same;
}

#define SIMT_WARP_REDUCTION(name, operation)                                                       \
  template <class T>                                                                               \
  SIMT_UNWATCHED T name(unsigned mask, T value, SIMT_HERE) {                                       \
    static_assert(sizeof(T) == 4, #name " takes int or unsigned");                                 \
    return ::simt::warp_operation<T>(#name "()", &::simt::compute_reduction<T, ::simt::operation>, \
                                     mask, value, 0, here);                                        \
  }
SIMT_WARP_REDUCTION(__reduce_add_sync, Add)
SIMT_WARP_REDUCTION(__reduce_min_sync, Min)
SIMT_WARP_REDUCTION(__reduce_max_sync, Max)
SIMT_WARP_REDUCTION(__reduce_and_sync, And)
SIMT_WARP_REDUCTION(__reduce_or_sync, Or)
SIMT_WARP_REDUCTION(__reduce_xor_sync, Xor)
#undef SIMT_WARP_REDUCTION
