"""Time functions on the GPU, side by side on the same inputs.

- Inputs rotate among so many sets that together they exceed the L2 cache four times; outputs rotate
  too. Where a set is so small that 1024 of them do not, the times are those of data in the cache.
- The arms take turns, A B C A B C, so that a clock that changes meets all of them; a slow one has
  had enough after five, and the others go on.
- A sample is at least a millisecond between two CUDA events. The GPU is kept busy while it is
  being prepared, so that waiting for the CPU is not in it.
- Below 100 µs the calls of a sample are replayed from a CUDA graph: what a call costs on the CPU
  (10 µs and more) would hide the kernel. That cost is stated beside it, as the time of an eager
  call. ``triton.testing.do_bench`` differs for such kernels: it has the launch in its times, and
  empties the cache before each, so that a kernel starts from memory that nobody has touched.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ops.common import Case, Cost

CACHE_FACTOR = 4  # how often the rotating buffers exceed the L2
MIN_SETS, MAX_SETS = 3, 1024
GRAPH_BELOW = 100e-6  # seconds
SAMPLE = 1e-3  # seconds at least
ROUNDS = 50
BUDGET = 0.4  # seconds an arm, when that is reached before ROUNDS
MIN_ROUNDS = 5
BUSY = 200_000  # cycles to keep the GPU waiting while a sample is prepared: about 100 µs


@dataclass
class Timing:
    """Seconds of one call: median and quartiles of the samples. ``call``: eager, CPU included."""

    median: float
    low: float
    high: float
    call: float | None
    graph: bool
    result: object  # of a last call on ``inputs``, made as the timed ones were
    inputs: tuple


@dataclass
class _Arm:
    function: Callable
    inputs: list[tuple]
    results: list  # the last result on each set: while they are held, outputs rotate too
    calls: int = 1  # in a sample
    graph: torch.cuda.CUDAGraph | None = None
    replays: int = 1
    turn: int = 0

    def sample(self) -> None:
        if self.graph:
            for _ in range(self.replays):
                self.graph.replay()
            return
        for _ in range(self.calls):
            self.turn = (self.turn + 1) % len(self.inputs)
            self.results[self.turn] = self.function(*self.inputs[self.turn])


def rotation(case: Case, arms: int, cost: Callable[..., Cost]) -> tuple[list[tuple], bool]:
    """Sets of inputs that together with their results exceed the cache, and whether they do.

    ``cost`` tells what a call moves: small inputs may have a large result, and the results of all
    sets are held. At least three sets, if half of the free memory holds them and the results of all
    ``arms``: how fast memory is depends a little on where in it a tensor lies.
    """
    first = case.inputs("cuda")
    size = sum(x.untyped_storage().nbytes() for x in first if torch.is_tensor(x))
    size = max(size, cost(*first).bytes)
    wanted = CACHE_FACTOR * torch.cuda.get_device_properties().L2_cache_size
    sets = min(MAX_SETS, -(-wanted // max(size, 1)))
    if MIN_SETS * size * (1 + arms) < torch.cuda.mem_get_info()[0] / 2:
        sets = max(sets, MIN_SETS)
    return [first, *(case.inputs("cuda") for _ in range(sets - 1))], sets * size >= wanted


@torch.no_grad()
def side_by_side(
    functions: Mapping[str, Callable],
    inputs: list[tuple],
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Timing]:
    """Time each function as ``function(*inputs[i])``."""
    arms = {}
    for name, function in functions.items():
        progress(name)
        arms[name] = _prepare(function, inputs)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    spent = dict.fromkeys(arms, 0.0)
    for done in range(ROUNDS):
        events = {}
        for name, arm in arms.items():
            if done >= MIN_ROUNDS and spent[name] > BUDGET:
                continue
            progress(name)
            events[name] = _event(), _event()
            torch.cuda._sleep(BUSY)
            events[name][0].record()
            arm.sample()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (start, end) in events.items():
            took = start.elapsed_time(end) / 1e3
            samples[name].append(took / (arms[name].calls * arms[name].replays))
            spent[name] += took
    return {name: _timing(arm, samples[name]) for name, arm in arms.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _prepare(function: Callable, inputs: list[tuple]) -> _Arm:
    """Warm up, find out how long a call takes, and capture it if that is short."""
    arm = _Arm(function, inputs, [None] * len(inputs), calls=len(inputs))
    side = torch.cuda.Stream()  # a capture wants its first calls on a stream of their own
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function(*inputs[0])
    torch.cuda.current_stream().wait_stream(side)
    arm.calls = 1
    took = _seconds(arm.sample)
    if took < SAMPLE:  # mostly the launch; many calls in a row tell more
        arm.calls = 20
        took = _seconds(arm.sample) / arm.calls
    arm.calls = max(1, round(SAMPLE / took))
    if took > GRAPH_BELOW:
        return arm
    arm.results = []
    arm.calls = len(inputs) * -(-20 // len(inputs))
    gc.collect()  # a tensor freed during a capture would break it
    arm.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(arm.graph):
        for i in range(arm.calls):
            arm.results.append(function(*inputs[i % len(inputs)]))
    arm.replays = max(1, round(SAMPLE / _seconds(arm.graph.replay)))
    return arm


def _seconds(call: Callable[[], None]) -> float:
    call()
    start, end = _event(), _event()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _timing(arm: _Arm, samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    call = _eager(arm) if arm.graph else None
    if arm.graph:
        # The graph must do the work, not find it done: spoil what the timed replays have left.
        result = arm.results[0]
        for x in result if isinstance(result, tuple) else (result,):
            x.fill_(float("nan") if x.is_floating_point() else -1)
        arm.graph.replay()
        inputs = arm.inputs[0]
    else:
        result, inputs = arm.results[arm.turn], arm.inputs[arm.turn]
    torch.cuda.synchronize()
    return Timing(median, low, high, call, bool(arm.graph), result, inputs)


def _eager(arm: _Arm, calls: int = 200) -> float:
    """Seconds of a call that is one of many, from Python: CPU or GPU, whichever is slower."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            arm.function(*arm.inputs[i % len(arm.inputs)])
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)
