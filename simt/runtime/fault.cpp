#include "fault.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "worker.h"

namespace simt {

std::string describe(const Place& place) {
  return std::string(place.file) + ":" + std::to_string(place.line);
}

namespace {
std::string triple(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}
}  // namespace

std::string describe(const Thread& t) {
  std::string text = "thread " + triple(t.index);
  // In a cluster several blocks run side by side; say which one.
  if (worker && worker->blocks.size() > 1) text += " of block " + triple(t.block->index);
  return text;
}

void fail_here(Launch& launch, cudaError_t code, const std::string& message, const Thread* who) {
  std::lock_guard<std::mutex> guard(launch.mutex);
  if (launch.code == cudaSuccess) {
    launch.code = code;
    launch.message = message;
    if (who != nullptr) launch.message = "block " + triple(who->block->index) + ": " + message;
  }
  Stop no = Stop::kNo;
  launch.stop.compare_exchange_strong(no, Stop::kFault);
}

void fail(cudaError_t code, const std::string& message) {
  worker->in_kernel = false;
  fail_here(*worker->launch, code, message);
  leave_if_stopped();
  abort();  // not reached
}

// ---- from an instruction to a line ----

namespace {

std::map<const void*, std::string>& known_lines() {
  static auto* lines = new std::map<const void*, std::string>;
  return *lines;
}

bool in_the_machine(const std::string& path) {
  // The machine's headers, and the system's: the line that matters is the one that called them.
  return path.find("/simt/include/") != std::string::npos ||
         path.find("/simt/runtime/") != std::string::npos || path.rfind("/usr/", 0) == 0 ||
         path.find("/cuda_fp16.h") != std::string::npos ||
         path.find("/cuda_bf16.h") != std::string::npos || path.rfind("??", 0) == 0 ||
         path.rfind(":", 0) == 0;  // g++ left the file out
}

}  // namespace

void look_up_lines(const std::vector<const void*>& pcs) {
  std::string command;
  std::vector<const void*> asked;
  for (const void* pc : pcs) {
    if (known_lines().count(pc)) continue;
    Dl_info info, self;
    known_lines()[pc] = kUnknownLine;
    if (!dladdr(pc, &info) || !dladdr(reinterpret_cast<void*>(&look_up_lines), &self)) continue;
    if (info.dli_fbase != self.dli_fbase) continue;  // some other library
    if (command.empty()) command = std::string("addr2line -a -i -e '") + info.dli_fname + "'";
    char address[32];
    // A return address is one past the call; the call belongs to the line.
    snprintf(address, sizeof address, " %#lx",
             static_cast<unsigned long>(static_cast<const char*>(pc) - 1 -
                                        static_cast<const char*>(info.dli_fbase)));
    command += address;
    asked.push_back(pc);
  }
  if (asked.empty()) return;
  FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return;
  // The answer: for each address a line with the address itself, then the place it was compiled
  // from, innermost inlined function first.
  size_t answer = 0;
  bool found = false;
  char buffer[4096];
  while (fgets(buffer, sizeof buffer, pipe)) {
    std::string line(buffer);
    line = line.substr(0, line.find_first_of(" \n"));
    if (line.rfind("0x", 0) == 0) {
      answer++;
      found = false;
    } else if (!found && answer >= 1 && answer <= asked.size() && !in_the_machine(line)) {
      known_lines()[asked[answer - 1]] = line;
      found = true;
    }
  }
  pclose(pipe);
}

std::string line_of(const void* pc) {
  look_up_lines({pc});
  return known_lines()[pc];
}

}  // namespace simt
