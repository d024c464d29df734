// Stands in for the toolkit's <cuda_runtime.h> when a .cu file is compiled for the CPU machine.
#pragma once
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(SIMT_CHECK) && defined(__clang__) && __clang_major__ < 16
// Older clangs have copies of structs call these, and expect them to be watched. So they shall be.
asm("memcpy = __tsan_memcpy\nmemmove = __tsan_memmove\nmemset = __tsan_memset");
#endif

#include "simt/api.h"
#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/launch.h"
#include "simt/machine.h"
#include "simt/math.h"
#include "simt/shared.h"
#include "simt/warp.h"
