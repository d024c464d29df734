// cooperative_groups::reduce for tiles and coalesced groups.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

// Any number of lanes: each takes in what the lane `step` ranks above has, then all ask rank 0.
template <class Group, class T, class F>
T reduce(const Group& group, T value, F f, SIMT_HERE) {
  const unsigned rank = group.thread_rank(), size = group.num_threads();
  for (unsigned step = 1; step < size; step *= 2) {
    const T other = group.shfl_down(value, step, here);
    if (rank % (2 * step) == 0 && rank + step < size) value = f(value, other);
  }
  return group.shfl(value, 0, here);
}

}  // namespace cooperative_groups
