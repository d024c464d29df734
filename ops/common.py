"""What the operator modules share: their default kernel, random inputs, test cases, costs."""

import functools
import os
import types
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

import loader
from ops.installed import installed

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@functools.cache
def last_rung(op: str, rung: str | None = None) -> types.ModuleType:
    """What an operator runs when it is given no kernel: ``rung`` if it chooses, else the last one.

    On a GPU that is the build that ``packaging/`` installed, if it fits (see ``installed``), else
    what ``loader.load`` builds. The ``__file__`` of the result tells which.
    """
    found = installed(op, rung) if loader.default_backend() == "cuda" else None
    return found or loader.load(op, rung)


def run(op: str, rung: str, general: str, *inputs) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What ``rung`` makes of the inputs, or ``general`` if it refuses them.

    What a rung takes depends on more than the inputs: a slice of a GPU may have no cluster that is
    large enough.
    """
    try:
        return getattr(last_rung(op, rung), op)(*inputs)
    except RuntimeError as error:
        if rung == general or "not supported by this rung" not in str(error):
            raise
    return getattr(last_rung(op, general), op)(*inputs)


def takes_hopper_code(device: torch.device) -> bool:
    """Whether rungs that need ``sm_90a`` run on this GPU: a Hopper GPU, if built for it."""
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return hopper and "9.0a" in _built_for(os.environ.get("TORCH_CUDA_ARCH_LIST"))


def may_have_clusters(x: torch.Tensor) -> bool:
    """Whether blocks can form clusters where x is: from Hopper on, and on the CPU machine."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 9


@functools.cache
def _built_for(listed: str | None) -> list[str]:
    return loader.arch_list().split(";")


def differentiable_once(backward: Callable) -> Callable:
    """Decorates a ``backward`` that is a kernel: a second derivative is refused, not wrong.

    ``torch.autograd.function.once_differentiable`` refuses where ``loss.backward()`` meets an
    incoming gradient that has a graph. Everywhere else, as in ``torch.autograd.grad(loss, x)``, the
    second derivative would be missing without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx, *grads: torch.Tensor | None):
        if torch.is_grad_enabled():  # with create_graph=True
            name = backward.__qualname__.partition(".")[0]
            raise RuntimeError(f"{name} is differentiable once; create_graph=True asks for more")
        return backward(ctx, *grads)

    return refusing


class Cost(NamedTuple):
    """The least an operator must do: bytes through device memory, floating-point operations."""

    bytes: int
    flops: int


class Case(NamedTuple):
    """Arguments to check an operator on. ``inputs(device)`` makes fresh random ones each time."""

    name: str
    inputs: Callable[[str], tuple]
    elements: int  # of the largest argument, to leave out what a machine cannot hold
    slack: float = 1  # times the operator's tolerance: rounding grows with the length of a sum


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
            x.view(-1)[i::7] = value
        return x
    raise ValueError(f"there is no layout {layout!r}")


def stored(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy if its values are not in its memory, as of ``z.conj().imag``.

    PyTorch negates such a view when it is read; a kernel would read what is there.
    """
    if torch.compiler.is_compiling():  # the dispatcher copies it for what torch.ops holds
        return x
    return x.clone() if x.is_neg() or x.is_conj() or x._is_zerotensor() else x
