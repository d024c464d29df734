// What memory accesses cost, counted as the hardware does: for a warp at a time. The lanes run one
// after the other here, so the k-th time that each lane passes an instruction since the last
// barrier makes up the warp's k-th request.
//   global memory: the sectors of 32 bytes that the request touches, and the fewest that could
//                  hold as many bytes
//   shared memory: the passes over the 32 banks ("wavefronts"); lanes that want different words of
//                  one bank need one pass each
#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>

#include "checker.h"
#include "worker.h"

namespace simt::checks {

namespace {

struct Request {
  uint32_t lanes;
  uintptr_t address[kWarpSize];
};

// Requests of one warp that some lanes have made and others may yet join.
struct Pending {
  std::vector<simt::checks::Request> requests;
  size_t used = 0;
  uint32_t passed[kWarpSize] = {};  // how often each lane has been here
};

constexpr size_t kMaxPending = 1 << 15;  // what a lane does beyond it is not counted

}  // namespace

struct Counter {
  const Site* site;
  std::string kernel;
  Kind kind;
  bool shared;
  unsigned size;
  uint64_t requests = 0, lanes = 0, bytes = 0, cost = 0, ideal = 0;
  unsigned worst = 0;
  std::vector<Pending> pending;  // per warp
};

namespace {

std::deque<Counter>& all_counters() {
  static auto* counters = new std::deque<Counter>;
  return *counters;
}

struct BarrierCounter {
  std::string kernel;
  uint64_t passed = 0;
};
std::map<std::pair<std::string, int>, BarrierCounter>& barriers() {
  static auto* counters = new std::map<std::pair<std::string, int>, BarrierCounter>;
  return *counters;
}

// For each warp, the counters that have something pending of it.
std::vector<std::vector<Counter*>> pending_of_warp;

void count_global(Counter& c, uintptr_t* address, unsigned n) {
  if (!std::is_sorted(address, address + n)) std::sort(address, address + n);
  uint64_t sectors = 0, bytes = 0;
  uintptr_t end = 0;               // of the bytes that are counted already
  uintptr_t last = ~uintptr_t{0};  // the last sector that is counted already
  for (unsigned i = 0; i < n; i++) {
    const uintptr_t from = std::max(address[i], end), to = address[i] + c.size;
    if (from >= to) continue;
    bytes += to - from;
    end = to;
    uintptr_t sector = from / 32;
    if (sector == last) sector++;
    const uintptr_t final_sector = (to - 1) / 32;
    if (sector <= final_sector) sectors += final_sector - sector + 1;
    last = final_sector;
  }
  c.cost += sectors;
  c.ideal += (bytes + 31) / 32;
  c.worst = std::max(c.worst, static_cast<unsigned>(sectors));
}

void count_shared(Counter& c, const simt::checks::Request& r) {
  // Wide accesses go in groups of lanes that want 128 bytes together.
  const unsigned group = c.size <= 4 ? kWarpSize : std::max(1u, 128 / c.size);
  const unsigned words = std::max(1u, c.size / 4);
  for (unsigned first = 0; first < kWarpSize; first += group) {
    uintptr_t seen[kWarpSize];  // the words of this group
    unsigned count_seen = 0, most = 0;
    uint8_t in_bank[kWarpSize] = {};
    for (unsigned lane = first; lane < std::min(first + group, kWarpSize); lane++) {
      if (!(r.lanes >> lane & 1)) continue;
      for (unsigned k = 0; k < words; k++) {
        const uintptr_t word = r.address[lane] / 4 + k;
        if (std::find(seen, seen + count_seen, word) != seen + count_seen) continue;
        if (count_seen < kWarpSize) seen[count_seen++] = word;
        most = std::max<unsigned>(most, ++in_bank[word % 32]);
      }
    }
    c.cost += most;
    c.ideal += most != 0;
    c.worst = std::max(c.worst, most);
  }
}

void count_request(Counter& c, const simt::checks::Request& r) {
  uintptr_t address[kWarpSize];
  unsigned n = 0;
  for (unsigned rest = r.lanes; rest; rest &= rest - 1) {
    address[n++] = r.address[__builtin_ctz(rest)];
  }
  c.requests++;
  c.lanes += n;
  c.bytes += uint64_t{n} * c.size;
  if (c.shared) {
    count_shared(c, r);
  } else {
    count_global(c, address, n);
  }
}

Counter& counter_of(Worker& w, Site& site, Kind kind, bool shared, unsigned size) {
  if (site.counter == nullptr) {
    Counter c;
    c.site = &site;
    c.kernel = w.launch->request.site.kernel;
    c.kind = kind;
    c.shared = shared;
    c.size = size;
    all_counters().push_back(c);
    site.counter = &all_counters().back();
  }
  Counter& c = *site.counter;
  if (c.pending.size() < w.warps.size()) c.pending.resize(w.warps.size());
  return c;
}

}  // namespace

void count(Worker& w, const Access& a, bool shared) {
  Counter& c = counter_of(w, a.site, a.kind, shared, a.size);
  const Thread& t = *thread;
  Pending& pending = c.pending[t.warp];
  if (pending.used == 0) pending_of_warp[t.warp].push_back(&c);
  const size_t k = pending.passed[t.lane]++;
  if (k >= kMaxPending) return;
  if (k >= pending.used) {
    if (pending.requests.size() <= k) pending.requests.resize(2 * k + 1);
    pending.requests[k].lanes = 0;
    pending.used = k + 1;
  }
  pending.requests[k].lanes |= 1u << t.lane;
  pending.requests[k].address[t.lane] = reinterpret_cast<uintptr_t>(a.p);
}

void finish_warp(Worker&, unsigned warp) {
  for (Counter* c : pending_of_warp[warp]) {
    Pending& pending = c->pending[warp];
    for (size_t i = 0; i < pending.used; i++) count_request(*c, pending.requests[i]);
    pending.used = 0;
    std::fill(std::begin(pending.passed), std::end(pending.passed), 0);
  }
  pending_of_warp[warp].clear();
}

void count_barrier(const Place& here) {
  BarrierCounter& c = barriers()[{here.file, here.line}];
  if (c.passed++ == 0) c.kernel = worker->launch->request.site.kernel;
}

void prepare_counters(Launch& launch) {
  const dim3 b = launch.request.block;
  const unsigned warps = (b.x * b.y * b.z + kWarpSize - 1) / kWarpSize * launch.cluster_size;
  // A launch that failed may have left something behind.
  for (Counter& c : all_counters()) c.pending.clear();
  pending_of_warp.assign(warps, {});
}

// ---- the points in a launch that checks.h names ----

void launch_starts(Launch& launch) {
  prepare_memory(launch);
  prepare_races(launch);
  prepare_counters(launch);
}

void launch_ends(Launch&) { release_memory(); }

void blocks_start(Worker& w) {
  // Not a number in every floating-point type: what was not written should show in results.
  for (Block& b : w.blocks) memset(b.shared, 0xFF, w.launch->request.dynamic_shared);
}

void barrier_reached(const Place& here) { count_barrier(here); }

void blocks_end(Worker& w) { end_of_phase(w); }

void barrier_opens(Worker& w, const Block& b) {
  end_of_phase(w);
  for (unsigned i = 0; i < (b.size + kWarpSize - 1) / kWarpSize; i++) {
    finish_warp(w, b.first_warp + i);
  }
}

}  // namespace simt::checks

