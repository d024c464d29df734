// The toolkit's <cuda_bf16.h>, and what it has for the GPU only.
#pragma once
#include_next <cuda_bf16.h>
