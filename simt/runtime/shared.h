// What the runtime knows of the static __shared__ variables of this library.
#pragma once
#include <string>
#include <vector>

#include "../include/simt/shared.h"
#include "run.h"

namespace simt {

struct SharedVariable {
  size_t offset, bytes;
  bool may_have_holes;
  std::string name;
  Place place;
};

// In order of their offsets.
const std::vector<SharedVariable>& shared_variables();

// The shared memory that the kernel at this launch declares, as far as its launches have shown.
size_t static_shared_bytes(const Request& request);

}  // namespace simt
