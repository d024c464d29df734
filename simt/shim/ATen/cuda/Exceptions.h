// Stands in for torch's header of this name: see simt_torch.h.
#pragma once
#include "../../simt_torch.h"
