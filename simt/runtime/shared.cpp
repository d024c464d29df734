#include "shared.h"

#include <map>
#include <mutex>

#include "fault.h"

namespace simt {

namespace {
// nvcc refuses a kernel with more static shared memory than this.
constexpr size_t kStaticMax = 48 << 10;
// Between two variables, so that a step beyond one of them does not land in the next.
constexpr size_t kGap = 64;

struct Table {
  std::mutex mutex;
  std::vector<SharedVariable> variables;
  size_t used = kDynamicArea;
  std::map<std::string, size_t> bytes_of_kernel;
  std::map<std::string, size_t> bytes_of_variable;  // the largest of a template's instantiations
};

Table& table() {
  static Table* t = new Table;
  return *t;
}
}  // namespace

const std::vector<SharedVariable>& shared_variables() { return table().variables; }

size_t static_shared_bytes(const Request& request) {
  std::lock_guard<std::mutex> guard(table().mutex);
  auto found = table().bytes_of_kernel.find(request.site.kernel);
  return found == table().bytes_of_kernel.end() ? 0 : found->second;
}

size_t place_shared_variable(size_t bytes, size_t alignment, bool may_have_holes, const char* name,
                             const Place& here) {
  InMachine in_machine;
  Table& t = table();
  std::lock_guard<std::mutex> guard(t.mutex);
  const size_t align = alignment < kGap ? kGap : alignment;
  const size_t offset = (t.used + align - 1) / align * align;
  t.used = offset + bytes + kGap;
  if (t.used > kSharedArena) {
    fprintf(stderr, "simt: more static shared memory than the machine has room for\n");
    abort();
  }
  t.variables.push_back({offset, bytes, may_have_holes, name, here});
  if (worker != nullptr && worker->launch != nullptr) {
    const Request& request = worker->launch->request;
    size_t& total = t.bytes_of_kernel[request.site.kernel];
    // Instantiations that are launched through one pointer to a function have one name here.
    size_t& variable = t.bytes_of_variable[request.site.kernel + (name + describe(here))];
    if (bytes > variable) {
      total += bytes - variable;
      variable = bytes;
    }
    if (total > kStaticMax) {
      fail_here(*worker->launch, cudaErrorInvalidValue,
                std::string(name) + " at " + describe(here) + " brings the kernel to " +
                    std::to_string(total) + " bytes of static shared memory; nvcc refuses more " +
                    "than " + std::to_string(kStaticMax) + ".\n  Next: use extern __shared__ and " +
                    "cudaFuncSetAttribute.");
    }
  }
  return offset;
}

char* shared_for_file_scope(size_t offset) {
  if (worker == nullptr || worker->blocks.size() > 1) {
    fprintf(stderr, "simt: a __shared__ variable outside of the kernel is used %s\n",
            worker == nullptr ? "on the host" : "in a thread-block cluster; declare it inside");
    abort();
  }
  return worker->blocks[0].shared + offset;
}

}  // namespace simt
