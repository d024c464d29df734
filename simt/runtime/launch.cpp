// A launch: what the GPU would refuse, then workers that run the blocks and a supervisor over them.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "attributes.h"
#include "checks.h"
#include "fault.h"
#include "shared.h"
#include "signals.h"
#include "worker.h"

namespace simt {

namespace {

std::string text(const dim3& d) {
  return std::to_string(d.x) + " x " + std::to_string(d.y) + " x " + std::to_string(d.z);
}

std::string bytes(size_t n) { return std::to_string(n) + " bytes"; }

// Why a GPU (compute capability 9.0) would refuse the launch; empty if it would not.
std::string refusal(const Request& r) {
  const dim3 g = r.grid, b = r.block, c = r.cluster;
  if (!g.x || !g.y || !g.z) return "the grid is " + text(g) + "; no dimension may be 0";
  if (!b.x || !b.y || !b.z) return "the block is " + text(b) + "; no dimension may be 0";
  if (uint64_t{b.x} * b.y * b.z > kMaxBlockThreads) {
    return "the block is " + text(b) + ", that is " + std::to_string(uint64_t{b.x} * b.y * b.z) +
           " threads; at most 1024 are allowed";
  }
  if (b.z > 64) return "the block is " + text(b) + "; its z may be at most 64";
  if (g.x > 2147483647u || g.y > 65535 || g.z > 65535) {
    return "the grid is " + text(g) + "; y and z may be at most 65535, so put the large one in x";
  }
  const uint64_t cluster = uint64_t{c.x} * c.y * c.z;
  if (cluster == 0 || g.x % c.x || g.y % c.y || g.z % c.z) {
    return "the grid is " + text(g) + ", which clusters of " + text(c) + " do not divide";
  }
  if (cluster > largest_cluster(r.kernel)) {
    return "a cluster has " + std::to_string(cluster) + " blocks; 8 are portable, 16 need " +
           "cudaFuncAttributeNonPortableClusterSizeAllowed";
  }
  const size_t opted = std::max(kDynamicSharedDefault, dynamic_shared_limit(r.kernel));
  if (r.dynamic_shared > opted) {
    return "it asks for " + bytes(r.dynamic_shared) + " of dynamic shared memory, and " +
           bytes(opted) + " are allowed; above 48 KB call cudaFuncSetAttribute(kernel, " +
           "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) first, up to " +
           bytes(kDynamicSharedMax);
  }
  const size_t fixed = static_shared_bytes(r);
  const size_t limit = opted > kDynamicSharedDefault ? kDynamicSharedMax : kDynamicSharedDefault;
  if (fixed + r.dynamic_shared > limit) {
    return "static and dynamic shared memory together are " + bytes(fixed + r.dynamic_shared) +
           "; the limit is " + bytes(limit);
  }
  return "";
}

unsigned host_threads() {
  if (SIMT_CHECKED) return 1;  // what the checker finds must not depend on timing
  if (const char* wish = getenv("SIMT_THREADS")) return std::max(1, atoi(wish));
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return std::max(1u, std::thread::hardware_concurrency());
}

double watchdog_seconds() {
  const char* wish = getenv("SIMT_WATCHDOG");
  return wish ? atof(wish) : 20.0 * (SIMT_CHECKED ? 3 : 1);
}

// The host threads of one launch, and the supervision of them.
class Team {
 public:
  explicit Team(Launch& launch) : launch_(launch) {
    const uint64_t count = std::min<uint64_t>(host_threads(), launch.clusters);
    for (uint64_t i = 0; i < count; i++) workers_.push_back(borrow_worker(launch));
    running_ = workers_.size();
    for (auto& w : workers_) threads_.emplace_back([this, &w] { work(*w); });
  }

