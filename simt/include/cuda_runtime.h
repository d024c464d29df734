// Stands in for the toolkit's <cuda_runtime.h> when a .cu file is compiled for the CPU machine.
#pragma once
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "simt/api.h"
#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/launch.h"
#include "simt/machine.h"
#include "simt/math.h"
#include "simt/shared.h"
#include "simt/warp.h"
