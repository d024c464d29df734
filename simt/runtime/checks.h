// The points where the scheduler tells the checker what happens. Without check=True they are empty.
#pragma once
#include "../include/simt/machine.h"
#include "run.h"

namespace simt::checks {

#if SIMT_CHECKED
void launch_starts(Launch& launch);
void launch_ends(Launch& launch);
void worker_starts(Worker& w);  // on its host thread
void blocks_start(Worker& w);
void blocks_end(Worker& w);
void barrier_reached(const Place& here);  // called once for all threads that meet in it
void barrier_opens(Worker& w, const Block& b);
void resumed(const Thread& t);  // after a yield
#else
inline void launch_starts(Launch&) {}
inline void launch_ends(Launch&) {}
inline void worker_starts(Worker&) {}
inline void blocks_start(Worker&) {}
inline void blocks_end(Worker&) {}
inline void barrier_reached(const Place&) {}
inline void barrier_opens(Worker&, const Block&) {}
inline void resumed(const Thread&) {}
#endif

}  // namespace simt::checks
