"""layer_norm_backward: the gradients of layer_norm, of x, weight and bias at once."""

import types

import torch

from ops.common import FLOATS, Case, Cost, run, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True
GENERAL, SHORT, IN_FLIGHT = "2_split_rows", "4_short_rows", "5_in_flight"  # see fastest()
CLUSTERS, ANY_ADDRESS = "6_clusters", "7_any_address"


def reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formulas of ``layer_norm_backward`` in float64."""
    if x.shape[-1] == 0:
        return x.double(), weight.double(), weight.double()
    grad, rstd = grad.double(), rstd.double().view(*x.shape[:-1], 1)
    normal = (x.double() - mean.double().view(*x.shape[:-1], 1)) * rstd
    g = grad * weight.double()
    dx = rstd * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))
    if grad_sum is not None:
        dx = dx + grad_sum.double()
    rows = (-1, x.shape[-1])
    return dx, (grad * normal).reshape(rows).sum(0), grad.reshape(rows).sum(0)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_sum: torch.Tensor | None = None,
    kernel: types.ModuleType | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of ``n * weight + bias`` with ``n = (x - mean) * rstd`` along the last dimension.

    With g = grad · weight: dx = rstd · (g − mean(g) − n · mean(g · n)) + grad_sum, because mean and
    rstd depend on x too; dweight = Σ grad · n and dbias = Σ grad over all rows.

    Args:
        grad, x: (..., C), of one dtype (float32, float64, float16 or bfloat16). Any strides; what
            is not contiguous is copied once.
        weight: (C,), of x's dtype.
        mean, rstd: one value a row, as layer_norm's kernels return them: float32, or float64 with a
            float64 x.
        grad_sum: None, or a tensor like x that is added to dx: the gradient of x + residual.
        kernel: what ``loader.load("layer_norm_backward", rung)`` returned; for None, the rung that
            ``fastest`` names, or ``GENERAL`` where this GPU is too small for it.

    Returns:
        dx like x, dweight and dbias like weight. The same bits every time.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(layer_norm_backward, grad, x, weight, mean, rstd, grad_sum, kernel)
    inputs = [stored(t).contiguous() for t in (grad, x, weight, mean, rstd)]
    inputs.append(None if grad_sum is None else stored(grad_sum).contiguous())
    kernel = kernel or in_graph()
    if kernel:
        return kernel.layer_norm_backward(*inputs)
    return _run(*inputs)


def _run(grad, x, *rest):
    rung = fastest(x, grad, rest[0], rest[3])
    return run("layer_norm_backward", rung, GENERAL, grad, x, *rest)


def fastest(x: torch.Tensor, *others: torch.Tensor | None) -> str:
    """The rung for rows of this length: ``SHORT`` keeps one in a warp, ``IN_FLIGHT`` in a block, or
    ``ANY_ADDRESS`` where 16-bit rows (or ``others``: grad, weight, grad_sum) begin at no multiple
    of 16 bytes; ``CLUSTERS`` in up to 16 blocks; ``GENERAL`` reads it again."""
    cols = x.shape[-1] if x.dim() > 0 else 0
    unit = 1 if x.dtype == torch.float64 else 2  # a thread keeps twice as many of the other types
    if cols <= 256 * unit:
        return SHORT
    if cols <= 4096 * unit:
        begins = [cols * x.element_size(), *(t.data_ptr() for t in (x, *others) if t is not None)]
        odd = any(begin % 16 for begin in begins)
        return ANY_ADDRESS if odd and x.element_size() == 2 else IN_FLIGHT
    return CLUSTERS if cols <= 65536 * unit else GENERAL


opaque(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
    " Tensor? grad_sum) -> (Tensor, Tensor, Tensor)",
    _run,
    lambda grad, x, weight, *rest: tuple(torch.empty_like(t) for t in (x, weight, weight)),
)


def cost(grad, x, weight, mean, rstd, grad_sum=None) -> Cost:
    """Reads grad and x, writes dx, and the little ones; with grad_sum, reads it too."""
    tensors = 3 if grad_sum is None else 4
    size = (tensors * x.numel() + 3 * weight.numel()) * x.element_size()
    return Cost(bytes=size + 2 * mean.numel() * mean.element_size(), flops=14 * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    In 16 bits the result is rounded once, half an epsilon. In float32 and float64 a handful of
    operations round dx, and sums over rows err by about the square root of a 24th of their number:
    from 2048 rows on, ``Case.slack`` allows for that.
    """
    return torch.finfo(dtype).eps * (16 if dtype in (torch.float32, torch.float64) else 1)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype.

    From 3 on: the normalised values of a row of 2 are ±1 whatever x is, and dx is what rounding
    leaves of 0.
    """
    lengths = (3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    every += [((700, 300), "contiguous"), ((600, 2048), "contiguous")]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((2000, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((8, 12), "nonfinite")]
    wanted += [((7, n), "residual") for n in (12, 257, 1024, 4096)]
    wanted += [((40, n), "contiguous") for n in (8192, 16387)]
    wanted += [((2, n), "contiguous") for n in (32776, 65536, 131073)]
    wanted += [((2, 65535), "residual"), ((2, 65552), "residual")]
    found = [_case(*one, torch.float32) for one in every]
    found += [_case(*one, dtype) for dtype in FLOATS for one in wanted]
    found.append(_case(((1 << 19) + 8, 4099), "contiguous", torch.bfloat16))  # past 2^31 elements
    return found


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^16; with a residual; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((65536, 128), "contiguous"), ((8192, 16384), "contiguous")]
    wanted += [((2048, 65536), "contiguous"), ((32768, 4096), "residual")]
    wanted += [((32768, 4099), "contiguous"), ((32768, 4096), "misaligned")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own kernels for it, without the autograd around them."""

    def eager(grad, x, weight, mean, rstd, grad_sum=None):
        rows = (*x.shape[:-1], 1)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean.view(rows), rstd.view(rows), weight, weight, [True] * 3
        )
        return (dx if grad_sum is None else dx + grad_sum), dweight, dbias

    return {"eager": eager}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, ...]:
        plain = "contiguous" if layout == "residual" else layout
        grad, x = (tensor(shape, dtype, device, plain) for _ in range(2))
        weight = tensor(shape[-1:], dtype, device)
        rows = x.reshape(-1, shape[-1]) if x.numel() > 0 else x.new_empty(0, 1)
        wide = rows.to(torch.float64 if dtype == torch.float64 else torch.float32)
        mean = wide.mean(-1)
        rstd = ((wide - mean[:, None]).square().mean(-1) + 1e-5).rsqrt()
        if layout == "residual":
            return grad, x, weight, mean, rstd, tensor(shape, dtype, device)
        return grad, x, weight, mean, rstd

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    # Rung 1 adds the rows up one by one. (That dx sums over no rows is not made use of.)
    rows = torch.Size(shape[:-1]).numel()
    slack = max(1.0, (rows / 2048) ** 0.5) if dtype == torch.float32 else 1.0
    return Case(name, inputs, torch.Size(shape).numel(), slack)
