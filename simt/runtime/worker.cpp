#include "worker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>

#include "checks.h"
#if SIMT_CHECKED
#include "checker.h"
#endif
#include "fault.h"
#include "shared.h"

namespace simt {
SIMT_HIDDEN __thread Worker* worker = nullptr;
SIMT_HIDDEN __thread Thread* thread = nullptr;
}  // namespace simt

SIMT_HIDDEN __thread uint3 threadIdx, blockIdx;
SIMT_HIDDEN __thread simt::Dim blockDim, gridDim;

namespace simt {

Order thread_order() {
  const char* wish = getenv("SIMT_ORDER");
  if (wish == nullptr) return Order::kForward;
  return *wish == 'r' ? Order::kReverse : Order::kShuffle;
}

namespace {

// ---- the ready ring, and leaving a fiber ----

void make_ready(Worker& w, Thread* t) {
  const size_t size = w.ready.size();
  w.ready[(w.ready_head + w.ready_count++) % size] = t;
}

Thread* take_ready(Worker& w) {
  Thread* t = w.ready[w.ready_head];
  w.ready_head = (w.ready_head + 1) % w.ready.size();
  w.ready_count--;
  return t;
}

void release(Worker& w, Thread& t) {
  t.state = State::kRunning;
  if (&t != thread) make_ready(w, &t);
}

[[noreturn]] void leave_for_host(Worker& w) {
  Fiber abandoned;
  switch_fiber(&abandoned, &w.stacks->host);
  abort();  // not reached: nobody switches back
}

void fiber_main();

bool release_converged(Worker& w);
[[noreturn]] void report_deadlock(Worker& w);

// Leaves the running fiber for whatever can run next.
void run_something_else(Worker& w, Fiber* from) {
  if (w.stopped) leave_for_host(w);
  if (w.ready_count == 0 && w.next == w.order.size() && w.alive != 0) {
    if (!release_converged(w)) report_deadlock(w);
    if (thread && thread->state == State::kRunning) return;  // it was the one to be released
  }
  if (w.ready_count != 0) {
    Thread* t = take_ready(w);
    make_current(t);
    switch_fiber(from, t->fiber);
  } else if (w.next != w.order.size()) {
    switch_fiber(from, w.stacks->take(&fiber_main));
  } else {
    switch_fiber(from, &w.stacks->host);
  }
}

// The running thread waits: others run until somebody has released it.
void wait_here(Worker& w) {
  Thread* me = thread;
  run_something_else(w, me->fiber);
  make_current(me);
}

void fiber_main() {
  fiber_entered();
  Worker& w = *worker;
  Fiber* me = &w.stacks->fibers[w.stacks->used - 1];
  w.launch->request.loop(w.launch->request.body, me);
  thread = nullptr;  // this fiber has none any more
  run_something_else(w, me);
  abort();  // not reached: a fiber without a thread is not resumed
}

// ---- what the waiting threads wait for ----

std::string who_waits_where(Worker& w) {
  struct Group {
    unsigned count = 0;
    const Thread* example = nullptr;
  };
  std::map<std::string, Group> groups;
  unsigned returned = 0;
  for (unsigned i = 0; i < w.next; i++) {  // the others have not started
    const Thread* t = w.order[i];
    if (t->state == State::kDone) returned++;
    if (t->state == State::kDone || t->state == State::kRunning) continue;
    Group& group = groups[std::string(t->waits_in) + " at " + describe(t->place)];
    if (group.count++ == 0) group.example = t;
  }
  std::string text;
  for (const auto& [where, group] : groups) {
    text += "\n  " + std::to_string(group.count) + (group.count == 1 ? " waits" : " wait") +
            " in " + where + ", for example " + describe(*group.example);
  }
  if (returned) text += "\n  " + std::to_string(returned) + " returned from the kernel";
  return text;
}

void report_deadlock(Worker& w) {
  fail(cudaErrorLaunchTimeout,
       "deadlock: no thread of the block can go on." + who_waits_where(w) +
           "\n  Next: make all of these threads reach the same barrier (or name in the mask only "
           "the lanes that do).");
}

// ---- barriers ----

void shuffle(std::vector<Thread*>::iterator begin, std::vector<Thread*>::iterator end) {
  static std::mt19937 random(1);
  std::shuffle(begin, end, random);
}

void open_block_barrier(Worker& w, Block& b) {
  b.waiting = 0;
  b.votes++;
  b.epoch = ++w.epochs;
  w.progress++;
  checks::barrier_opens(w, b);
  const Order order = w.launch->order;
  if (order == Order::kForward) {
    for (unsigned i = 0; i < b.size; i++) {
      if (b.threads[i].state == State::kAtBarrier) release(w, b.threads[i]);
    }
    return;
  }
  std::vector<Thread*> released;
  for (unsigned i = 0; i < b.size; i++) {
    if (b.threads[i].state == State::kAtBarrier) released.push_back(&b.threads[i]);
  }
  if (order == Order::kReverse) std::reverse(released.begin(), released.end());
  if (order == Order::kShuffle) shuffle(released.begin(), released.end());
  for (Thread* t : released) release(w, *t);
}

void open_cluster_barrier(Worker& w) {
  w.cluster_waiting = 0;
  w.cluster_epoch = w.epochs;
  w.progress++;
  for (Block& b : w.blocks) {
    b.epoch = ++w.epochs;
    checks::barrier_opens(w, b);
  }
  for (Thread& t : w.threads) {
    if (t.state == State::kAtClusterBarrier) release(w, t);
  }
}

// ---- warp operations ----

// Completes the operation that `t` waits in, if all lanes it names are in it.
void try_warp_operation(Worker& w, Thread& t) {
  Warp& warp = w.warps[t.warp];
  Thread* lanes = &t - t.lane;
  const unsigned needed = t.mask & warp.live;
  if (needed & ~warp.arrived) return;
  for (unsigned rest = needed; rest; rest &= rest - 1) {
    const Thread& lane = lanes[__builtin_ctz(rest)];
    if (lane.operation != t.operation || lane.mask != t.mask) return;
  }
  warp.epoch++;
  if (t.operation) t.operation(lanes, needed);
  warp.arrived &= ~needed;
  for (unsigned rest = needed; rest; rest &= rest - 1) release(w, lanes[__builtin_ctz(rest)]);
}

// Lanes that ask who is here with them (__activemask) get their answer when nothing else can run:
// all that have come to the same place by then.
bool release_converged(Worker& w) {
  for (Thread& first : w.threads) {
    if (first.state != State::kConverging) continue;
    Thread* lanes = &first - first.lane;
    unsigned together = 0;
    for (unsigned i = 0; i < kWarpSize; i++) {
      if (lanes[i].state == State::kConverging && lanes[i].place.line == first.place.line) {
        together |= 1u << i;
      }
    }
    for (unsigned rest = together; rest; rest &= rest - 1) {
      Thread& lane = lanes[__builtin_ctz(rest)];
      lane.mask = together;
      release(w, lane);
    }
    return true;
  }
  return false;
}

// ---- preparing a worker ----

void shape_blocks(Worker& w, const Launch& launch) {
  const dim3 size = launch.request.block;
  const unsigned block_threads = size.x * size.y * size.z;
  const unsigned block_warps = (block_threads + kWarpSize - 1) / kWarpSize;
  w.blocks.assign(launch.cluster_size, Block{});
  w.threads.assign(launch.cluster_size * block_warps * kWarpSize, Thread{});
  w.warps.assign(launch.cluster_size * block_warps, Warp{});
  w.order.clear();
  for (unsigned k = 0; k < launch.cluster_size; k++) {
    Block& b = w.blocks[k];
    b.rank = k;
    b.size = block_threads;
    b.threads = &w.threads[k * block_warps * kWarpSize];
    b.first_warp = k * block_warps;
    b.shared = w.shared + k * kSharedArena;
    for (unsigned i = 0; i < block_warps * kWarpSize; i++) {
      Thread& t = b.threads[i];
      t.rank = i;
      t.lane = i % kWarpSize;
      t.warp = b.first_warp + i / kWarpSize;
      t.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
      t.block = &b;
      if (i < block_threads) w.order.push_back(&t);
    }
  }
  const Order order = launch.order;
  if (order == Order::kReverse) std::reverse(w.order.begin(), w.order.end());
  if (order == Order::kShuffle) shuffle(w.order.begin(), w.order.end());
  w.ready.assign(w.order.size(), nullptr);
}

void reserve_shared_memory(Worker& w, unsigned cluster_size) {
  if (w.shared_blocks >= cluster_size) return;
  if (w.shared) munmap(w.shared, w.shared_blocks * kSharedArena);
  void* p = mmap(nullptr, cluster_size * kSharedArena, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  w.shared = static_cast<char*>(p);
  w.shared_blocks = cluster_size;
}

std::mutex shelf_mutex;
std::vector<std::unique_ptr<Worker>>& shelf() {
  static auto* workers = new std::vector<std::unique_ptr<Worker>>;  // never destroyed: see exit()
  return *workers;
}

}  // namespace

std::unique_ptr<Worker> borrow_worker(Launch& launch) {
  std::unique_ptr<Worker> w;
  {
    std::lock_guard<std::mutex> guard(shelf_mutex);
    if (!shelf().empty()) {
      w = std::move(shelf().back());
      shelf().pop_back();
    }
  }
  if (!w) w = std::make_unique<Worker>();
  w->launch = &launch;
  w->stopped = false;
  reserve_shared_memory(*w, launch.cluster_size);
  shape_blocks(*w, launch);
  if (w->stacks == nullptr || w->stacks->fibers.size() < w->order.size()) {
    delete w->stacks;
    w->stacks = new Stacks(w->order.size());
  }
  w->stacks->host = Fiber();
  return w;
}

void return_worker(std::unique_ptr<Worker> w) {
  w->launch = nullptr;
  w->stacks->give_back_memory();
  std::lock_guard<std::mutex> guard(shelf_mutex);
  shelf().push_back(std::move(w));
}

void run_cluster(Worker& w, uint64_t cluster) {
  const Request& request = w.launch->request;
  const dim3 grid = request.grid, shape = request.cluster;
  const uint64_t clusters_x = grid.x / shape.x, clusters_y = grid.y / shape.y;
  const uint64_t first_x = cluster % clusters_x * shape.x;
  const uint64_t first_y = cluster / clusters_x % clusters_y * shape.y;
  const uint64_t first_z = cluster / (clusters_x * clusters_y) * shape.z;
  w.first_epoch = w.epochs + 1;
  w.cluster_epoch = 0;
  for (Block& b : w.blocks) {
    b.index = {static_cast<unsigned>(first_x + b.rank % shape.x),
               static_cast<unsigned>(first_y + b.rank / shape.x % shape.y),
               static_cast<unsigned>(first_z + b.rank / (shape.x * shape.y))};
    b.number =
        static_cast<uint32_t>(b.index.x + grid.x * (b.index.y + uint64_t{grid.y} * b.index.z));
    b.alive = b.size;
    b.waiting = 0;
    b.votes = 0;
    b.epoch = ++w.epochs;
    const unsigned block_warps = (b.size + kWarpSize - 1) / kWarpSize;
    for (unsigned i = 0; i < block_warps; i++) {
      const unsigned lanes = std::min(b.size - i * kWarpSize, kWarpSize);
      Warp& warp = w.warps[b.first_warp + i];
      warp.live = lanes == kWarpSize ? ~0u : (1u << lanes) - 1;
      warp.arrived = 0;
    }
  }
  w.next = w.ready_head = w.ready_count = w.cluster_waiting = 0;
  w.alive = static_cast<unsigned>(w.order.size());
  w.stacks->reset();
  blockDim = {request.block.x, request.block.y, request.block.z};
  gridDim = {grid.x, grid.y, grid.z};
  checks::blocks_start(w);
  switch_fiber(&w.stacks->host, w.stacks->take(&fiber_main));
  thread = nullptr;
  if (w.stacks->overflowed()) {
    fail_here(*w.launch, cudaErrorLaunchFailure, "a thread" + std::string(kStackUsedUp));
  } else if (!w.stopped) {
    checks::blocks_end(w);
  }
}

// ---- called from the kernel ----

#if SIMT_CHECKED
void warp_is_over(Worker& w, unsigned warp) { checks::finish_warp(w, warp); }
#endif

namespace {
bool same(const Place& a, const Place& b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}
}  // namespace

void leave_if_stopped() {
  Worker& w = *worker;
  if (w.launch->stop.load(std::memory_order_relaxed) == Stop::kNo) return;
  w.stopped = true;
  leave_for_host(w);
}

void thread_returned_while_others_wait(Thread& t) {
  Worker& w = *worker;
  Block& b = *t.block;
  if (b.waiting && b.waiting == b.alive) open_block_barrier(w, b);
  if (w.cluster_waiting && w.cluster_waiting == w.alive) open_cluster_barrier(w);
  for (unsigned rest = w.warps[t.warp].arrived; rest;) {
    Thread& lane = (&t - t.lane)[__builtin_ctz(rest)];
    try_warp_operation(w, lane);
    rest &= rest - 1;
    rest &= w.warps[t.warp].arrived;
  }
}

void block_barrier(const char* what, const Place& here) {
  InMachine guard;
  Worker& w = *worker;
  Thread& t = *thread;
  Block& b = *t.block;
  leave_if_stopped();
  t.waits_in = what;
  t.place = here;
  if (b.waiting == 0) {
    b.first_to_wait = &t;
  } else if (!same(b.first_to_wait->place, here)) {
    fail(
        cudaErrorLaunchFailure,
        "barrier divergence: " + describe(t) + " waits in " + what + " at " + describe(here) +
            ", but " + describe(*b.first_to_wait) + " waits in another one, " +
            b.first_to_wait->waits_in + " at " + describe(b.first_to_wait->place) +
            ".\n  Next: take the barrier out of the branch, so that all threads meet in one line.");
  }
  if (b.waiting == 0) checks::barrier_reached(here);
  t.state = State::kAtBarrier;
  if (++b.waiting == b.alive) {
    open_block_barrier(w, b);
  } else {
    wait_here(w);
  }
}

int block_vote(const char* what, int (*combine)(int, int), int start, int value,
               const Place& here) {
  InMachine guard;
  Block& b = *thread->block;
  // Results of three consecutive votes are kept apart: while slow threads read one, fast ones may
  // already be in the next, which no thread can leave before all have read.
  const unsigned number = b.votes;
  int& result = b.vote[number % 3];
  if (b.waiting == 0) result = start;
  result = combine(result, value);
  block_barrier(what, here);
  return result;
}

void cluster_barrier(const Place& here) {
  InMachine guard;
  Worker& w = *worker;
  leave_if_stopped();
  thread->waits_in = "cluster.sync()";
  thread->place = here;
  if (w.cluster_waiting == 0) checks::barrier_reached(here);
  thread->state = State::kAtClusterBarrier;
  if (++w.cluster_waiting == w.alive) {
    open_cluster_barrier(w);
  } else {
    wait_here(w);
  }
}

unsigned cluster_blocks() { return static_cast<unsigned>(worker->blocks.size()); }

dim3 cluster_shape() { return worker->launch->request.cluster; }

unsigned rank_of_shared(const void* p) {
  return static_cast<unsigned>((static_cast<const char*>(p) - worker->shared) / kSharedArena);
}

const void* shared_of_rank(const void* p, unsigned rank, const Place& here) {
  InMachine guard;
  const size_t offset = static_cast<size_t>(static_cast<const char*>(p) - worker->shared);
  if (offset >= cluster_blocks() * kSharedArena || rank >= cluster_blocks()) {
    fail(
        cudaErrorIllegalAddress,
        describe(*thread) + " calls map_shared_rank() at " + describe(here) + " for block " +
            std::to_string(rank) + " of a cluster of " + std::to_string(cluster_blocks()) +
            ", or with a pointer that does not point to shared memory.\n  Next: pass the address " +
            "of a __shared__ variable, and a rank below cluster.num_blocks().");
  }
  return worker->shared + rank * kSharedArena + offset % kSharedArena;
}

void warp_wait(const char* what, WarpFunction operation, unsigned mask, const Place& here) {
  InMachine guard;
  Worker& w = *worker;
  Thread& t = *thread;
  leave_if_stopped();
  t.waits_in = what;
  t.place = here;
  t.operation = operation;
  t.mask = mask;
  if (!(mask >> t.lane & 1)) {
    fail(cudaErrorLaunchFailure,
         describe(t) + " (lane " + std::to_string(t.lane) + ") calls " + what + " at " +
             describe(here) + " with a mask that leaves it out.\n  Next: every lane that makes " +
             "the call must be in the mask it passes.");
  }
  w.progress++;
  t.state = State::kInWarp;
  w.warps[t.warp].arrived |= 1u << t.lane;
  try_warp_operation(w, t);
  if (t.state == State::kInWarp) wait_here(w);
}

unsigned converge(const Place& here) {
  InMachine guard;
  Thread& t = *thread;
  leave_if_stopped();
  t.waits_in = "__activemask()";
  t.place = here;
  t.state = State::kConverging;
  wait_here(*worker);
  return t.mask;
}

void yield() {
  Worker& w = *worker;
  const bool others_to_start = w.next != w.order.size();
  if (w.ready_count == 0 && !others_to_start) return;
  InMachine guard;
  Thread* me = thread;
  make_ready(w, me);
  // Those that have not started come first: it may be one of them that this thread spins for.
  if (others_to_start) {
    switch_fiber(me->fiber, w.stacks->take(&fiber_main));
  } else {
    run_something_else(w, me->fiber);
  }
  make_current(me);
  checks::resumed(*me);
}

std::string waiting_threads() { return who_waits_where(*worker); }

}  // namespace simt
