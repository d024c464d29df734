// What the compiler calls. A checked kernel is compiled with -fsanitize=thread, which puts a call
// of __tsan_read4 and so on before every load and store, and with a few checks of -fsanitize=
// undefined. The functions of these names that are linked are not the sanitizers' but these.
#include <cstdint>
#include <deque>
#include <vector>

#include "checker.h"
#include "worker.h"

namespace simt::checks {

namespace {

// All sites of this library by their address: an open hash table.
constexpr size_t kSiteSlots = 1 << 14;
Site* site_table[kSiteSlots];
std::deque<Site>& all_sites() {
  static auto* sites = new std::deque<Site>;
  return *sites;
}

bool is_private(const Worker& w, const char* p) {
  if (p >= w.tls_low && p < w.tls_high) return true;              // threadIdx and so on
  if (p >= w.arguments_low && p < w.arguments_high) return true;  // the kernel's arguments
  const Fiber& fiber = *thread->fiber;
  return p >= fiber.stack && p < fiber.stack + kStackSize;  // a local variable
}

// A thread that asks for one flag over and over waits for another thread: let that one run, and do
// not wait for the nudge. (Blocks run one after the other, so this is not shared.)
void give_way_when_spinning(const char* flag) {
  constexpr unsigned kPatience = 32;
  static const char* last = nullptr;
  static unsigned times = 0;
  times = flag == last ? times + 1 : 0;
  last = flag;
  if (times % kPatience == kPatience - 1) yield();
}

inline void access(void* address, unsigned size, Kind kind, bool aligned, const void* pc) {
  if (thread == nullptr) return;  // host code of the same file
  Worker& w = *worker;
  const auto* p = static_cast<const char*>(address);
  if (!w.in_kernel || is_private(w, p)) return;  // the machine's own code, or the thread's own data
  {
    InMachine guard;
    const Access a{p, size, kind, aligned, site_of(pc)};
    const Target target = find_target(w, a);
    if (target.cells) check_races(w, a, target);
    if (target.counted) count(w, a, target.shared);
  }
  if (is_atomic(kind)) give_way_when_spinning(p);
}

}  // namespace

Site& site_of(const void* pc) {
  size_t slot = (reinterpret_cast<uintptr_t>(pc) * 0x9E3779B97F4A7C15u) >> 50;
  while (site_table[slot] != nullptr) {
    if (site_table[slot]->pc == pc) return *site_table[slot];
    slot = (slot + 1) % kSiteSlots;
  }
  Site site;
  site.pc = pc;
  site.number = static_cast<uint16_t>(all_sites().size());
  all_sites().push_back(site);
  site_table[slot] = &all_sites().back();
  return all_sites().back();
}

const Site& site_number(uint16_t number) { return all_sites()[number]; }

void forget_extents() {
  for (Site& site : all_sites()) site.extent = nullptr;
}

const char* what(Kind kind) {
  if (kind == Kind::kAtomic) return "atomically updates";
  return writes(kind) ? "writes" : "reads";
}

}  // namespace simt::checks

namespace simt {

void atomic_happens(void* p, unsigned bytes, const void* pc) {
  checks::access(p, bytes, checks::Kind::kAtomic, true, pc);
}

void fence_happens(Scope scope) {
  if (thread == nullptr) return;
  InMachine guard;
  checks::fence(scope);
}

namespace {

// ---- -fsanitize=undefined passes descriptions like these ----

struct SourceLocation {
  const char* file;
  uint32_t line, column;
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
  bool is_signed() const { return info & 1; }
  unsigned bits() const { return 1u << (info >> 1); }
};

struct OverflowData {
  SourceLocation place;
  const TypeDescriptor* type;
};

struct IndexData {
  SourceLocation place;
  const TypeDescriptor *array, *index;
};

// g++ calls it 'float [4]', clang 'float[4]'.
std::string type_name(const TypeDescriptor& type) {
  std::string name = type.name;
  const size_t space = name.find(" [");
  return space == std::string::npos ? name : name.erase(space, 1);
}

// Values of up to 64 bits come in the argument itself, wider ones by address.
std::string value_text(const TypeDescriptor& type, uintptr_t value) {
  if (type.bits() > 64) return "a wide integer";
  if (!type.is_signed()) return std::to_string(value);
  const unsigned unused = 64 - type.bits();
  return std::to_string(static_cast<int64_t>(value << unused) >> unused);
}

void overflow(const OverflowData* data, uintptr_t a, const char* operation, uintptr_t b) {
  if (thread == nullptr) return;
  InMachine guard;
  fail(cudaErrorLaunchFailure,
       describe(*thread) + ": " + value_text(*data->type, a) + " " + operation + " " +
           value_text(*data->type, b) + " does not fit into " + data->type->name + " at " +
           data->place.text() + ".\n  Next: compute in int64_t; convert the first factor, not " +
           "the product.");
}

}  // namespace
}  // namespace simt

#define SIMT_CALLER __builtin_return_address(0)

