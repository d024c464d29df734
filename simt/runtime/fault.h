// Faults: how the machine says what went wrong, where, and what to do next.
#pragma once
#include <string>
#include <vector>

#include "run.h"

namespace simt {

// Records a fault, and goes on; nothing more will start.
void fail_here(Launch& launch, cudaError_t code, const std::string& message,
               const Thread* who = thread);

constexpr const char* kStackUsedUp =
    " has used up its 128 KB of local memory.\n  Next: bound the recursion, or make local arrays "
    "smaller.";

void flush_output();  // what kernels printed

// Who waits where among the threads of the calling worker.
std::string waiting_threads();

constexpr const char* kUnknownLine = "an unknown line";

// The line of the learner's file that the instruction before `pc` was compiled from.
std::string line_of(const void* pc);
// Several at once cost one run of addr2line, not several.
void look_up_lines(const std::vector<const void*>& pcs);

// The error that cudaGetLastError will return, with the text that cudaGetErrorString adds to it.
void set_last_error(cudaError_t code, const std::string& message);
void forget_last_message();  // what was said about earlier launches
void set_interrupted();      // Ctrl-C ended a launch

}  // namespace simt
