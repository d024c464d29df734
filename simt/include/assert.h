// <assert.h>, and so <cassert>: a failed assert in a kernel must not take the process with it. As in
// the real header there is no guard: each inclusion looks at NDEBUG again.
#include_next <assert.h>

[[noreturn]] void simt_assert(const char* expression, const char* file, int line);
#ifndef NDEBUG
#undef assert
#define assert(x) ((x) ? (void)0 : simt_assert(#x, __FILE__, __LINE__))
#endif
