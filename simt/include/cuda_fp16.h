// The toolkit's <cuda_fp16.h>, and what it has for the GPU only.
#pragma once
#include_next <cuda_fp16.h>
