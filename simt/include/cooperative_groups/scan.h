// cooperative_groups::inclusive_scan and exclusive_scan for tiles and coalesced groups.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class T, class F>
T inclusive_scan(const Group& group, T value, F f, SIMT_HERE) {
  const unsigned rank = group.thread_rank(), size = group.num_threads();
  for (unsigned step = 1; step < size; step *= 2) {
    const T other = group.shfl_up(value, step, here);
    if (rank >= step) value = f(other, value);
  }
  return value;
}

template <class Group, class T>
T inclusive_scan(const Group& group, T value, SIMT_HERE) {
  return inclusive_scan(group, value, plus<T>(), here);
}

// Rank 0 gets T(), which is right for plus, bit_or and bit_xor.
template <class Group, class T, class F>
T exclusive_scan(const Group& group, T value, F f, SIMT_HERE) {
  const T before = group.shfl_up(inclusive_scan(group, value, f, here), 1, here);
  return group.thread_rank() == 0 ? T() : before;
}

template <class Group, class T>
T exclusive_scan(const Group& group, T value, SIMT_HERE) {
  return exclusive_scan(group, value, plus<T>(), here);
}

}  // namespace cooperative_groups
