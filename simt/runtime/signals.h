// What interrupts a running kernel: Ctrl-C, a crash in it, and the supervisor's nudge.
#pragma once
#include <pthread.h>

#include "run.h"

namespace simt {

// While one of these lives, the process's handlers for the signals involved are ours.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
};

// Ctrl-C was pressed since the scope began.
bool interrupt_requested();

// Makes the host thread look up from the kernel it runs: if the launch is to stop it leaves the
// kernel, and else it lets another CUDA thread of the block run (the one it spins for, perhaps).
void nudge(pthread_t host_thread);

// A stack for the crash handler, since a crash may be a stack that is used up.
class CrashStack {
 public:
  CrashStack();
  ~CrashStack();
  CrashStack(const CrashStack&) = delete;
  CrashStack& operator=(const CrashStack&) = delete;

 private:
  char* memory_;
};

}  // namespace simt
