// Switching stacks: what a fiber is made of.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define SIMT_UCONTEXT 1  // everywhere else: portable, some twenty times slower
#endif

#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt {

struct Context {
#ifdef SIMT_UCONTEXT
  ucontext_t registers;
#else
  void* stack_pointer;  // the registers lie on the stack itself
#endif
};

// Saves where we are in `from` and goes on where `to` was saved (or made).
void switch_context(Context* from, Context* to);

// Prepares `context` so that switching to it calls entry(), which must never return.
void make_context(Context* context, char* stack, size_t size, void (*entry)());

}  // namespace simt
