"""What this GPU can do at best: the ceilings that a measured rung is compared with.

- ``copy``: device to device, bytes read plus bytes written a second;
- ``read``: a reduction to one number, bytes read a second;
- ``matmul``: the vendor library's square product of random numbers, FLOP a second, for each dtype;
  float32 without TF32.

Measured once for a GPU and a version of torch, and kept in the loader's cache folder.
"""

import json
import statistics
from collections.abc import Callable

import torch

import loader

BYTES = 1 << 30  # of one buffer: far beyond any L2
SIZES = (4096, 8192)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# How far above its ceiling a figure may lie before it is taken for an error of measurement.
# Memory: torch.add, two reads a write, reaches 1.03 of a copy (the memory turns around less often);
# a defeated flush shows at 2 and more. matmul: the library is not the hardware's limit, and the
# best public kernels beat it by up to a tenth.
MARGIN = {"copy": 1.10, "read": 1.10, "matmul": 1.25}


def ceilings(fresh: bool = False) -> dict[str, float]:
    """``{"copy": bytes/s, "read": bytes/s, "matmul float32": FLOP/s, …}`` of the current GPU.

    ``fresh``: measure again (about 2 s), and keep that.
    """
    file = loader.cache_folder() / "ceilings.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    key = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    if fresh or key not in known:
        known[key] = _measure()
        file.write_text(json.dumps(known, indent=1))
    return known[key]


def _measure() -> dict[str, float]:
    source = torch.randn(BYTES // 4, device="cuda")
    copy = torch.empty_like(source).copy_
    found = {"copy": 2 * BYTES / _seconds(lambda: copy(source))}
    found["read"] = BYTES / min(_seconds(source.sum), _seconds(source.amax))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in DTYPES:
        rates = []
        for n in SIZES:
            a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
            rates.append(2 * n**3 / _seconds(lambda a=a, b=b: a @ b))
        found[f"matmul {str(dtype).removeprefix('torch.')}"] = max(rates)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


def _seconds(call: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3
