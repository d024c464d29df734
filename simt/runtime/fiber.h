// Fibers: a context with a stack of its own, and the worker's store of them.
#pragma once
#include <vector>

#include "../include/simt/machine.h"
#include "context.h"

namespace simt {

constexpr size_t kStackSize = 128 << 10;  // address space; a page of it is used as it is touched
constexpr size_t kMaxFrame = 64 << 10;    // cc.py refuses functions whose variables need more

struct Fiber {
  Context context;
  char* stack = nullptr;
  size_t stack_size = 0;
};

// The fibers of one worker. They are handed out anew for every block.
struct Stacks {
  explicit Stacks(size_t count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  Fiber* take(void (*entry)());  // the next unused fiber, ready to run entry()
  void reset() { used = 0; }     // all fibers are unused again
  bool contains(const void* p) const { return p >= memory && p < memory + bytes; }
  bool overflowed() const;             // has a thread used up its stack?
  bool in_guard(const void* p) const;  // is this the page below the lowest stack?
  void give_back_memory();             // to the system, when many stacks were used

  Fiber host;  // the worker's own stack, from which it enters the first fiber
  std::vector<Fiber> fibers;
  size_t used = 0, most_used = 0;
  char* memory;
  size_t bytes;
};

void switch_fiber(Fiber* from, Fiber* to);
void fiber_entered();  // must be the first call on a new fiber

}  // namespace simt
