// Which memory a kernel may touch. Shared memory: the dynamic part as the launch asked for it, and
// the static variables. Global memory: what cudaMalloc gave out and, told by Python for the time
// of a call, every tensor with its exact extent. Then the kernel's arguments, and constants.
#include "memory.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <new>

#include "checker.h"
#include "checks.h"
#include "shared.h"
#include "worker.h"

namespace simt {

namespace checks {
namespace {

// Marks take 12 bytes for each byte of memory. Beyond this much memory, accesses to global memory
// are checked for their bounds only.
constexpr size_t kMaxMarkedBytes = 128 << 20;

struct Range {
  const char *low, *high;
};

std::list<View>& views() {
  static auto* list = new std::list<View>;
  return *list;
}

std::vector<Extent> extents;   // in the order of their addresses, for the running launch
std::vector<Range> constants;  // this library's own data
Cell* shared_cells = nullptr;  // for every word of the worker's shared memory

// The number of the word that an address lies in.
size_t word(const char* p) { return reinterpret_cast<uintptr_t>(p) / 4; }

Cell* map_cells(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, bytes, MADV_HUGEPAGE);  // most of it is touched once: large pages come quicker
  return static_cast<Cell*>(p);
}

// Calls use(info) for this library (or program) among all that are loaded.
template <class F>
void for_this_library(F use) {
  struct Search {
    F& use;
    const void* base;
  };
  Dl_info self;
  if (!dladdr(reinterpret_cast<void*>(&map_cells), &self)) return;
  Search search{use, self.dli_fbase};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        for (int i = 0; i < info->dlpi_phnum; i++) {
          const auto& segment = info->dlpi_phdr[i];
          const auto* low = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
          if (segment.p_type == PT_LOAD && segment.p_offset == 0 && low == s.base) {
            s.use(*info);
            return 1;
          }
        }
        return 0;
      },
      &search);
}

void find_constants() {
  if (!constants.empty()) return;
  for_this_library([](const dl_phdr_info& info) {
    for (int i = 0; i < info.dlpi_phnum; i++) {
      const auto& segment = info.dlpi_phdr[i];
      const auto* low = reinterpret_cast<const char*>(info.dlpi_addr + segment.p_vaddr);
      if (segment.p_type == PT_LOAD) constants.push_back({low, low + segment.p_memsz});
    }
  });
}

const Extent* find_extent(const char* p) {
  auto next = std::upper_bound(extents.begin(), extents.end(), p,
                               [](const char* q, const Extent& e) { return q < e.low; });
  if (next == extents.begin()) return nullptr;
  const Extent& e = *std::prev(next);
  return p < e.high ? &e : nullptr;
}

bool is_own(const char* p) {
  for (const Range& r : constants) {
    if (p >= r.low && p < r.high) return true;
  }
  return false;
}

std::string describe(const View& view) {
  if (view.parameter.empty()) return view.name;
  return "`" + view.parameter + "` (" + view.name + ")";
}

// How far p is from the view: 0 inside of it and right behind it.
size_t distance(const View& view, const char* p) {
  if (p < view.low) return static_cast<size_t>(view.low - p);
  return p <= view.high ? 0 : static_cast<size_t>(p - view.high);
}

const View* nearest_view(const char* p, const Extent* in) {
  const View* best = nullptr;
  for (const View& view : views()) {
    if (in && (view.high <= in->low || view.low >= in->high)) continue;
    if (!best || distance(view, p) < distance(*best, p)) best = &view;
  }
  return best;
}

std::string bytes_text(unsigned n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); }

std::string position(const View& view, const char* p) {
  const auto offset = p - view.low;
  const auto size = view.high - view.low;
  const auto element = static_cast<std::ptrdiff_t>(view.element);
  if (element && offset % element == 0) {
    return "element " + std::to_string(offset / element) + " of " + std::to_string(size / element);
  }
  return "byte " + std::to_string(offset) + " of " + std::to_string(size);
}

