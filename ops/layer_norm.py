"""layer_norm: LayerNorm with weight and bias, and the addition before it, in one kernel."""

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
from ops.layer_norm_backward import layer_norm_backward

DETERMINISTIC = True
GENERAL = "10_any_row"  # takes every row length and every alignment
BLOCK, SHORT, LONG = "4_vectorized", "6_short_rows", "7_ahead"  # see fastest()
IN_ORDER = "8_in_order"


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, except that x + residual is rounded to x's dtype, as it is stored."""
    if residual is None:
        total = x.double()
    else:
        exact = x.double() + residual.double()
        total = exact + ((x + residual).double() - exact).detach()  # rounded; gradient of exact
    mean = total.mean(-1, keepdim=True)
    variance = (total - mean).square().mean(-1, keepdim=True)
    out = (total - mean) / (variance + eps).sqrt() * weight.double() + bias.double()
    return out if residual is None else (out, total)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    kernel: types.ModuleType | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`` (arXiv:1607.06450), h = x + residual.

    Mean and variance are those of the last dimension, and the variance divides by its length.
    Differentiable, once.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16. Any strides; what is not contiguous is
            copied once.
        weight, bias: (C,), of x's dtype and device.
        residual: None, or a tensor like x that is added to it first.
        eps: added to the variance.
        kernel: what ``loader.load("layer_norm", rung)`` returned. For None, that of the rung which
            ``fastest`` names.

    Returns:
        A contiguous tensor of x's shape and dtype; with a residual also h, which a transformer
        block carries on.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(layer_norm, x, weight, bias, residual, eps, kernel)
    out, total = LayerNorm.apply(x, weight, bias, residual, eps, kernel or in_graph())
    return out if residual is None else (out, total)


def fastest(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None = None
) -> str:
    """The rung for these, by the length of a row; ``GENERAL`` where one of them does not begin, or
    some rows would not begin, at a multiple of 16 bytes.

    Of long rows, ``IN_ORDER`` takes those of up to 1 MB, if there are 32 MB: each SM has several.
    """
    row = x.shape[-1] * x.element_size() if x.dim() else 1
    inputs = (x, weight, bias) if residual is None else (x, weight, bias, residual)
    if row % 16 or any(t.data_ptr() % 16 for t in inputs):
        return GENERAL
    if row <= 512 and residual is None:
        return SHORT
    if x.shape[-1] <= 1 << (13 if x.element_size() == 8 else 14):
        return BLOCK
    fits = row <= 1 << 20 and x.nbytes >= 1 << 25
    return IN_ORDER if fits and may_have_clusters(x) else LONG


class LayerNorm(torch.autograd.Function):
    """Keeps h, and mean and rstd of each row: two numbers save the gradient a pass over h."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps, kernel):
        x, weight, bias = (stored(t).contiguous() for t in (x, weight, bias))
        added = None if residual is None else stored(residual).contiguous()
        chosen = kernel.layer_norm if kernel else _run
        out, total, mean, rstd = chosen(x, weight, bias, added, eps)
        total = x if added is None else total  # in a graph there is none: see _in_graph
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)
        return out, (total if ctx.has_residual else None)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad, grad_total):
        total, weight, mean, rstd = ctx.saved_tensors
        if grad is None:  # only h was used
            return grad_total, None, None, grad_total, None, None
        dx, dweight, dbias = layer_norm_backward(grad, total, weight, mean, rstd, grad_total)
        return dx, dweight, dbias, (dx if ctx.has_residual else None), None, None


def _run(x, weight, bias, residual, eps):
    rung = fastest(x, weight, bias, residual)
    return run("layer_norm", rung, LONG, x, weight, bias, residual, eps)


def _in_graph(x, weight, bias, residual, eps):
    out, total, mean, rstd = _run(x, weight, bias, residual, eps)
    if residual is None:  # total is x then, and a result may not be an argument
        total = x.new_empty(0)
    return out, total, mean, rstd


def _empty(x, weight, bias, residual, eps):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.new_empty(0 if x.shape[-1] == 0 else x.numel() // x.shape[-1], dtype=wide)
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), total, rows, torch.empty_like(rows)


opaque(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, Tensor? residual, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _in_graph,
    _empty,
)


def cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Cost:
    """Reads x, weight and bias, writes the result; with a residual, reads it and writes h too."""
    tensors = 2 if residual is None else 4
    elements = tensors * x.numel() + weight.numel() + bias.numel()
    return Cost(bytes=elements * x.element_size(), flops=(7 + tensors // 4) * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    In 16 bits the result is rounded once, half an epsilon. In float32 and float64 five operations
    round it; and where the mean is 100 standard deviations from 0, as in one of the cases, the
    mean's own rounding costs up to 100 half epsilons.
    """
    return torch.finfo(dtype).eps * (100 if dtype in (torch.float32, torch.float64) else 1)


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``; the sums over thousands of rows add to it, about a square root of each."""
    return 4 * tolerance(dtype)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype.

    From 3 on: the normalised values of a row of 2 are ±1 whatever x is, and its gradient is what
    rounding leaves of 0.
    """
    lengths = (3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((70, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((6, 50), "offset"), ((6, 1024), "offset"), ((3, 8192), "offset")]
    wanted += [((8, 12), "nonfinite"), ((2, 5003), "nonfinite")]
    wanted += [((7, n), "residual") for n in (12, 64, 257, 1000, 1024, 4096, 4099)]
    wanted += [((2, n), "contiguous") for n in (16384, 16387, 32776, 65536, 131073, 262144)]
    wanted += [((2, 65536), "misaligned"), ((2, 40000), "residual"), ((2, 65543), "residual")]
    wanted += [((1, (1 << 20) + 3), "residual")]
    found = [_case(*one, torch.float32) for one in every]
    found += [_case(*one, dtype) for dtype in FLOATS for one in wanted]
    # Past 32-bit indices, with rows for a warp and for a block.
    found.append(_case(((1 << 25) + 8, 64), "contiguous", torch.float16))
    found.append(_case(((1 << 19) + 8, 4099), "contiguous", torch.bfloat16))
    return found


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^18; the fused residual; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((65536, 128), "contiguous"), ((8192, 16384), "contiguous")]
    wanted += [((4096, 65536), "contiguous"), ((1024, 262144), "contiguous")]
    wanted += [((32768, 4096), "residual"), ((32768, 4099), "contiguous")]
    wanted += [((32768, 4096), "misaligned"), ((65536, 1023), "contiguous")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own layer_norm, after its own addition if there is a residual."""

    def eager(x, weight, bias, residual=None, eps=1e-5):
        total = x if residual is None else x + residual
        out = torch.nn.functional.layer_norm(total, x.shape[-1:], weight, bias, eps)
        return out if residual is None else (out, total)

    return {"eager": eager}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, ...]:
        plain = "contiguous" if layout in ("offset", "residual") else layout
        x = tensor(shape, dtype, device, plain)
        slipped = "misaligned" if layout == "misaligned" else "contiguous"
        weight = tensor(shape[-1:], dtype, device, slipped)
        bias = tensor(shape[-1:], dtype, device, slipped)
        if layout == "offset":  # 100 standard deviations from 0: mean(x²) − mean(x)² fails here
            x = x + 100
        if layout == "residual":
            return x, weight, bias, tensor(shape, dtype, device)
        return x, weight, bias

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
