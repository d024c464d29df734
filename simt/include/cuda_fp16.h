// The toolkit's <cuda_fp16.h>, and what it has for the GPU only.
#pragma once
#include_next <cuda_fp16.h>

#include "simt/half.h"

SIMT_DEFINE_HALF(__half, __half2, __half2float, __float2half, __double2half, __half2)
