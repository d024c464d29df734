// Which memory a kernel may touch: the checker keeps account of it.
#pragma once
#include <cstddef>

#include "../include/simt/machine.h"

namespace simt {
#if SIMT_CHECKED
void memory_appeared(const void* p, size_t bytes, const char* name);
void memory_vanished(const void* p);
#else
inline void memory_appeared(const void*, size_t, const char*) {}
inline void memory_vanished(const void*) {}
#endif
}  // namespace simt
