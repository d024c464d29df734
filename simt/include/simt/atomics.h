// Atomic operations and memory fences.
#pragma once
#include <type_traits>

#include "machine.h"

namespace simt {

enum class Scope { kBlock, kDevice };

#if SIMT_CHECKED
void atomic_happens(void* p, unsigned bytes, const void* pc);
void fence_happens(Scope scope);
using InAtomic = InMachine;  // clang watches the atomics themselves, whatever it is told
#else
inline void atomic_happens(void*, unsigned, const void*) {}
inline void fence_happens(Scope) {}
struct InAtomic {
  InAtomic() {}
};
#endif

// In a checked build an atomic is a call of its own, so that its return address is its line.
#if SIMT_CHECKED
#define SIMT_CALLED SIMT_UNWATCHED __attribute__((noinline))
#else
#define SIMT_CALLED SIMT_UNWATCHED inline
#endif

template <size_t bytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint64_t;
};
template <>
struct WordOf<16> {
  using Type = unsigned __int128;
};

template <class To, class From>
SIMT_UNWATCHED inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size only");
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

// Replaces *p by change(*p) in one step, and returns what it was.
template <class T, class Change>
SIMT_UNWATCHED inline T read_modify_write(T* p, Change change) {
  using Word = typename WordOf<sizeof(T)>::Type;
  InAtomic guard;
  auto* word = reinterpret_cast<Word*>(p);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (true) {
    const Word changed = bits<Word>(static_cast<T>(change(bits<T>(old))));
    if (__atomic_compare_exchange_n(word, &old, changed, false, __ATOMIC_SEQ_CST,
                                    __ATOMIC_RELAXED)) {
      return bits<T>(old);
    }
  }
}

// A parameter of this type takes any argument that converts to T, and does not decide what T is.
template <class T>
struct Exactly {
  using Type = T;
};

// nvcc refuses an atomic on a type it has no instruction for; so must we.
template <class T, class... Allowed>
constexpr bool kOneOf = (std::is_same_v<T, Allowed> || ...);
template <class T>
constexpr bool kInteger32or64 = std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

}  // namespace simt

#define SIMT_NAME_ATOMIC(name, same)                                                 \
  template <class T>                                                                 \
  SIMT_UNWATCHED SIMT_INLINE T name(T* p, typename ::simt::Exactly<T>::Type value) { \
    return ::simt::called_##same<T>(p, value);                                       \
  }
#define SIMT_DEFINE_ATOMIC(name, allowed, expression)                       \
  namespace simt {                                                          \
  template <class T>                                                        \
  SIMT_CALLED T called_##name(T* p, T value) {                              \
    static_assert(allowed, #name " does not exist for this type on a GPU"); \
    atomic_happens(p, sizeof(T), __builtin_return_address(0));              \
    return read_modify_write(p, [&](T old) -> T { return expression; });    \
  }                                                                         \
  }                                                                         \
  SIMT_NAME_ATOMIC(name, name)                                              \
  SIMT_NAME_ATOMIC(name##_block, name)                                      \
  SIMT_NAME_ATOMIC(name##_system, name)

SIMT_DEFINE_ATOMIC(atomicAdd,
                   (!std::is_integral_v<T> ||
                    ::simt::kOneOf<T, int, unsigned, unsigned long, unsigned long long>),
                   old + value)
SIMT_DEFINE_ATOMIC(atomicSub, (::simt::kOneOf<T, int, unsigned>), old - value)
SIMT_DEFINE_ATOMIC(atomicMax, ::simt::kInteger32or64<T>, old < value ? value : old)
SIMT_DEFINE_ATOMIC(atomicMin, ::simt::kInteger32or64<T>, value < old ? value : old)
SIMT_DEFINE_ATOMIC(atomicExch, (sizeof(T) >= 4), ((void)old, value))
SIMT_DEFINE_ATOMIC(atomicAnd, ::simt::kInteger32or64<T>, old& value)
SIMT_DEFINE_ATOMIC(atomicOr, ::simt::kInteger32or64<T>, old | value)
SIMT_DEFINE_ATOMIC(atomicXor, ::simt::kInteger32or64<T>, old ^ value)
SIMT_DEFINE_ATOMIC(atomicInc, (::simt::kOneOf<T, unsigned>), old >= value ? 0 : old + 1)
SIMT_DEFINE_ATOMIC(atomicDec, (::simt::kOneOf<T, unsigned>),
                   old == 0 || old > value ? value : old - 1)
#undef SIMT_DEFINE_ATOMIC
#undef SIMT_NAME_ATOMIC

namespace simt {
template <class T>
SIMT_CALLED T called_atomicCAS(T* p, T expected, T desired) {
  static_assert((std::is_integral_v<T> && sizeof(T) >= 2 && !std::is_signed_v<T>) || kOneOf<T, int>,
                "atomicCAS takes int, unsigned, unsigned short or unsigned long long");
  using Word = typename WordOf<sizeof(T)>::Type;
  atomic_happens(p, sizeof(T), __builtin_return_address(0));
  InAtomic guard;
  Word old = bits<Word>(expected);
  __atomic_compare_exchange_n(reinterpret_cast<Word*>(p), &old, bits<Word>(desired), false,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return bits<T>(old);
}
}  // namespace simt

#define SIMT_NAME_CAS(name)                                                           \
  template <class T>                                                                  \
  SIMT_UNWATCHED SIMT_INLINE T name(T* p, typename ::simt::Exactly<T>::Type expected, \
                                    typename ::simt::Exactly<T>::Type desired) {      \
    return ::simt::called_atomicCAS<T>(p, expected, desired);                         \
  }
SIMT_NAME_CAS(atomicCAS)
SIMT_NAME_CAS(atomicCAS_block)
SIMT_NAME_CAS(atomicCAS_system)
#undef SIMT_NAME_CAS

inline SIMT_UNWATCHED void __threadfence() {
  ::simt::fence_happens(::simt::Scope::kDevice);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline SIMT_UNWATCHED void __threadfence_system() { __threadfence(); }
inline SIMT_UNWATCHED void __threadfence_block() {
  ::simt::fence_happens(::simt::Scope::kBlock);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
