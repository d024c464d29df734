"""rms_norm_backward: the gradients of rms_norm, of x and weight at once."""

import types

import torch

from ops.common import FLOATS, Case, Cost, run, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True
GENERAL, IN_FLIGHT, SHORT = "1_two_kernels", "2_in_flight", "3_short_rows"  # see fastest()
CLUSTERS = "4_clusters"


def reference(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas of ``rms_norm_backward`` in float64."""
    if x.shape[-1] == 0:
        return x.double(), weight.double()
    grad, rstd = grad.double(), rstd.double().view(*x.shape[:-1], 1)
    normal = x.double() * rstd
    g = grad * weight.double()
    dx = rstd * (g - normal * (g * normal).mean(-1, keepdim=True))
    return dx, (grad * normal).reshape(-1, x.shape[-1]).sum(0)


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    kernel: types.ModuleType | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``n * weight`` with ``n = x * rstd`` along the last dimension.

    With g = grad · weight: dx = rstd · (g − n · mean(g · n)), because rstd depends on x too;
    dweight = Σ grad · n over all rows.

    Args:
        grad, x: (..., C), of one dtype (float32, float64, float16 or bfloat16). Any strides; what
            is not contiguous is copied once.
        weight: (C,), of x's dtype.
        rstd: one value a row, as rms_norm's kernels return it: float32, or float64 if x is.
        kernel: what ``loader.load("rms_norm_backward", rung)`` returned; for None, the rung that
            ``fastest`` names, or ``GENERAL`` where this GPU is too small for it.

    Returns:
        dx like x, dweight like weight. The same bits every time.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(rms_norm_backward, grad, x, weight, rstd, kernel)
    inputs = [stored(t).contiguous() for t in (grad, x, weight, rstd)]
    kernel = kernel or in_graph()
    if kernel:
        return kernel.rms_norm_backward(*inputs)
    return _run(*inputs)


def _run(grad, x, *rest):
    return run("rms_norm_backward", fastest(x), GENERAL, grad, x, *rest)


def fastest(x: torch.Tensor) -> str:
    """The rung for rows of this length: ``SHORT`` keeps one in a warp, ``IN_FLIGHT`` in a block,
    ``CLUSTERS`` in up to 16; ``GENERAL`` reads it again."""
    cols = x.shape[-1] if x.dim() > 0 else 0
    unit = 1 if x.dtype == torch.float64 else 2  # a thread keeps twice as many of the other types
    for rung, most in ((SHORT, 256), (IN_FLIGHT, 4096), (CLUSTERS, 65536)):
        if cols <= most * unit:
            return rung
    return GENERAL


opaque(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    _run,
    lambda grad, x, weight, rstd: (torch.empty_like(x), torch.empty_like(weight)),
)


def cost(grad, x, weight, rstd) -> Cost:
    """Reads grad and x, writes dx, and the little ones."""
    size = (3 * x.numel() + 2 * weight.numel()) * x.element_size()
    return Cost(bytes=size + rstd.numel() * rstd.element_size(), flops=9 * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    In 16 bits the result is rounded once, half an epsilon. In float32 and float64 a handful of
    operations round dx, and sums over rows err by about the square root of a 24th of their number:
    from 2048 rows on, ``Case.slack`` allows for that.
    """
    return torch.finfo(dtype).eps * (16 if dtype in (torch.float32, torch.float64) else 1)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype."""
    lengths = (3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    every += [((700, 300), "contiguous"), ((600, 2048), "contiguous")]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((2000, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((8, 12), "nonfinite")]
    wanted += [((40, n), "contiguous") for n in (8192, 16387)]
    wanted += [((2, n), "contiguous") for n in (32776, 65536, 131073)]
    found = [_case(*one, torch.float32) for one in every]
    return found + [_case(*one, dtype) for dtype in FLOATS for one in wanted]


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^16; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((65536, 128), "contiguous"), ((8192, 16384), "contiguous")]
    wanted += [((2048, 65536), "contiguous"), ((32768, 4099), "contiguous")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own kernels for it, without the autograd around them."""

    def eager(grad, x, weight, rstd):
        rows = rstd.view(*x.shape[:-1], 1)
        return torch.ops.aten._fused_rms_norm_backward(
            grad, x, x.shape[-1:], rows, weight, [True, True]
        )

    return {"eager": eager}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, ...]:
        grad, x = (tensor(shape, dtype, device, layout) for _ in range(2))
        weight = tensor(shape[-1:], dtype, device)
        rows = x.reshape(-1, shape[-1]) if x.numel() > 0 else x.new_empty(0, 1)
        wide = rows.to(torch.float64 if dtype == torch.float64 else torch.float32)
        return grad, x, weight, (wide.square().mean(-1) + 1e-6).rsqrt()

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    # Rung 1 adds the rows up one by one. (That dx sums over no rows is not made use of.)
    rows = torch.Size(shape[:-1]).numel()
    slack = max(1.0, (rows / 2048) ** 0.5) if dtype == torch.float32 else 1.0
    return Case(name, inputs, torch.Size(shape).numel(), slack)
