#include "signals.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <iterator>
#include <vector>

#include "fault.h"
#include "worker.h"

namespace simt {

namespace {

constexpr int kNudge = SIGURG;  // ignored by default, and hardly used by anyone
constexpr size_t kCrashStackSize = 64 << 10;
constexpr int kHandled[] = {SIGINT, kNudge, SIGSEGV, SIGBUS, SIGFPE};

struct sigaction previous[std::size(kHandled)];
volatile sig_atomic_t interrupted = 0;

// The line of the learner's file that the interrupted kernel is in, also where the instruction
// itself belongs to the C library or to the machine.
std::string interrupted_line(void* context) {
  auto* registers = static_cast<ucontext_t*>(context);
  std::vector<const void*> frames;
#if defined(__x86_64__)
  frames.push_back(reinterpret_cast<const void*>(registers->uc_mcontext.gregs[REG_RIP] + 1));
#elif defined(__aarch64__)
  frames.push_back(reinterpret_cast<const void*>(registers->uc_mcontext.pc + 1));
#else
  (void)registers;
#endif
  void* callers[24];
  const int count = backtrace(callers, static_cast<int>(std::size(callers)));
  frames.insert(frames.end(), callers, callers + count);
  look_up_lines(frames);
  for (const void* frame : frames) {
    if (line_of(frame) != kUnknownLine) return line_of(frame);
  }
  return kUnknownLine;
}

void on_interrupt(int) { interrupted = 1; }

void on_nudge(int, siginfo_t*, void* context) {
  if (worker == nullptr || !worker->in_kernel) return;
  // From here on this is an ordinary call made by the kernel, at whatever point it was.
  const Stop stop = worker->launch->stop.load();
  if (stop == Stop::kNo) {
    yield();
    return;
  }
  worker->in_kernel = false;  // no nudge on top of this one
  if (stop == Stop::kWatchdog) {
    fail(cudaErrorLaunchTimeout,
         "no block has finished for a long time; " + describe(*thread) + " is at " +
             interrupted_line(context) + "." + waiting_threads() +
             "\n  Next: look for a loop that does not end, or a flag that nobody sets. "
             "(SIMT_WATCHDOG=seconds gives a slow kernel more time.)");
  } else {
    leave_if_stopped();
  }
}

void on_crash(int signal, siginfo_t* info, void* context) {
  const bool used_up = worker && worker->stacks->in_guard(info->si_addr);
  if (!used_up && !(worker && worker->in_kernel)) {  // not ours: the previous handler may have it
    for (size_t i = 0; i < std::size(kHandled); i++) {
      if (kHandled[i] == signal) sigaction(signal, &previous[i], nullptr);
    }
    return;
  }
  worker->in_kernel = false;
  const std::string place = interrupted_line(context);
  if (signal == SIGFPE) {
    fail(cudaErrorLaunchFailure, describe(*thread) + " divides an integer by zero at " + place +
                                     ".\n  Next: a GPU would go on with a meaningless result; "
                                     "make sure that the divisor is not 0.");
  }
  if (used_up || worker->stacks->overflowed()) {
    fail(cudaErrorLaunchFailure, describe(*thread) + " at " + place + kStackUsedUp);
  }
  fail(cudaErrorIllegalAddress,
       describe(*thread) + " accesses memory that does not exist at " + place + ".\n  Next: " +
           (SIMT_CHECKED ? "check the pointer and the index in this line."
                         : "load the rung with check=True to see which array and which index."));
}

}  // namespace

SignalScope::SignalScope() {
  interrupted = 0;
  for (size_t i = 0; i < std::size(kHandled); i++) {
    struct sigaction action = {};
    if (kHandled[i] == SIGINT) {
      action.sa_handler = &on_interrupt;
    } else {
      // The nudge runs on the fiber's own stack, where it may switch to another one. A crash may
      // leave its handler for good. So neither may block its own signal meanwhile.
      action.sa_sigaction = kHandled[i] == kNudge ? &on_nudge : &on_crash;
      action.sa_flags = SA_SIGINFO | SA_NODEFER | (kHandled[i] == kNudge ? SA_RESTART : SA_ONSTACK);
    }
#if defined(__SANITIZE_ADDRESS__)
    if (kHandled[i] == SIGSEGV || kHandled[i] == SIGBUS) continue;  // AddressSanitizer's own
#endif
    sigaction(kHandled[i], &action, &previous[i]);
  }
}

SignalScope::~SignalScope() {
  for (size_t i = 0; i < std::size(kHandled); i++) {
#if defined(__SANITIZE_ADDRESS__)
    if (kHandled[i] == SIGSEGV || kHandled[i] == SIGBUS) continue;
#endif
    sigaction(kHandled[i], &previous[i], nullptr);
  }
}

bool interrupt_requested() { return interrupted != 0; }

void nudge(pthread_t host_thread) { pthread_kill(host_thread, kNudge); }

CrashStack::CrashStack() {
  memory_ = static_cast<char*>(
      mmap(nullptr, kCrashStackSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  stack_t stack = {};
  stack.ss_sp = memory_;
  stack.ss_size = kCrashStackSize;
  sigaltstack(&stack, nullptr);
}

CrashStack::~CrashStack() {
  stack_t none = {};
  none.ss_flags = SS_DISABLE;
  sigaltstack(&none, nullptr);
  munmap(memory_, kCrashStackSize);
}

}  // namespace simt
