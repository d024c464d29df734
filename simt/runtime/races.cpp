// Races: two threads touch the same memory, one of them writes, and nothing puts the two accesses
// in an order. What can put them in an order:
//   - a barrier of the block, or of the cluster, between them (the blocks' epochs);
//   - a warp operation between them, for lanes of one warp (the warp's epoch);
//   - a fence behind the first access and then an atomic (or volatile) store by its block, and an
//     atomic (or volatile) load by the other block before the second access. It is not checked
//     that both meant the same variable, so a race can hide behind other blocks' flags, but a
//     kernel that orders its accesses properly is never accused.
// Marks are kept for words of four bytes, with the bytes that were touched. Of several 8- or
// 16-bit accesses to different parts of a word only the last is remembered.
#include <sys/mman.h>

#include <map>
#include <new>

#include "checker.h"
#include "checks.h"
#include "worker.h"

namespace simt::checks {

namespace {

// What a block has made visible and what it has looked at, as times of the launch.
struct Clock {
  uint32_t fence, block_fence;      // accesses before these are behind a fence
  uint32_t release, block_release;  // ... and a store of a flag has followed
  uint32_t acquire;                 // the last time that the block looked at a flag
};

uint32_t now = 1;
Clock* clocks = nullptr;  // one per block of the grid
size_t clocks_bytes = 0;

bool in_warp_of(const Thread& t, const Mark& m) {
  return m.block == t.block->number && m.thread / kWarpSize == t.rank / kWarpSize &&
         !m.several_warps;
}

bool ordered(const Worker& w, const Mark& m, const Thread& t) {
  const Block& b = *t.block;
  const Clock& mine = clocks[b.number];
  const Clock& other = clocks[m.block];
  if (m.block == b.number) {
    if (m.epoch != b.epoch) return true;
    const bool synchronised = m.warp_epoch != static_cast<uint16_t>(w.warps[t.warp].epoch);
    if (synchronised && in_warp_of(t, m)) return true;
    return other.block_release > m.time && mine.acquire > m.time;
  }
  if (m.epoch >= w.first_epoch && m.epoch <= w.cluster_epoch) return true;
  return other.release > m.time && mine.acquire > m.time;
}

bool is_own(const Mark& m, const Thread& t) {
  return m.block == t.block->number && m.thread == t.rank && !m.several_threads;
}

bool conflicts(const Worker& w, const Mark& m, const Thread& t, unsigned bytes, const Access& a) {
  if (m.epoch == 0 || !(m.bytes & bytes) || is_own(m, t)) return false;
  if (m.atomic && is_atomic(a.kind)) {
    // Volatile alone orders nothing between the lanes of a warp: they need __syncwarp().
    const bool both_volatile = m.is_volatile && a.kind != Kind::kAtomic;
    if (!(both_volatile && in_warp_of(t, m))) return false;
  }
  return !ordered(w, m, t);
}

uint3 split(uint64_t number, const dim3& size) {
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(number / size.x % size.y),
          static_cast<unsigned>(number / size.x / size.y)};
}

std::string text(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string race_text(const Worker& w, const Mark& m, bool mark_writes, const Access& a) {
  const Thread& t = *thread;
  const Request& request = w.launch->request;
  const void* other_pc = site_number(m.site).pc;
  look_up_lines({other_pc, a.site.pc});
  const bool same_block = m.block == t.block->number;
  std::string other = m.several_threads && m.thread == t.rank
                          ? "another thread"
                          : "thread " + text(split(m.thread, request.block));
  if (!same_block) other += " of block " + text(split(m.block, request.grid));
  std::string message = same_block ? "race in " : "conflict between blocks in ";
  message += name_of(w, a.p) + ": " + other + (mark_writes ? " writes" : " reads") + " at " +
             line_of(other_pc) + ", " + describe(t) + " " + what(a.kind) + " at " +
             line_of(a.site.pc);
  if (!same_block) {
    message +=
        ", and nothing says which comes first.\n  Next: let one block own each element, "
        "or use atomics, or launch a second kernel. (A flag between blocks needs "
        "__threadfence() before it is set.)";
  } else if (in_warp_of(t, m)) {
    message +=
        ", both in one warp, with no __syncwarp() between.\n  Next: put __syncwarp() (or "
        "__syncthreads()) between the two.";
  } else {
    message += ", with no barrier between.\n  Next: put __syncthreads() between the two.";
  }
  if (mark_writes ? m.atomic && a.kind == Kind::kRead : !m.atomic && is_atomic(a.kind)) {
    message += " (If a value that may be out of date will do, read it through a volatile pointer.)";
  }
  return message;
}

[[noreturn]] void fail_race(const Worker& w, const Mark& m, bool mark_writes, const Access& a) {
  fail(cudaErrorLaunchFailure, race_text(w, m, mark_writes, a));
}

// A plain read of what others update atomically is how every loop around atomicCAS begins, and
// there it does no harm. So it is forgiven when the same thread goes on with an atomic there.
struct DoubtfulRead {
  const char* p;
  std::string message;
};
std::map<const Thread*, DoubtfulRead> doubtful_reads;

void report_doubtful_read(const Worker& w) {
  if (doubtful_reads.empty()) return;
  const auto& [reader, read] = *doubtful_reads.begin();
  fail_here(*w.launch, cudaErrorLaunchFailure, read.message, reader);
  doubtful_reads.clear();
}

void doubt(const Worker& w, const Mark& m, const Access& a) {
  auto [found, is_new] = doubtful_reads.try_emplace(thread);
  if (is_new) {
    found->second = {a.p, race_text(w, m, true, a)};
  } else if (found->second.p != a.p) {
    fail(cudaErrorLaunchFailure, found->second.message);
  }
}

void forgive(Cell& cell, const Access& a) {
  auto found = doubtful_reads.find(thread);
  if (found != doubtful_reads.end() && found->second.p == a.p) doubtful_reads.erase(found);
  if (is_own(cell.read, *thread)) cell.read.epoch = 0;
}

void renew(Mark& m, const Worker& w, const Thread& t, unsigned bytes, const Access& a) {
  m.block = t.block->number;
  m.epoch = t.block->epoch;
  m.time = now;
  m.thread = static_cast<uint16_t>(t.rank);
  m.warp_epoch = static_cast<uint16_t>(w.warps[t.warp].epoch);
  m.site = a.site.number;
  m.bytes = static_cast<uint8_t>(bytes);
  m.atomic = is_atomic(a.kind);
  m.is_volatile = m.atomic && a.kind != Kind::kAtomic;
  m.several_threads = m.several_warps = false;
}

void mark_read(Mark& m, const Worker& w, const Thread& t, unsigned bytes, const Access& a) {
  if (m.epoch == 0) {
    renew(m, w, t, bytes, a);
  } else if (m.block != t.block->number) {
    // A read by another block says more than one by this block: whoever writes, meets it.
    if (ordered(w, m, t)) renew(m, w, t, bytes, a);
  } else if (m.epoch != t.block->epoch || (!is_own(m, t) && ordered(w, m, t))) {
    renew(m, w, t, bytes, a);
  } else if (m.thread != t.rank && !(m.bytes & bytes)) {
    renew(m, w, t, bytes, a);  // another part of the word: only the last is remembered
  } else {
    if (m.thread != t.rank) {
      m.several_threads = true;
      if (m.thread / kWarpSize != t.rank / kWarpSize) m.several_warps = true;
    }
    m.bytes |= static_cast<uint8_t>(bytes);
    m.time = now;
    m.warp_epoch = static_cast<uint16_t>(w.warps[t.warp].epoch);
    m.atomic = m.atomic && is_atomic(a.kind);
  }
}

void mark_write(Mark& m, const Worker& w, const Thread& t, unsigned bytes, const Access& a) {
  const bool again = is_own(m, t) && m.epoch == t.block->epoch;
  const bool same_step = m.warp_epoch == static_cast<uint16_t>(w.warps[t.warp].epoch);
  if (again && same_step && !m.atomic && is_atomic(a.kind)) {
    m.bytes |= static_cast<uint8_t>(bytes);  // acc = 0; atomicAdd(&acc, 1): others may come between
    return;
  }
  const unsigned before = again ? m.bytes : 0;
  renew(m, w, t, bytes | before, a);
}

// The first read of shared memory that nobody had written. It is reported at the end of the phase:
// if another thread writes there before the next barrier, the fault is a race, with two lines.
struct EarlyRead {
  const Thread* reader = nullptr;
  const char* p;
  const void* pc;
  Kind kind;
};
EarlyRead early_read;

// Says whether any of the bytes had been written before.
bool check_word(const Worker& w, Cell& cell, unsigned bytes, const Access& a, bool shared) {
  const Thread& t = *thread;
  if (shared && cell.cluster != w.first_epoch) {
    cell = Cell{};
    cell.cluster = w.first_epoch;
  }
  const bool initialised = cell.initialised & bytes;
  if (a.kind == Kind::kAtomic) forgive(cell, a);
  if (conflicts(w, cell.write, t, bytes, a)) {
    if (a.kind != Kind::kRead || !cell.write.atomic || cell.write.is_volatile) {
      fail_race(w, cell.write, true, a);
    }
    doubt(w, cell.write, a);
  }
  if (writes(a.kind)) {
    if (conflicts(w, cell.read, t, bytes, a)) fail_race(w, cell.read, false, a);
    mark_write(cell.write, w, t, bytes, a);
    cell.initialised |= static_cast<uint8_t>(bytes);
  } else {
    mark_read(cell.read, w, t, bytes, a);
  }
  return initialised;
}

void pass_flag(Clock& clock, Kind kind) {
  if (writes(kind)) {
    clock.release = clock.fence;
    clock.block_release = clock.block_fence;
  }
  if (kind != Kind::kVolatileWrite) clock.acquire = ++now;
}

}  // namespace

void check_races(Worker& w, const Access& a, const Target& target) {
  unsigned words = 0, blank = 0;
  const char* first_blank = nullptr;
  for (const char *p = a.p, *end = a.p + a.size; p < end; words++) {
    const unsigned at = static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 4);
    const auto part = static_cast<unsigned>(std::min<std::ptrdiff_t>(end - p, 4 - at));
    if (!check_word(w, target.cells[words], ((1u << part) - 1) << at, a, target.shared)) {
      if (blank++ == 0) first_blank = p;
    }
    p += part;
  }
  const bool reads = a.kind != Kind::kWrite && a.kind != Kind::kVolatileWrite;
  if (target.shared && reads && early_read.reader == nullptr) {
    if (target.may_have_holes ? blank == words : blank != 0) {
      early_read = {thread, first_blank, a.site.pc, a.kind};
    }
  }
  if (is_atomic(a.kind)) pass_flag(clocks[thread->block->number], a.kind);
}

