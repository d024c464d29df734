// Bit operations, hints for loads and stores, clocks, traps.
#pragma once
#include <time.h>

#include <cassert>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "math.h"

// ---- bits ----
SIMT_FN int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_FN int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_FN int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
SIMT_FN int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
SIMT_FN int __ffs(int x) { return __builtin_ffs(x); }
SIMT_FN int __ffsll(long long x) { return __builtin_ffsll(x); }
SIMT_FN unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
  return r;
}
SIMT_FN unsigned long long __brevll(unsigned long long x) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
         __brev(static_cast<unsigned>(x >> 32));
}
SIMT_FN unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned choice = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << (8 * i);
  }
  return r;
}
SIMT_FN unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (by & 31)) >> 32);
}
SIMT_FN unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}
SIMT_FN unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
SIMT_FN int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
SIMT_FN unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
SIMT_FN long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
SIMT_FN int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
SIMT_FN unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
SIMT_FN int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) {
    c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  }
  return c;
}
SIMT_FN unsigned __sad(int a, int b, unsigned c) {
  return c + static_cast<unsigned>(a < b ? b - a : a - b);
}

// ---- the same bits as another type ----
#define SIMT_REINTERPRET(name, To, From) \
  SIMT_FN To name(From from) {           \
    To to;                               \
    memcpy(&to, &from, sizeof to);       \
    return to;                           \
  }
SIMT_REINTERPRET(__float_as_int, int, float)
SIMT_REINTERPRET(__int_as_float, float, int)
SIMT_REINTERPRET(__float_as_uint, unsigned, float)
SIMT_REINTERPRET(__uint_as_float, float, unsigned)
SIMT_REINTERPRET(__double_as_longlong, long long, double)
SIMT_REINTERPRET(__longlong_as_double, double, long long)
#undef SIMT_REINTERPRET
SIMT_FN int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
SIMT_FN int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
SIMT_FN double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

// ---- loads and stores with a hint for the cache: here plain ones ----
#define SIMT_LOAD(name)            \
  template <class T>               \
  SIMT_INLINE T name(const T* p) { \
    return *p;                     \
  }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
#undef SIMT_LOAD
#define SIMT_STORE(name)                        \
  template <class T, class V>                   \
  SIMT_INLINE void name(T* p, const V& value) { \
    *p = value;                                 \
  }
SIMT_STORE(__stwb)
SIMT_STORE(__stcs)
#undef SIMT_STORE
// These go past the L1 cache, so kernels use them to see what other blocks have written.
template <class T>
SIMT_INLINE T __ldcg(const T* p) {
  return *p;
}
template <class T>
SIMT_INLINE T __ldcv(const T* p) {
  return *p;
}
template <class T, class V>
SIMT_INLINE void __stcg(T* p, const V& value) {
  *p = value;
}
template <class T, class V>
SIMT_INLINE void __stwt(T* p, const V& value) {
  *p = value;
}

inline SIMT_UNWATCHED size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<size_t>(static_cast<const char*>(p) - simt::thread->block->shared);
}
inline SIMT_UNWATCHED unsigned __isShared(const void* p) {
  const auto distance = static_cast<const char*>(p) - simt::thread->block->shared;
  return distance >= 0 && static_cast<size_t>(distance) < simt::kSharedArena;
}

// ---- time: the host's, in nanoseconds ----
SIMT_FN long long clock64() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<long long>(t.tv_sec) * 1000000000 + t.tv_nsec;
}
SIMT_FN unsigned long long __globaltimer() { return static_cast<unsigned long long>(clock64()); }
SIMT_FN void __nanosleep(unsigned) { ::simt::yield(); }

// ---- ends ----
namespace simt {
[[noreturn]] void trap(const Place& here);
}
[[noreturn]] inline SIMT_UNWATCHED void __trap(SIMT_HERE) { ::simt::trap(here); }
#define __builtin_assume(x) ((void)0)

// printf in a kernel: whole lines, also when blocks run side by side.
int simt_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
