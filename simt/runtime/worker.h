// Running blocks on one thread of the host: who runs next, who waits for whom.
#pragma once
#include <memory>

#include "../include/simt/machine.h"
#include "fiber.h"
#include "run.h"

namespace simt {

// A worker prepared for blocks of this launch's shape. Workers are kept between launches, because
// their stacks and shared memory are dear.
std::unique_ptr<Worker> borrow_worker(Launch& launch);
void return_worker(std::unique_ptr<Worker> w);

// Runs the blocks of one cluster (usually one block) to their end, on the calling host thread.
void run_cluster(Worker& w, uint64_t cluster);

}  // namespace simt
