"""softmax: exponentials of a row over their sum, for rows of any length."""

import types

import torch

from ops.common import (
    FLOATS,
    Case,
    Cost,
    differentiable_once,
    may_have_clusters,
    run,
    stored,
    tensor,
)
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph
from ops.softmax_backward import softmax_backward

DETERMINISTIC = True
SHORT, LONG = "7_short_rows", "8_in_order"  # see fastest()
GENERAL = "9_any_row"  # takes every row length and every alignment


def reference(x: torch.Tensor) -> torch.Tensor:
    """``softmax(x)`` along the last dimension, in float64."""
    return torch.softmax(x.double(), dim=-1)


def softmax(x: torch.Tensor, dim: int = -1, kernel: types.ModuleType | None = None) -> torch.Tensor:
    """``exp(x) / exp(x).sum(dim)``, shifted so that nothing overflows; differentiable, once.

    Args:
        x: at least one dimension, float32, float64, float16 or bfloat16. Any strides; what is not
            contiguous along ``dim`` is copied once.
        dim: the dimension that is to sum up to 1.
        kernel: what ``loader.load("softmax", rung)`` returned. For None, that of the rung which
            ``fastest`` names.

    Returns:
        A tensor of x's shape and dtype, contiguous if ``dim`` is the last one. As in PyTorch, a
        slice that holds NaN or +inf, or nothing but -inf, becomes NaN.

    Raises:
        RuntimeError: device or dtype do not fit.
        IndexError: x has no dimension ``dim``.
    """
    if kernel and is_compiling():
        return out_of_graph(softmax, x, dim, kernel)
    kernel = kernel or in_graph()
    if dim not in (-1, x.dim() - 1):
        return Softmax.apply(x.transpose(dim, -1), kernel).transpose(dim, -1)
    return Softmax.apply(x, kernel)


class Softmax(torch.autograd.Function):
    """Keeps the result: the gradient needs nothing else."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: types.ModuleType | None) -> torch.Tensor:
        x = stored(x).contiguous()
        out = kernel.softmax(x) if kernel else _run(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return softmax_backward(grad, out), None


def fastest(x: torch.Tensor) -> str:
    """The rung for x: ``SHORT`` for rows of up to 1 KB, ``LONG`` where a row is too long for one
    block of ``GENERAL``, else ``GENERAL``.

    ``GENERAL`` starts a block for each row; on an H200 that takes 0.6 ns, as long as it takes to
    read and write 1.3 KB. ``LONG`` wants rows of up to 1 MB that begin at multiples of 16 bytes,
    and pays from about 32 MB on, where each SM has several.
    """
    if x.dim() == 0:
        return GENERAL  # which refuses it
    row = x.shape[-1] * x.element_size()
    if row <= 1024:
        return SHORT
    if x.shape[-1] <= 1 << (13 if x.element_size() == 8 else 14) or x.nbytes < 1 << 25:
        return GENERAL
    fits = row <= 1 << 20 and row % 16 == x.data_ptr() % 16 == 0
    return LONG if fits and may_have_clusters(x) else GENERAL


def _run(x: torch.Tensor) -> torch.Tensor:
    return run("softmax", fastest(x), GENERAL, x)


opaque("softmax(Tensor x) -> Tensor", _run, torch.empty_like)


def cost(x: torch.Tensor) -> Cost:
    """Reads x, writes the result; a maximum, a difference, an exponential, a sum, a product."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=5 * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    In 16 bits the result is rounded once: half an epsilon. In float32 and float64 the exponential's
    argument x − max is rounded too, which costs |x − max| half epsilons, and its 2^x has 2 ulp; and
    rung 1 adds up to 2^18 terms one after the other, whose roundings wander off by up to the root
    of their number, 512 half epsilons.
    """
    return torch.finfo(dtype).eps * (256 if dtype in (torch.float32, torch.float64) else 1)


def grad_tolerance(dtype: torch.dtype) -> float:
    """Of the gradient y·(g − Σ g·y): y was rounded to dtype when it was saved, and the difference
    cancels where one probability is near 1, so several roundings count instead of one."""
    return 4 * tolerance(dtype)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype."""
    lengths = (1, 2, 3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((70, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (1, 12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [
        ((6, 50), "large"),
        ((6, 1024), "large"),
        ((8, 12), "nonfinite"),
        ((8, 12), "masked"),
    ]
    wanted += [((3, 1024), "masked"), ((2, 4096), "masked"), ((2, 5003), "nonfinite")]
    wanted += [((2, n), "contiguous") for n in (16384, 16387, 32776, 65536, 131073, 262144)]
    wanted += [((2, 65536), "misaligned"), ((2, 40000), "masked"), ((1, (1 << 20) + 3), "masked")]
    found = [_case(*one, torch.float32) for one in every]
    found += [_case(*one, dtype) for dtype in FLOATS for one in wanted]
    # Past 32-bit indices, with rows for a warp and for a block.
    found.append(_case(((1 << 25) + 8, 64), "contiguous", torch.float16))
    found.append(_case(((1 << 19) + 8, 4099), "contiguous", torch.bfloat16))
    return found


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^20 in about 2^28 bytes; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((8192, 16384), "contiguous"), ((4096, 65536), "contiguous")]
    wanted += [((1024, 262144), "contiguous"), ((262144, 128), "contiguous")]
    wanted += [((128, 1 << 20), "contiguous")]
    wanted += [((32768, 4099), "contiguous"), ((32768, 4096), "misaligned")]
    wanted += [((65536, 1023), "contiguous"), ((4096, 65537), "contiguous")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own."""
    return {"eager": lambda x: torch.softmax(x, dim=-1)}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor]:
        if layout == "large":  # exp() of these is far beyond every dtype
            # Spread by 3, not 10: where one probability is near 1, a gradient is all rounding.
            return (tensor(shape, dtype, device) * 3 + 1000,)
        if layout == "masked":  # as attention does: -inf in places, and in one whole row
            x = tensor(shape, dtype, device)
            x[..., ::3] = float("-inf")
            x[-1] = float("-inf")
            return (x,)
        x = tensor(shape, dtype, device, layout)
        # Long rows of like values would end among float16's denormals, which have fewer bits.
        return (x * 4 if dtype == torch.float16 and shape[-1] > 16384 else x,)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
