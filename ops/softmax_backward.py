"""softmax_backward: the gradient of softmax, from the gradient and the value of its result."""

import types

import torch

from ops.common import FLOATS, Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True
SHORT, GENERAL = "3_short_rows", "4_any_row"  # see fastest(); GENERAL takes short ones, too


def reference(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out · (grad − Σ grad · out)``, the sum along the last dimension, in float64."""
    grad, out = grad.double(), out.double()
    return out * (grad - (grad * out).sum(-1, keepdim=True))


def softmax_backward(
    grad: torch.Tensor, out: torch.Tensor, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """dx for ``out = softmax(x)`` along the last dimension: ``out · (grad − Σ grad · out)``.

    With out = exp(x)/Σexp(x), ∂out_j/∂x_i = out_j·(δ_ij − out_i); the formula is its product with
    grad.

    Args:
        grad, out: tensors of one shape, device and dtype (float32, float64, float16 or bfloat16).
            Any strides; what is not contiguous is copied once.
        kernel: what ``loader.load("softmax_backward", rung)`` returned. For None, that of the
            rung which ``fastest`` names.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(softmax_backward, grad, out, kernel)
    kernel = kernel or in_graph() or last_rung("softmax_backward", fastest(out))
    return kernel.softmax_backward(stored(grad).contiguous(), stored(out).contiguous())


def fastest(out: torch.Tensor) -> str:
    """The rung for out: ``SHORT`` for rows that 32 lanes keep, 64 bytes each, else ``GENERAL``."""
    if out.dim() == 0:
        return GENERAL  # which refuses it
    return SHORT if out.shape[-1] * out.element_size() <= 32 * 64 else GENERAL


opaque(
    "softmax_backward(Tensor grad, Tensor out) -> Tensor",
    lambda grad, out: last_rung("softmax_backward", fastest(out)).softmax_backward(grad, out),
    lambda grad, out: torch.empty_like(grad),
)


def cost(grad: torch.Tensor, out: torch.Tensor) -> Cost:
    """Reads both, writes dx; a product and a sum, a difference and a product."""
    return Cost(bytes=3 * out.numel() * out.element_size(), flops=4 * out.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖dx − reference‖ / ‖reference‖.

    In 16 bits dx is rounded once: half an epsilon. In float32 and float64 the difference and the
    product round too, and the sum of a long row brings a few roundings more.
    """
    return torch.finfo(dtype).eps * (8 if dtype in (torch.float32, torch.float64) else 1)


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, warp, block and cluster; every layout and dtype."""
    lengths = (1, 2, 3, 7, 8, 17, 31, 64, 100, 255, 256, 1000, 1024, 1025, 4096)
    every = [((5, length), "contiguous") for length in lengths]
    wanted = [((5, 33), "contiguous"), ((5, 257), "contiguous"), ((5, 4099), "contiguous")]
    wanted += [((0, 8), "contiguous"), ((8, 0), "contiguous"), ((9,), "contiguous")]
    wanted += [((3, 5, 7), "contiguous"), ((300, 12), "contiguous"), ((70, 128), "contiguous")]
    wanted += [((4, n), "misaligned") for n in (1, 12, 64, 1000, 4096)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((8, 12), "nonfinite")]
    wanted += [((2, n), "contiguous") for n in (8200, 16387, 32776, 65536, 131073, 262144)]
    wanted += [((2, 65536), "misaligned"), ((1, (1 << 20) + 3), "contiguous")]
    found = [_case(*one, torch.float32) for one in every]
    found += [_case(*one, dtype) for dtype in FLOATS for one in wanted]
    found.append(_case(((1 << 19) + 8, 4099), "contiguous", torch.bfloat16))  # past 2^31 elements
    return found


def bench_cases() -> list[Case]:
    """The headline; row lengths from 128 to 2^18; the awkward ones."""
    wanted = [((32768, 4096), "contiguous"), ((65536, 1024), "contiguous")]
    wanted += [((8192, 16384), "contiguous"), ((2048, 65536), "contiguous")]
    wanted += [((512, 262144), "contiguous"), ((262144, 128), "contiguous")]
    wanted += [((32768, 4099), "contiguous"), ((32768, 4096), "misaligned")]
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, layout, dtype) for shape, layout in wanted for dtype in dtypes]


def baselines() -> dict:
    """PyTorch's own kernel for it, without the autograd around it."""

    def eager(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad, out, -1, out.dtype)

    return {"eager": eager}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        grad = tensor(shape, dtype, device, layout)
        # Long rows of like values would end among float16's denormals, which have fewer bits.
        spread = 4 if dtype == torch.float16 and shape[-1] > 8192 else 1
        if layout == "misaligned":  # by another distance than grad
            return grad, torch.softmax(spread * tensor(shape, dtype, device), dim=-1)
        out = torch.softmax(spread * tensor(shape, dtype, device, layout), dim=-1)
        if layout == "transposed":
            out = out.transpose(-1, -2).contiguous().transpose(-1, -2)
        return grad, out

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
