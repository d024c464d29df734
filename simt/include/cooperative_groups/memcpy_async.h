// cooperative_groups::memcpy_async: the group copies at once, element by element.
#pragma once
#include "../cooperative_groups.h"

namespace cooperative_groups {

template <class Group, class T>
void memcpy_async(const Group& group, T* to, const T* from, size_t bytes) {
  for (size_t i = group.thread_rank(); i < bytes / sizeof(T); i += group.num_threads()) {
    to[i] = from[i];
  }
}

template <class Group>
void wait(const Group& group, SIMT_HERE) {
  group.sync(here);
}

template <unsigned Stages, class Group>
void wait_prior(const Group& group, SIMT_HERE) {
  group.sync(here);
}

}  // namespace cooperative_groups
