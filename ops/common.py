"""What the operator modules share: random inputs in every layout, test cases, costs."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Cost(NamedTuple):
    """The least an operator must do: bytes through device memory, floating-point operations."""

    bytes: int
    flops: int


class Case(NamedTuple):
    """Arguments to check an operator on. ``inputs(device)`` makes fresh random ones each time."""

    name: str
    inputs: Callable[[str], tuple]
    elements: int  # of the largest argument, to leave out what a machine cannot hold


def tensor(
    shape: Sequence[int], dtype: torch.dtype, device: str, layout: str = "contiguous"
) -> torch.Tensor:
    """A random normal tensor of ``shape``.

    ``layout``: ``contiguous``; ``transposed`` (last two dimensions); ``misaligned`` (contiguous,
    but one element past a 16-byte boundary); ``strided`` (every second element of longer rows);
    ``expanded`` (stride 0 along the first dimension); ``nonfinite`` (some NaN, inf and -inf).
    """
    shape = tuple(shape)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

    if layout == "contiguous":
        return normal(*shape)
    if layout == "transposed":
        return normal(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "misaligned":
        return normal(1 + torch.Size(shape).numel())[1:].view(shape)
    if layout == "strided":
        return normal(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return normal(1, *shape[1:]).expand(shape)
    if layout == "nonfinite":
        x = normal(*shape)
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            x.view(-1)[i :: 7] = value
        return x
    raise ValueError(f"there is no layout {layout!r}")