void end_of_phase(const Worker& w) {
  report_doubtful_read(w);
  if (early_read.reader == nullptr) return;
  fail_here(*w.launch, cudaErrorLaunchFailure,
            describe(*early_read.reader) + " " + what(early_read.kind) +
                " shared memory that nobody has written, at " + line_of(early_read.pc) + ": " +
                name_of(w, early_read.p) + ".\n  Next: let the block fill the whole array " +
                "first, and put a barrier behind it.",
            early_read.reader);
  early_read.reader = nullptr;
}

void fence(Scope scope) {
  Clock& clock = clocks[thread->block->number];
  clock.block_fence = ++now;
  if (scope == Scope::kDevice) clock.fence = now;
}

// The thread may have been stopped between the call of the checker and the load that it announced,
// and others have run meanwhile: the flag it then reads is newer than the call.
void resumed(const Thread& t) { clocks[t.block->number].acquire = ++now; }

void prepare_races(Launch& launch) {
  if (clocks) munmap(clocks, clocks_bytes);
  clocks_bytes = launch.clusters * launch.cluster_size * sizeof(Clock);
  void* p = mmap(nullptr, clocks_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  clocks = static_cast<Clock*>(p);
  now = 1;
  early_read.reader = nullptr;
  doubtful_reads.clear();
}

}  // namespace simt::checks
