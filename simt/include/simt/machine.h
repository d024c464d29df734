// The parts of the machine that kernels and the runtime share: a CUDA thread, a block, and the
// worker (one thread of the host) that runs them.
//
// A worker runs the threads of a block one after the other on one fiber, in a plain loop
// (run_threads below). Only a thread that has to wait, at a barrier or in a warp operation, keeps
// its fiber; a second fiber then takes the loop on. So a kernel without barriers never switches.
#pragma once
#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

// The header above has CUDA's attributes in the form that nvcc wants. Here they are plain words.
#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __noinline__
#undef __maxnreg__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)

#define __SIMT_CPU__ 1

#ifdef SIMT_CHECK
#define SIMT_CHECKED 1
#else
#define SIMT_CHECKED 0
#endif

// Code of the machine that is compiled into a kernel's file must not be watched like the kernel.
#define SIMT_UNWATCHED __attribute__((no_sanitize("thread", "undefined")))
// Code that acts for the kernel (a load, say): inlined, so that the access belongs to its line.
#define SIMT_INLINE inline __attribute__((always_inline))
// A call can itself read a class-typed argument from an array, or write its result there, and g++
// does not watch calls. So a checked kernel takes in the functions that it calls, the learner's and
// CUDA's (SIMT_FN): then these are loads and stores like any other. (Recursion stays a call.)
#if SIMT_CHECKED && !defined(__clang__)
#define __global__ __attribute__((flatten))
#define SIMT_NOINLINE
#define SIMT_FN SIMT_UNWATCHED SIMT_INLINE
#else
#define __global__
#define SIMT_NOINLINE __attribute__((noinline))
#define SIMT_FN SIMT_UNWATCHED inline
#endif
// One copy for each loaded library: two rungs in one process must not share state.
#define SIMT_HIDDEN __attribute__((visibility("hidden")))

namespace simt {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxBlockThreads = 1024;
constexpr size_t kDynamicSharedDefault = 48 << 10;  // what a launch may ask for without opting in
constexpr size_t kDynamicSharedMax = 227 << 10;     // what cudaFuncSetAttribute can allow
constexpr size_t kSharedReserved = 1 << 10;  // what CUDA itself takes of every block's 228 KB
constexpr size_t kDynamicArea = 256 << 10;   // static shared memory begins behind it
constexpr size_t kSharedArena = 16 << 20;    // address space per block; pages come on use

// Where in the learner's file something happens. SIMT_HERE as a last parameter is the caller.
struct Place {
  const char* file;
  int line;
};
#define SIMT_HERE const ::simt::Place& here = {__builtin_FILE(), __builtin_LINE()}

struct Block;
struct Fiber;
struct Launch;
struct Thread;
struct Worker;

using WarpFunction = void (*)(Thread* lanes, unsigned arrived);  // computes every lane's result

enum class State : uint8_t { kDone, kRunning, kAtBarrier, kAtClusterBarrier, kInWarp, kConverging };

// One CUDA thread of a block that is being run.
struct Thread {
  uint3 index;    // threadIdx
  unsigned rank;  // number within the block
  unsigned lane;
  unsigned warp;  // number of its warp, counted over all blocks of the worker
  State state = State::kDone;
  Block* block = nullptr;
  Fiber* fiber = nullptr;

  // While it waits: what for, and where.
  const char* waits_in = "";
  Place place = {"", 0};

  // Its part in a warp operation.
  WarpFunction operation = nullptr;
  unsigned mask = 0;
  int source = 0;
  alignas(16) unsigned char in[32];
  alignas(16) unsigned char out[32];
};

struct Warp {
  unsigned live = 0;     // lanes that have not returned
  unsigned arrived = 0;  // lanes that wait in a warp operation
  uint32_t epoch = 0;    // counts the warp's synchronisations
};

struct Block {
  uint3 index;  // blockIdx
  uint32_t number;
  unsigned rank;  // within its cluster
  unsigned size, alive, waiting;
  int vote[3];     // __syncthreads_count and friends: three barriers' worth of results
  unsigned votes;  // counts the barriers that the block has passed
  uint32_t epoch;  // another one after each barrier; never the same in two blocks
  Thread* first_to_wait;
  Thread* threads;
  unsigned first_warp;
  char* shared;  // dynamic shared memory; static variables lie kDynamicArea behind it
};

// A compiler must not move the stores below across the kernel's code. (A signal handler looks.)
SIMT_INLINE void compiler_fence() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// One thread of the host with the blocks it runs: one block, or the blocks of a cluster.
struct Worker {
  Launch* launch = nullptr;
  std::vector<Block> blocks;
  std::vector<Thread> threads;  // of all blocks, each block's padded to whole warps
  std::vector<Warp> warps;
  std::vector<Thread*> order;  // the order in which threads start
  unsigned next = 0;           // the first of them that has not started
  std::vector<Thread*> ready;  // ring: threads that waited and can go on
  unsigned ready_head = 0, ready_count = 0;
  unsigned alive = 0, cluster_waiting = 0;
  uint32_t epochs = 0;
  uint64_t progress = 0;            // grows whenever a thread starts or a barrier opens
  volatile bool in_kernel = false;  // true while kernel code runs, where it may be interrupted
  bool stopped = false;             // a fault was found: start no more threads

