"""rms_norm: a row divided by its root mean square, times a weight; LayerNorm's little brother."""

import types

import torch

from ops.common import FLOATS, Case, Cost, differentiable_once, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph
from ops.rms_norm_backward import rms_norm_backward

DETERMINISTIC = True
GENERAL = "5_any_row"  # takes every row length and every alignment
BLOCK, LONG = "2_registers", "3_ahead"  # see fastest()


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` along the last dimension, in float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    kernel: types.ModuleType | None = None,
) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` along the last dimension (arXiv:1910.07467).

    Differentiable, once.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16. Any strides; what is not contiguous is
            copied once.
        weight: (C,), of x's dtype and device.
        eps: added to the mean square.
        kernel: what ``loader.load("rms_norm", rung)`` returned. For None, that of the rung which
            ``fastest`` names.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(rms_norm, x, weight, eps, kernel)
    return RMSNorm.apply(x, weight, eps, kernel or in_graph())


def fastest(x: torch.Tensor, weight: torch.Tensor) -> str:
    """The rung for these, by the length of a row; ``GENERAL`` for short ones, and where x or weight
    does not begin, or some rows would not begin, at a multiple of 16 bytes."""
    row = x.shape[-1] * x.element_size() if x.dim() else 1
    if row % 16 or x.data_ptr() % 16 or weight.data_ptr() % 16 or row <= 512:
        return GENERAL
    return BLOCK if row <= 1 << 16 else LONG


class RMSNorm(torch.autograd.Function):
    """Keeps x, and 1 / sqrt(mean(x²) + eps) of each row."""

    @staticmethod
    def forward(ctx, x, weight, eps, kernel):
        x, weight = stored(x).contiguous(), stored(weight).contiguous()
        kernel = kernel or last_rung("rms_norm", fastest(x, weight))
        out, rstd = kernel.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, grad):
        dx, dweight = rms_norm_backward(grad, *ctx.saved_tensors)
        return dx, dweight, None, None


def _empty(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = 0 if x.shape[-1] == 0 else x.numel() // x.shape[-1]
    return torch.empty_like(x), x.new_empty(rows, dtype=wide)


opaque(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: last_rung("rms_norm", fastest(x, weight)).rms_norm(x, weight, eps),
    _empty,
)


def cost(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Cost:
    """Reads x and the weight, writes the result; two products, a square and a sum."""
    elements = 2 * x.numel() + weight.numel()
    return Cost(bytes=elements * x.element_size(), flops=4 * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    In 16 bits the result is rounded once, half an epsilon. In float32 and float64 two products and
    the root round it, and a sum of many squares, all positive, loses a few epsilons.
    """
    return torch.finfo(dtype).eps * (8 if dtype in (torch.float32, torch.float64) else 1)


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``; the sums over thousands of rows add to it, about a square root of each."""
    return 4 * tolerance(dtype)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype."""
    lengths = (3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((70, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((8, 12), "nonfinite"), ((2, 5003), "nonfinite")]
    wanted += [((2, n), "contiguous") for n in (16384, 16387, 32776, 65536, 131073, 262144)]
    wanted += [((2, 65536), "misaligned"), ((1, (1 << 20) + 3), "contiguous")]
    found = [_case(*one, torch.float32) for one in every]
    found += [_case(*one, dtype) for dtype in FLOATS for one in wanted]
    found.append(_case(((1 << 19) + 8, 4099), "contiguous", torch.bfloat16))  # past 2^31 elements
    return found


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^18; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((65536, 128), "contiguous"), ((8192, 16384), "contiguous")]
    wanted += [((4096, 65536), "contiguous"), ((1024, 262144), "contiguous")]
    wanted += [((32768, 4099), "contiguous"), ((32768, 4096), "misaligned")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own."""

    def eager(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    return {"eager": eager}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        slipped = "misaligned" if layout == "misaligned" else "contiguous"
        return tensor(shape, dtype, device, layout), tensor(shape[-1:], dtype, device, slipped)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
