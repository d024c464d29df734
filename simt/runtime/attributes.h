// What cudaFuncSetAttribute has said about kernels.
#pragma once
#include <cstddef>

namespace simt {
size_t dynamic_shared_limit(const void* kernel);  // 0 if nothing was said
bool big_clusters_allowed(const void* kernel);
}  // namespace simt
