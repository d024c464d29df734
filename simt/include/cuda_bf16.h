// The toolkit's <cuda_bf16.h>, and what it has for the GPU only.
#pragma once
#include_next <cuda_bf16.h>

#include "simt/half.h"

SIMT_DEFINE_HALF(__nv_bfloat16, __nv_bfloat162, __bfloat162float, __float2bfloat16,
                 __double2bfloat16, __bfloat162)
