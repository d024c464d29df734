// What cudaFuncSetAttribute has said about kernels.
#pragma once
#include <cstddef>

namespace simt {
size_t dynamic_shared_limit(const void* kernel);  // 0 if nothing was said
unsigned largest_cluster(const void* kernel);     // how many blocks it may have
}  // namespace simt
