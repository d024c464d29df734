// One launch while it runs.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "../include/simt/launch.h"

namespace simt {

enum class Stop : int { kNo, kFault, kInterrupt, kWatchdog };

// The orders in which the machine can run the threads of a block: SIMT_ORDER.
enum class Order { kForward, kReverse, kShuffle };
Order thread_order();

struct Launch {
  explicit Launch(const Request& r) : request(r) {}

  const Request& request;
  const Order order = thread_order();
  unsigned cluster_size = 1;
  uint64_t clusters = 0;                  // in the whole grid
  std::atomic<uint64_t> next_cluster{0};  // clusters start in order of their number
  std::atomic<Stop> stop{Stop::kNo};

  std::mutex mutex;  // guards the fault
  cudaError_t code = cudaSuccess;
  std::string message;
};

}  // namespace simt