[[noreturn]] void fail_outside(const Access& a) {
  std::string text = simt::describe(*thread) + " " + what(a.kind) + " " + bytes_text(a.size) +
                     " at " + line_of(a.site.pc);
  constexpr uintptr_t kFirstPage = 4096;
  if (reinterpret_cast<uintptr_t>(a.p) < kFirstPage) {
    fail(cudaErrorIllegalAddress,
         text + " through a null pointer.\n  Next: allocate the array, or do not pass nullptr.");
  }
  // The array that the line was at home in before is likelier to be meant than the nearest one.
  const View* view = nearest_view(a.p, a.site.extent);
  if (view && distance(*view, a.p) <= (size_t{1} << 30)) {
    fail(cudaErrorIllegalAddress,
         text + ", outside of " + describe(*view) + ": " + position(*view, a.p) +
             ".\n  Next: guard the access with the size (if (i < n)), or correct the index.");
  }
  fail(cudaErrorIllegalAddress,
       text +
           ", in memory that the kernel was not given.\n  Next: check the pointer; memory of "
           "the host (a local variable, a std::vector) cannot be reached from a kernel.");
}

// The static variable at (or, for a message, the nearest one below) a distance into the arena.
const SharedVariable* shared_variable_at(size_t offset, bool nearest) {
  const auto& all = shared_variables();
  auto next = std::upper_bound(all.begin(), all.end(), offset,
                               [](size_t at, const SharedVariable& v) { return at < v.offset; });
  if (next == all.begin()) return nullptr;
  const SharedVariable& v = *std::prev(next);
  return nearest || offset < v.offset + v.bytes ? &v : nullptr;
}

[[noreturn]] void fail_outside_shared(const Access& a, size_t offset) {
  std::string text = simt::describe(*thread) + " " + what(a.kind) + " " + bytes_text(a.size) +
                     " at " + line_of(a.site.pc) + ", outside of ";
  const SharedVariable* v = offset < kDynamicArea ? nullptr : shared_variable_at(offset, true);
  if (v) {
    text += "__shared__ " + v->name + " (" + simt::describe(v->place) + "): byte " +
            std::to_string(offset - v->offset) + " of " + std::to_string(v->bytes);
  } else {
    const size_t size = worker->launch->request.dynamic_shared;
    text += "dynamic shared memory: byte " + std::to_string(offset) + " of " +
            std::to_string(size) + " that the launch asked for";
  }
  fail(cudaErrorIllegalAddress, text + ".\n  Next: " +
                                    (v ? "make the array larger or correct the index."
                                       : "ask for more in the third launch parameter (bytes, not "
                                         "elements), or correct the index."));
}

}  // namespace

std::string name_of(const Worker& w, const char* p) {
  if (p >= w.shared && p < w.shared + w.blocks.size() * kSharedArena) {
    const size_t offset = static_cast<size_t>(p - w.shared) % kSharedArena;
    const SharedVariable* v = offset < kDynamicArea ? nullptr : shared_variable_at(offset, true);
    if (v == nullptr) return "dynamic shared memory, byte " + std::to_string(offset);
    return "__shared__ " + v->name + ", byte " + std::to_string(offset - v->offset);
  }
  const View* view = nearest_view(p, find_extent(p));
  return view ? describe(*view) + ", " + position(*view, p) : "memory";
}

namespace {
Target find_shared(Worker& w, const Access& a) {
  const size_t address = static_cast<size_t>(a.p - w.shared);
  const size_t offset = address % kSharedArena;
  const Block& owner = w.blocks[address / kSharedArena];
  if (owner.alive == 0) {
    fail(cudaErrorIllegalAddress,
         simt::describe(*thread) + " " + what(a.kind) + " " + name_of(w, a.p) + " of block rank " +
             std::to_string(owner.rank) + " at " + line_of(a.site.pc) + ", but that block has " +
             "returned.\n  Next: put cluster.sync() at the end, so that no block leaves while " +
             "another one uses its shared memory.");
  }
  bool may_have_holes = true;  // whatever is carved out of dynamic shared memory
  if (offset < kDynamicArea) {
    if (offset + a.size > w.launch->request.dynamic_shared) fail_outside_shared(a, offset);
  } else {
    const SharedVariable* v = shared_variable_at(offset, false);
    if (!v || offset + a.size > v->offset + v->bytes) fail_outside_shared(a, offset);
    may_have_holes = v->may_have_holes;
  }
  return {shared_cells + address / 4, true, true, may_have_holes};
}
}  // namespace

