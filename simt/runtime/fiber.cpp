#include "fiber.h"

#include <sys/mman.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif
#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

namespace {
// A guard page per stack would cost two of the system's mappings each, and there are 65530 in all.
// So only the lowest stack has one. The compiler bounds what one function needs, and this word at
// the end of each stack shows whether a recursion went too deep.
constexpr uint64_t kCanary = 0x51717e57acced00d;
constexpr size_t kGuard = 64 << 10;

uint64_t* canary(const Fiber& fiber) { return reinterpret_cast<uint64_t*>(fiber.stack); }
}  // namespace

Stacks::Stacks(size_t count) : fibers(count), bytes(count * kStackSize) {
  void* p = mmap(nullptr, kGuard + bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  mprotect(p, kGuard, PROT_NONE);
  memory = static_cast<char*>(p) + kGuard;
  for (size_t i = 0; i < count; i++) {
    fibers[i].stack = memory + i * kStackSize;
    // Stacks that all begin at the same distance would compete for the same lines of the cache.
    fibers[i].stack_size = kStackSize - 64 * (i % 32);
  }
}

Stacks::~Stacks() { munmap(memory - kGuard, kGuard + bytes); }

Fiber* Stacks::take(void (*entry)()) {
  Fiber* fiber = &fibers[used++];
  if (used > most_used) most_used = used;
#ifdef SIMT_ASAN
  __asan_unpoison_memory_region(fiber->stack, kStackSize);
#endif
  *canary(*fiber) = kCanary;
  make_context(&fiber->context, fiber->stack, fiber->stack_size, entry);
  return fiber;
}

bool Stacks::overflowed() const {
  for (size_t i = 0; i < used; i++) {
    if (*canary(fibers[i]) != kCanary) return true;
  }
  return false;
}

bool Stacks::in_guard(const void* p) const { return p < memory && p >= memory - kGuard; }

void Stacks::give_back_memory() {
  constexpr size_t kKeep = 256;
  if (most_used > kKeep) {
    madvise(memory + kKeep * kStackSize, bytes - kKeep * kStackSize, MADV_DONTNEED);
  }
  most_used = 0;
}

#ifdef SIMT_ASAN
void switch_fiber(Fiber* from, Fiber* to) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, to->stack, to->stack_size);
  switch_context(&from->context, &to->context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void fiber_entered() {
  const void* stack;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &size);
  Fiber& host = worker->stacks->host;
  if (host.stack == nullptr) {  // the very first switch of a worker comes from its own stack
    host.stack = static_cast<char*>(const_cast<void*>(stack));
    host.stack_size = size;
  }
}
#else
void switch_fiber(Fiber* from, Fiber* to) { switch_context(&from->context, &to->context); }
void fiber_entered() {}
#endif

}  // namespace simt