extern "C" {

// A line per instruction and per barrier, with tabs between the fields.
__attribute__((visibility("default"))) const char* simt_counters() {
  using namespace simt::checks;
  static std::string text;
  std::vector<const void*> pcs;
  for (const Counter& c : all_counters()) pcs.push_back(c.site->pc);
  simt::look_up_lines(pcs);
  text.clear();
  char numbers[256];
  for (const Counter& c : all_counters()) {
    if (c.requests == 0) continue;
    const char* kind = c.kind == Kind::kAtomic ? "atomic" : writes(c.kind) ? "store" : "load";
    snprintf(numbers, sizeof numbers, "\t%u\t%llu\t%llu\t%llu\t%llu\t%llu\t%u\n", c.size,
             static_cast<unsigned long long>(c.requests), static_cast<unsigned long long>(c.lanes),
             static_cast<unsigned long long>(c.bytes), static_cast<unsigned long long>(c.cost),
             static_cast<unsigned long long>(c.ideal), c.worst);
    text += c.kernel + "\t" + simt::line_of(c.site->pc) + "\t" + (c.shared ? "shared" : "global") +
            "\t" + kind + numbers;
  }
  for (const auto& [place, c] : barriers()) {
    snprintf(numbers, sizeof numbers, "\t0\t%llu\t0\t0\t0\t0\t0\n",
             static_cast<unsigned long long>(c.passed));
    text += c.kernel + "\t" + place.first + ":" + std::to_string(place.second) +
            "\tblock\tbarrier" + numbers;
  }
  return text.c_str();
}

__attribute__((visibility("default"))) void simt_reset() {
  using namespace simt::checks;
  for (Counter& c : all_counters()) {
    c.requests = c.lanes = c.bytes = c.cost = c.ideal = 0;
    c.worst = 0;
  }
  barriers().clear();
}

}  // extern "C"