Target find_target(Worker& w, const Access& a) {
  Target target;
  if (a.p >= w.shared && a.p < w.shared + w.blocks.size() * kSharedArena) {
    target = find_shared(w, a);
  } else {
    const Extent* e = a.site.extent;
    if (!e || a.p < e->low || a.p >= e->high) e = find_extent(a.p);
    if (e == nullptr) {
      if (is_own(a.p)) return {nullptr, false, false};
      if (w.stacks->contains(a.p)) {
        fail(cudaErrorIllegalAddress,
             simt::describe(*thread) + " " + what(a.kind) + " a local variable of another thread " +
                 "at " + line_of(a.site.pc) + ".\n  Next: pass the value through shared memory " +
                 "or a shuffle, not its address.");
      }
      fail_outside(a);
    }
    if (a.p + a.size > e->high) fail_outside(a);
    a.site.extent = e;
    Cell* cells = e->cells ? e->cells + (word(a.p) - word(e->low)) : nullptr;
    target = {cells, false, true};
  }
  if (a.aligned && reinterpret_cast<uintptr_t>(a.p) % a.size != 0) {
    fail(cudaErrorMisalignedAddress,
         simt::describe(*thread) + " " + what(a.kind) + " " + bytes_text(a.size) + " at once at " +
             line_of(a.site.pc) + ", but " + name_of(w, a.p) + " does not lie at a multiple of " +
             std::to_string(a.size) +
             ".\n  Next: use a vector type only where the pointer and the row length allow it, "
             "else load the elements one by one.");
  }
  return target;
}

void prepare_memory(Launch& launch) {
  find_constants();
  const Request& request = launch.request;
  // The kernel's own names for the arrays that it was given.
  for (View& view : views()) view.parameter.clear();
  const char* names = request.site.parameters;
  for (int i = 0; i < request.argument_count; i++) {
    const size_t length = strcspn(names, ",");
    const auto* p = static_cast<const char*>(request.pointers[i]);
    for (View& view : views()) {
      if (p && view.parameter.empty() && p >= view.low && p < view.high) {
        view.parameter = std::string(names, length);
      }
    }
    names += length + (names[length] == ',');
  }
  // One extent for views that overlap.
  std::vector<Range> ranges;
  for (const View& view : views()) ranges.push_back({view.low, view.high});
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.low < b.low; });
  size_t marked = 0;
  for (const Range& r : ranges) {
    if (!extents.empty() && r.low < extents.back().high) {
      extents.back().high = std::max(extents.back().high, r.high);
    } else {
      extents.push_back({r.low, r.high, nullptr, 0});
    }
  }
  for (Extent& e : extents) {
    marked += static_cast<size_t>(e.high - e.low);
    if (marked > kMaxMarkedBytes) continue;
    e.cell_bytes = (word(e.high - 1) - word(e.low) + 1) * sizeof(Cell);
    e.cells = map_cells(e.cell_bytes);
  }
  if (shared_cells == nullptr) {
    constexpr size_t kLargestCluster = 16;
    shared_cells = map_cells(kLargestCluster * kSharedArena / 4 * sizeof(Cell));
  }
}

void worker_starts(Worker& w) {
  w.arguments_low = static_cast<const char*>(w.launch->request.body);
  w.arguments_high = w.arguments_low + w.launch->request.body_size;
  for_this_library([&w](const dl_phdr_info& info) {
    for (int i = 0; i < info.dlpi_phnum; i++) {
      if (info.dlpi_phdr[i].p_type != PT_TLS) continue;
      w.tls_low = static_cast<const char*>(info.dlpi_tls_data);
      w.tls_high = w.tls_low + info.dlpi_phdr[i].p_memsz;
    }
  });
}

void release_memory() {
  for (Extent& e : extents) {
    if (e.cells) munmap(e.cells, e.cell_bytes);
  }
  extents.clear();
  forget_extents();
}

}  // namespace checks

void memory_appeared(const void* p, size_t bytes, const char* name) {
  const auto* low = static_cast<const char*>(p);
  if (bytes) checks::views().push_back({low, low + bytes, 0, name, ""});
}

void memory_vanished(const void* p) {
  checks::views().remove_if([p](const checks::View& v) { return v.low == p; });
}

}  // namespace simt

extern "C" {

// From Python, for the time of a call: a tensor that kernels may use.
__attribute__((visibility("default"))) void simt_watch(const void* p, size_t bytes, size_t element,
                                                       const char* name) {
  const auto* low = static_cast<const char*>(p);
  simt::checks::views().push_back({low, low + bytes, element, std::string("tensor ") + name, ""});
}

__attribute__((visibility("default"))) void simt_forget() {
  simt::checks::views().remove_if(
      [](const simt::checks::View& v) { return v.name.rfind("tensor ", 0) == 0; });
}

}  // extern "C"