extern "C" {

using simt::checks::access;
using simt::checks::Kind;

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define SIMT_HOOK(name, bytes, kind, aligned) \
  void __tsan_##name##bytes(void* p) { access(p, bytes, kind, aligned, SIMT_CALLER); }
#define SIMT_HOOKS(bytes)                                               \
  SIMT_HOOK(read, bytes, Kind::kRead, true)                             \
  SIMT_HOOK(write, bytes, Kind::kWrite, true)                           \
  SIMT_HOOK(unaligned_read, bytes, Kind::kRead, false)                  \
  SIMT_HOOK(unaligned_write, bytes, Kind::kWrite, false)                \
  SIMT_HOOK(volatile_read, bytes, Kind::kVolatileRead, true)            \
  SIMT_HOOK(volatile_write, bytes, Kind::kVolatileWrite, true)          \
  SIMT_HOOK(unaligned_volatile_read, bytes, Kind::kVolatileRead, false) \
  SIMT_HOOK(unaligned_volatile_write, bytes, Kind::kVolatileWrite, false)
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)

void __tsan_read_range(void* p, unsigned long bytes) {
  access(p, static_cast<unsigned>(bytes), Kind::kRead, false, SIMT_CALLER);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  access(p, static_cast<unsigned>(bytes), Kind::kWrite, false, SIMT_CALLER);
}
// clang calls these for copies and fills.
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  access(const_cast<void*>(from), static_cast<unsigned>(bytes), Kind::kRead, false, SIMT_CALLER);
  access(to, static_cast<unsigned>(bytes), Kind::kWrite, false, SIMT_CALLER);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  access(const_cast<void*>(from), static_cast<unsigned>(bytes), Kind::kRead, false, SIMT_CALLER);
  access(to, static_cast<unsigned>(bytes), Kind::kWrite, false, SIMT_CALLER);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  access(to, static_cast<unsigned>(bytes), Kind::kWrite, false, SIMT_CALLER);
  return memset(to, value, bytes);
}

// C++ atomics (std::atomic_ref, the __atomic builtins).
#define SIMT_ATOMIC_HOOKS(bits, T)                                                                 \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                         \
    access(const_cast<T*>(p), sizeof(T), Kind::kVolatileRead, true, SIMT_CALLER);                  \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                      \
    access(const_cast<T*>(p), sizeof(T), Kind::kVolatileWrite, true, SIMT_CALLER);                 \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) {                                      \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) {                                     \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) {                                     \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) {                                     \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) {                                      \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                              \
  }                                                                                                \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) {                                     \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST);                                             \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {   \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {         \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);       \
    return expected;                                                                               \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {     \
    access(const_cast<T*>(p), sizeof(T), Kind::kAtomic, true, SIMT_CALLER);                        \
    return __atomic_compare_exchange_n(p, expected, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }
SIMT_ATOMIC_HOOKS(8, uint8_t)
SIMT_ATOMIC_HOOKS(16, uint16_t)
SIMT_ATOMIC_HOOKS(32, uint32_t)
SIMT_ATOMIC_HOOKS(64, uint64_t)

void __tsan_atomic_thread_fence(int) { simt::fence_happens(simt::Scope::kDevice); }
void __tsan_atomic_signal_fence(int) {}

void __ubsan_handle_add_overflow(simt::OverflowData* data, uintptr_t a, uintptr_t b) {
  simt::overflow(data, a, "+", b);
}
void __ubsan_handle_sub_overflow(simt::OverflowData* data, uintptr_t a, uintptr_t b) {
  simt::overflow(data, a, "-", b);
}
void __ubsan_handle_mul_overflow(simt::OverflowData* data, uintptr_t a, uintptr_t b) {
  simt::overflow(data, a, "*", b);
}
void __ubsan_handle_negate_overflow(simt::OverflowData* data, uintptr_t a) {
  simt::overflow(data, 0, "-", a);
}

void __ubsan_handle_divrem_overflow(simt::OverflowData* data, uintptr_t a, uintptr_t b) {
  if (simt::thread == nullptr) return;
  simt::InMachine guard;
  simt::fail(cudaErrorLaunchFailure,
             simt::describe(*simt::thread) + " divides " + simt::value_text(*data->type, a) +
                 " by " + simt::value_text(*data->type, b) + " at " + data->place.text() +
                 ".\n  Next: a GPU would go on with a meaningless result; make sure that the "
                 "divisor is not 0.");
}

void __ubsan_handle_out_of_bounds(simt::IndexData* data, uintptr_t index) {
  if (simt::thread == nullptr) return;
  simt::InMachine guard;
  simt::fail(cudaErrorIllegalAddress, simt::describe(*simt::thread) + " uses index " +
                                          simt::value_text(*data->index, index) +
                                          " of an array of type " + simt::type_name(*data->array) +
                                          " at " + data->place.text() +
                                          ".\n  Next: compare the index with the array's size.");
}

}  // extern "C"