  void supervise() {
    using Clock = std::chrono::steady_clock;
    constexpr auto kTick = std::chrono::milliseconds(10);
    uint64_t finished = 0;
    auto finished_at = Clock::now();
    std::vector<uint64_t> seen(workers_.size());
    std::unique_lock<std::mutex> lock(mutex_);
    while (!all_done_.wait_for(lock, kTick, [this] { return running_ == 0; })) {
      const auto now = Clock::now();
      if (finished_.load() != finished) {
        finished = finished_.load();
        finished_at = now;
      }
      const std::chrono::duration<double> stuck = now - finished_at;
      if (interrupt_requested()) stop(Stop::kInterrupt);
      if (stuck.count() > watchdog_seconds()) stop(Stop::kWatchdog);
      for (size_t i = 0; i < workers_.size(); i++) {
        const uint64_t progress = __atomic_load_n(&workers_[i]->progress, __ATOMIC_RELAXED);
        // A thread that got nowhere for a whole tick may spin for another one of its block. One
        // outside of a kernel needs no nudge, and one that is only starting must not get one: the
        // handler would be the first to touch its thread-local storage, which calls malloc().
        const bool in_kernel = workers_[i]->in_kernel;
        if (in_kernel && (progress == seen[i] || launch_.stop.load() != Stop::kNo)) {
          nudge(threads_[i].native_handle());
        }
        seen[i] = progress;
      }
    }
    lock.unlock();
    for (auto& t : threads_) t.join();
    for (auto& w : workers_) return_worker(std::move(w));
  }

 private:
  void work(Worker& w) {
    worker = &w;
    checks::worker_starts(w);
    {
      CrashStack crash_stack;
      for (;;) {
        if (launch_.stop.load(std::memory_order_relaxed) != Stop::kNo) break;
        const uint64_t cluster = launch_.next_cluster.fetch_add(1, std::memory_order_relaxed);
        if (cluster >= launch_.clusters) break;
        run_cluster(w, cluster);
        finished_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    worker = nullptr;
    // The supervisor must still find this thread alive when it nudges it: leave under the lock.
    std::lock_guard<std::mutex> lock(mutex_);
    if (--running_ == 0) all_done_.notify_one();
  }

  void stop(Stop why) {
    Stop no = Stop::kNo;
    launch_.stop.compare_exchange_strong(no, why);
  }

  Launch& launch_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable all_done_;
  size_t running_ = 0;
  std::atomic<uint64_t> finished_{0};
};

std::mutex one_launch_at_a_time;

}  // namespace

dim3 cluster_of(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; i++) {
    const cudaLaunchAttribute& a = config.attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) {
      return dim3(a.val.clusterDim.x, a.val.clusterDim.y, a.val.clusterDim.z);
    }
  }
  return dim3(1, 1, 1);
}

void launch(const Request& request) {
  const std::string launch_line =
      describe(request.site.place) + ": launch of " + request.site.kernel;
  if (thread != nullptr) {
    fail(cudaErrorNotSupported, launch_line + " from inside a kernel: the CPU machine does not " +
                                    "do that.\n  Next: launch it from the host.");
  }
  forget_last_message();
  const std::string why = refusal(request);
  if (!why.empty()) {
    set_last_error(cudaErrorInvalidValue, launch_line + ": " + why + ".");
    return;
  }
  std::lock_guard<std::mutex> guard(one_launch_at_a_time);
  Launch run(request);
  run.cluster_size = request.cluster.x * request.cluster.y * request.cluster.z;
  run.clusters = uint64_t{request.grid.x} * request.grid.y * request.grid.z / run.cluster_size;
  {
    SignalScope signals;
    checks::launch_starts(run);
    Team team(run);
    team.supervise();
    checks::launch_ends(run);
  }
  flush_output();
  if (run.stop.load() == Stop::kInterrupt) {
    set_interrupted();
    set_last_error(cudaErrorLaunchFailure, launch_line + ": interrupted.");
  } else if (run.code != cudaSuccess) {
    set_last_error(run.code, launch_line + "\n  " + run.message);
  } else if (run.stop.load() == Stop::kWatchdog) {
    set_last_error(cudaErrorLaunchTimeout, launch_line + ": the watchdog ended it.");
  }
}

}  // namespace simt
