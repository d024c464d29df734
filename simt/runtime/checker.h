// The checker's parts and what passes between them. hooks.cpp receives every load and store of a
// kernel, memory.cpp finds out which array it belongs to, races.cpp what else happened there, and
// counters.cpp what it costs. Blocks run one after the other while checking, on one host thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../include/simt/atomics.h"
#include "fault.h"
#include "run.h"

namespace simt::checks {

enum class Kind : uint8_t {
  kRead,
  kWrite,
  kAtomic,         // reads and writes in one step
  kVolatileRead,   // a volatile or atomic load: what a thread waits for a flag with
  kVolatileWrite,  // a volatile or atomic store: what a flag is set with
};

inline bool writes(Kind k) {
  return k == Kind::kWrite || k == Kind::kAtomic || k == Kind::kVolatileWrite;
}
inline bool is_atomic(Kind k) { return k != Kind::kRead && k != Kind::kWrite; }

// Who touched four bytes of memory last, and when. A block's `epoch` counts barriers and a
// launch's `time` counts fences, see races.cpp.
struct Mark {
  uint32_t block;
  uint32_t epoch;  // 0: nobody
  uint32_t time;
  uint16_t thread;
  uint16_t warp_epoch;
  uint16_t site;
  uint8_t bytes;  // which of the four
  bool atomic : 1;
  bool is_volatile : 1;
  bool several_threads : 1;  // for reads: of one warp, or
  bool several_warps : 1;    // of more than one
};

struct Cell {
  Mark write, read;
  uint32_t cluster;     // shared memory: the cluster that the marks belong to
  uint8_t initialised;  // shared memory: which bytes have been written
};

// A stretch of global memory that kernels may use, as the host has named it.
struct View {
  const char* low;
  const char* high;
  size_t element;  // size of an element, or 0
  std::string name;
  std::string parameter;  // the kernel's own name for it in the running launch
};

// Views that overlap, as one stretch.
struct Extent {
  const char* low;
  const char* high;
  Cell* cells;  // of the word that `low` lies in; null if there is too much memory for marks
  size_t cell_bytes;
};

// One instruction of a kernel that accesses memory.
struct Site {
  const void* pc;
  uint16_t number;
  const Extent* extent = nullptr;  // where it went the last time
  struct Counter* counter = nullptr;
};

struct Access {
  const char* p;
  unsigned size;
  Kind kind;
  bool aligned;  // the instruction needs an address that is a multiple of its size
  Site& site;
};

// What an access has hit.
struct Target {
  Cell* cells;  // of the word that holds the first byte; null if none are kept
  bool shared;
  bool counted;                 // false for the arguments and other memory of the kernel's own
  bool may_have_holes = false;  // a struct there can have padding, which nobody writes
};

Site& site_of(const void* pc);
const Site& site_number(uint16_t number);
const char* what(Kind kind);  // "reads", "writes", "atomically updates"

Target find_target(Worker& w, const Access& a);  // does not return if there is none
std::string name_of(const Worker& w, const char* p);
void prepare_memory(Launch& launch);
void release_memory();
void forget_extents();  // that sites remember

void check_races(Worker& w, const Access& a, const Target& target);
void prepare_races(Launch& launch);
void end_of_phase(const Worker& w);  // at a barrier, and at the end of a block
void fence(Scope scope);

void count(Worker& w, const Access& a, bool shared);
void count_barrier(const Place& here);
void finish_warp(Worker& w, unsigned warp);  // all its lanes have met, or are over
void prepare_counters(Launch& launch);

}  // namespace simt::checks
