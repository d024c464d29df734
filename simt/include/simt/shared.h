// Shared memory. The rewriter turns
//     __shared__ float tile[32][33];
// into
//     typedef float tile__T[32][33]; SIMT_SHARED(tile)
// and `extern __shared__ float s[];` into a pointer to the block's dynamic shared memory.
//
// Every variable gets a place in an arena, the same in every block, when its line first runs.
// (`static thread_local` would be less work, but a library that is loaded while the process runs
// has next to no room for thread-local storage.)
#pragma once
#include <type_traits>

#include "machine.h"

namespace simt {

// Can a whole word of such an array be padding, which nobody writes? In one of structs with more
// than a word, and in one of bytes that structs are put into.
template <class T>
constexpr bool may_have_holes(T*) {
  using Element = std::remove_all_extents_t<T>;
  return sizeof(Element) == 1 || (sizeof(Element) > 4 && !std::is_scalar_v<Element>);
}

// The distance of a static shared variable from the start of its block's arena.
size_t place_shared_variable(size_t bytes, size_t alignment, bool may_have_holes, const char* name,
                             const Place& here);

template <class T>
inline SIMT_UNWATCHED T* dynamic_shared() {
  return reinterpret_cast<T*>(thread->block->shared);
}

inline SIMT_UNWATCHED char* shared_variable(size_t offset) {
  return thread->block->shared + offset;
}

// Shared variables outside of any function: one reference per host thread serves all blocks that
// it runs, which needs blocks to lie at the same address. In a cluster they do not.
char* shared_for_file_scope(size_t offset);

}  // namespace simt

#define SIMT_SHARED(name)                                                                     \
  static const size_t name##__O = ::simt::place_shared_variable(                              \
      sizeof(name##__T), alignof(name##__T),                                                  \
      ::simt::may_have_holes(static_cast<name##__T*>(nullptr)), #name, {__FILE__, __LINE__}); \
  name##__T& name = *reinterpret_cast<name##__T*>(::simt::shared_variable(name##__O));

#define SIMT_FILE_SHARED(name)                                                                \
  static const size_t name##__O = ::simt::place_shared_variable(                              \
      sizeof(name##__T), alignof(name##__T),                                                  \
      ::simt::may_have_holes(static_cast<name##__T*>(nullptr)), #name, {__FILE__, __LINE__}); \
  static thread_local name##__T& name =                                                       \
      *reinterpret_cast<name##__T*>(::simt::shared_for_file_scope(name##__O));

#define SIMT_FILE_DYNAMIC_SHARED(type, name) \
  static thread_local type* const name = reinterpret_cast<type*>(::simt::shared_for_file_scope(0))
