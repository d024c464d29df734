// Functions that kernels call and that need no speed.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "../include/simt/machine.h"
#include "fault.h"

namespace simt {

[[noreturn]] void fail_absent_lane(const Thread& reader) {
  fail(cudaErrorLaunchFailure,
       describe(reader) + " (lane " + std::to_string(reader.lane) + ") reads lane " +
           std::to_string(reader.source) + " in " + reader.waits_in + " at " +
           describe(reader.place) + ", but that lane takes no part: its value is undefined." +
           "\n  Next: let all lanes of the warp make the call (return later, pad the block to a " +
           "multiple of 32), or do not use what is read.");
}

[[noreturn]] void trap(const Place& here) {
  InMachine guard;
  fail(cudaErrorLaunchFailure, describe(*thread) + " runs into __trap() at " + describe(here));
}

}  // namespace simt

[[noreturn]] void simt_assert(const char* expression, const char* file, int line) {
  if (simt::thread == nullptr) {
    fprintf(stderr, "%s:%d: assertion `%s' failed\n", file, line, expression);
    abort();
  }
  simt::InMachine guard;
  simt::fail(cudaErrorAssert, simt::describe(*simt::thread) + ": assertion `" + expression +
                                  "' failed at " + file + ":" + std::to_string(line) +
                                  ".\n  Next: print the values in it with printf() before it.");
}

// ---- printf ----
// As on a GPU the text is kept, and appears when the launch is over: where Python listens it takes
// the text (a notebook does not show what C++ prints), else it goes to the standard output.

namespace {
constexpr size_t kMaxOutput = 1 << 20;  // CUDA's own limit; what is printed beyond it is lost

std::mutex output_mutex;
std::string output;
bool python_listens = false;
}  // namespace

namespace simt {
void flush_output() {
  std::lock_guard<std::mutex> guard(output_mutex);
  if (python_listens) return;
  fwrite(output.data(), 1, output.size(), stdout);
  output.clear();
}
}  // namespace simt

extern "C" __attribute__((visibility("default"))) const char* simt_output() {
  static std::string taken;
  std::lock_guard<std::mutex> guard(output_mutex);
  python_listens = true;
  taken.clear();
  taken.swap(output);
  return taken.c_str();
}

int simt_printf(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int length;
  if (simt::thread == nullptr) {  // on the host
    length = vprintf(format, arguments);
  } else {
    simt::InMachine guard;
    char text[4096];
    length = vsnprintf(text, sizeof text, format, arguments);
    std::lock_guard<std::mutex> lock(output_mutex);
    if (output.size() < kMaxOutput) output += text;
  }
  va_end(arguments);
  return length;
}
