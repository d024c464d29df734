"""Run under NVIDIA's compute-sanitizer, and say in a few lines what it found."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lab import child

FAULT = re.compile(r"(Invalid|Error|Warning|Uninitialized|Barrier|Divergent|Race|Program hit)\b")
PYTORCH = "2at6native"  # in the names of its kernels; watching those takes most of the time
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


class Finding(RuntimeError):
    """compute-sanitizer found a fault; the message holds the first, and how many there are."""


def run(tool: str, function: str, arguments: Sequence, limit: float):
    """``function(*arguments)`` under ``compute-sanitizer --tool <tool>``; its result.

    ``limit``: seconds for each of about ten cases, start included.

    Raises:
        Finding: the tool found something.
        FileNotFoundError: compute-sanitizer is not installed.
    """
    if tool not in TOOLS:
        raise ValueError(f"sanitize must be one of {', '.join(TOOLS)}, got {tool!r}")
    program = _program()
    command = [program, "--tool", tool, "--print-limit", "20"]
    if tool != "initcheck":  # which has to see what PyTorch's kernels write
        command += ["--kernel-name-exclude", f"kernel_substring={PYTORCH}"]
    # PyTorch hands out pieces of large blocks: an index past a tensor would stay inside a block.
    result, printed = child.once(
        command, function, arguments, 10 * limit, PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    if found := findings(printed):
        what = f"compute-sanitizer ({tool}) found {len(found)} faults"
        raise Finding(f"{what}. The first:\n{found[0]}")
    if result is None:
        raise child.Died(f"the process under compute-sanitizer ended early:\n{printed[-2000:]}")
    return result


def findings(printed: str) -> list[str]:
    """The faults that compute-sanitizer reports, without host backtraces and addresses' noise."""
    found: list[list[str]] = []
    inside = False
    for line in printed.splitlines():
        if not (match := re.match(r"=========\s?(.*)", line)):
            continue
        text = match[1]
        if FAULT.match(text.strip()):
            if not text.strip().startswith("Error: No attachable"):
                found.append([text.strip()])
                inside = True
        elif inside and "backtrace" in text.lower():
            inside = False
        elif inside and text.strip():
            found[-1].append("  " + text.strip())
        else:
            inside = False
    return ["\n".join(lines) for lines in found]


def _program() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for place in (shutil.which("compute-sanitizer"), f"{home}/bin/compute-sanitizer"):
        if place and Path(place).exists():
            return place
    raise FileNotFoundError(
        f"compute-sanitizer is not on PATH and not in {home}/bin; it comes with NVIDIA's CUDA "
        "toolkit. Without it: lab.check(…, backend='simt') watches every access on the CPU."
    )