  // For the checker: where threadIdx and its like are, and the kernel's arguments.
  const char *tls_low = nullptr, *tls_high = nullptr;
  const char *arguments_low = nullptr, *arguments_high = nullptr;
  uint32_t first_epoch = 0;    // of the blocks that run now
  uint32_t cluster_epoch = 0;  // the last one before the latest cluster barrier

  struct Stacks* stacks = nullptr;
  char* shared = nullptr;
  size_t shared_blocks = 0;
};

// CUDA's built-in variables. Plain variables, so host code may have its own of the same name.
// dim3 has a constructor, which would make every access to a thread-local one a function call.
struct Dim {
  unsigned x, y, z;
  operator dim3() const { return dim3(x, y, z); }
};

extern SIMT_HIDDEN __thread Worker* worker;
extern SIMT_HIDDEN __thread Thread* thread;

}  // namespace simt

extern SIMT_HIDDEN __thread uint3 threadIdx, blockIdx;
extern SIMT_HIDDEN __thread simt::Dim blockDim, gridDim;
constexpr int warpSize = simt::kWarpSize;

namespace simt {

SIMT_INLINE SIMT_UNWATCHED void make_current(Thread* t) {
  thread = t;
  threadIdx = t->index;
  blockIdx = t->block->index;
}

void thread_returned_while_others_wait(Thread& t);
#if SIMT_CHECKED
void warp_is_over(Worker& w, unsigned warp);  // so the checker can count what it did
#else
inline void warp_is_over(Worker&, unsigned) {}
#endif
void leave_if_stopped();

// Makes the next CUDA thread current, on the given fiber; false when all have started.
inline SIMT_UNWATCHED bool start_thread(Fiber* fiber) {
  Worker& w = *worker;
  if (w.next == w.order.size() || w.stopped) return false;
  Thread* t = w.order[w.next++];
  t->fiber = fiber;
  t->state = State::kRunning;
  make_current(t);
  w.progress++;
  compiler_fence();
  w.in_kernel = true;
  return true;
}

inline SIMT_UNWATCHED void finish_thread() {
  Worker& w = *worker;
  w.in_kernel = false;
  compiler_fence();
  Thread& t = *thread;
  t.state = State::kDone;
  w.alive--;
  t.block->alive--;
  w.warps[t.warp].live &= ~(1u << t.lane);
  if (w.warps[t.warp].live == 0) warp_is_over(w, t.warp);
  if (t.block->waiting || w.cluster_waiting || w.warps[t.warp].arrived) {
    thread_returned_while_others_wait(t);
  }
}

template <class Body>
SIMT_UNWATCHED void run_threads(void* body, Fiber* fiber) {
  while (start_thread(fiber)) {
    (*static_cast<Body*>(body))();
    finish_thread();
  }
}

// Marks a stretch of the machine's own code, where a signal must not switch threads: it may hold a
// lock, or be in the middle of malloc. Every function that a kernel calls begins with one.
struct InMachine {
  SIMT_UNWATCHED InMachine() : before(worker && worker->in_kernel) {
    if (worker) worker->in_kernel = false;
    compiler_fence();
  }
  SIMT_UNWATCHED ~InMachine() {
    compiler_fence();
    if (before) worker->in_kernel = true;
  }
  const bool before;
};

// Ends the launch: the first fault wins, its message goes into cudaGetErrorString.
[[noreturn]] void fail(cudaError_t code, const std::string& message);
std::string describe(const Place& place);
std::string describe(const Thread& t);

void block_barrier(const char* what, const Place& here);
int block_vote(const char* what, int (*combine)(int, int), int start, int value, const Place& here);
void cluster_barrier(const Place& here);
unsigned cluster_blocks();
dim3 cluster_shape();
// p in another block's shared memory
const void* shared_of_rank(const void* p, unsigned rank, const Place& here);
unsigned rank_of_shared(const void* p);
unsigned converge(const Place& here);  // the lanes that are here together: __activemask()
void yield();

// The calling lane's part of a warp operation: leaves its input, waits for the lanes in `mask`;
// the last one to arrive computes all results.
void warp_wait(const char* what, WarpFunction operation, unsigned mask, const Place& here);

template <class Out, class In>
SIMT_UNWATCHED Out warp_operation(const char* what, WarpFunction operation, unsigned mask,
                                  const In& in, int source, const Place& here) {
  static_assert(sizeof(In) <= sizeof(Thread::in) && sizeof(Out) <= sizeof(Thread::out),
                "a value of more than 32 bytes cannot pass through a warp operation");
  Thread& t = *thread;
  memcpy(t.in, &in, sizeof in);
  t.source = source;
  warp_wait(what, operation, mask, here);
  Out out;
  memcpy(static_cast<void*>(&out), t.out, sizeof out);
  return out;
}

}  // namespace simt
