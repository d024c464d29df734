#include "context.h"

#include <cstdint>

namespace simt {

#ifdef SIMT_UCONTEXT

void switch_context(Context* from, Context* to) { swapcontext(&from->registers, &to->registers); }

void make_context(Context* context, char* stack, size_t size, void (*entry)()) {
  getcontext(&context->registers);
  context->registers.uc_stack.ss_sp = stack;
  context->registers.uc_stack.ss_size = size;
  context->registers.uc_link = nullptr;
  makecontext(&context->registers, entry, 0);
}

#else

// Only the registers that a function must preserve are saved: the caller has saved the others.
extern "C" void simt_switch_stacks(void** from, void* to);

#if defined(__x86_64__)
constexpr int kSavedWords = 6;  // rbp rbx r12 r13 r14 r15, then the return address
asm(R"(
.text
.type simt_switch_stacks, @function
.hidden simt_switch_stacks
.globl simt_switch_stacks
simt_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch_stacks, .-simt_switch_stacks
)");
#elif defined(__aarch64__)
constexpr int kSavedWords = 11;  // x19-x29, then x30 (the return address), then d8-d15
asm(R"(
.text
.type simt_switch_stacks, %function
.hidden simt_switch_stacks
.globl simt_switch_stacks
simt_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size simt_switch_stacks, .-simt_switch_stacks
)");
#endif

void switch_context(Context* from, Context* to) {
  simt_switch_stacks(&from->stack_pointer, to->stack_pointer);
}

void make_context(Context* context, char* stack, size_t size, void (*entry)()) {
  // The top must be a multiple of 16; on x86-64 a function finds it 8 lower when it is entered.
  uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + size) & ~uintptr_t{15};
  void** sp = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
  *--sp = nullptr;
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedWords; i++) *--sp = nullptr;
#else
  for (int i = 0; i < 20; i++) *--sp = nullptr;
  sp[kSavedWords] = reinterpret_cast<void*>(entry);
#endif
  context->stack_pointer = sp;
}

#endif

}  // namespace simt
