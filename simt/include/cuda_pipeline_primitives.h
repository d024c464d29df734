// The toolkit's <cuda_pipeline_primitives.h>: asynchronous copies (cp.async). Here a copy is done at once, so
// the waits find nothing to wait for. What is still needed is the barrier behind the wait, because
// other threads' copies have to be done too; the checker sees to it.
#pragma once
#include "simt/machine.h"

SIMT_INLINE void __pipeline_memcpy_async(void* to, const void* from, size_t bytes,
                                         size_t zeros = 0) {
  struct alignas(4) Four {
    char c[4];
  };
  struct alignas(8) Eight {
    char c[8];
  };
  struct alignas(16) Sixteen {
    char c[16];
  };
  if (zeros == bytes) {
    for (size_t i = 0; i < bytes; i++) static_cast<char*>(to)[i] = 0;
  } else if (bytes == 4) {
    *static_cast<Four*>(to) = *static_cast<const Four*>(from);
  } else if (bytes == 8) {
    *static_cast<Eight*>(to) = *static_cast<const Eight*>(from);
  } else {
    *static_cast<Sixteen*>(to) = *static_cast<const Sixteen*>(from);
  }
}
SIMT_INLINE void __pipeline_commit() {}
SIMT_INLINE void __pipeline_wait_prior(size_t) {}
