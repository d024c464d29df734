"""How many threads an SM can hold of a kernel, by its registers and shared memory.

Source: CUDA C++ Programming Guide, "Compute Capabilities", and the occupancy calculator's rules:
registers are given to a warp in units of 256, and a block's shared memory costs 1 KB more.
"""

import re

REGISTERS = 65536  # an SM's, on every chip below
MAX_BLOCKS = 32
SMS = {  # compute capability → warps an SM holds, KB of shared memory it has
    "7.5": (32, 64), "8.0": (64, 164), "8.6": (48, 100), "8.7": (48, 164), "8.9": (48, 100),
    "9.0": (64, 228), "10.0": (64, 228), "12.0": (48, 100),
}  # fmt: skip


def occupancy(registers: int, shared: int, arch: str, threads: int = 256) -> float | None:
    """Share of an SM's warps that are in use with blocks of ``threads`` threads; None if unknown.

    ``shared``: bytes a block, ``arch``: as ptxas says, ``sm_90a``.
    """
    found = re.match(r"sm_(\d+)(\d)", arch)
    if not found or f"{found[1]}.{found[2]}" not in SMS:
        return None
    warps, kilobytes = SMS[f"{found[1]}.{found[2]}"]
    per_block = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        MAX_BLOCKS,
        warps // per_block,
        REGISTERS // max(per_warp, 1) // per_block,
        kilobytes * 1024 // (shared + 1024),
    )
    return blocks * per_block / warps
