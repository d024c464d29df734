"""bias_gelu: GELU of x + bias in one kernel, with both gradients; the tail of a linear layer."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, differentiable_once, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # column sums too: each in an order of its own, always the same


def reference(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """``gelu(x + bias)`` in float64."""
    return torch.nn.functional.gelu(x.double() + bias.double(), approximate=approximate)


def bias_gelu(
    x: torch.Tensor,
    bias: torch.Tensor,
    approximate: str = "none",
    kernel: types.ModuleType | None = None,
) -> torch.Tensor:
    """``gelu(x + bias)``: h·Φ(h) with h = x + bias (arXiv:1606.08415); differentiable, once.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16. Any strides; what is not contiguous is
            copied once.
        bias: (C,), of x's dtype and device.
        approximate: "none", or "tanh" for the form with a tanh in place of Φ.
        kernel: what ``loader.load("bias_gelu", rung)`` returned; the last rung for None.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
        ValueError: there is no such approximation.
    """
    if kernel and is_compiling():
        return out_of_graph(bias_gelu, x, bias, approximate, kernel)
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r}')
    kernel = kernel or in_graph() or last_rung("bias_gelu")
    return BiasGelu.apply(x, bias, approximate == "tanh", kernel)


class BiasGelu(torch.autograd.Function):
    """Keeps x and bias, and computes x + bias again: cheaper than a third tensor in memory."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, bias: torch.Tensor, tanh: bool, kernel: types.ModuleType
    ) -> torch.Tensor:
        x, bias = stored(x).contiguous(), stored(bias).contiguous()
        ctx.save_for_backward(x, bias)
        ctx.tanh, ctx.kernel = tanh, kernel
        return kernel.bias_gelu(x, bias, tanh)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        dx, dbias = ctx.kernel.bias_gelu_backward(
            stored(grad).contiguous(), *ctx.saved_tensors, ctx.tanh
        )
        return dx, dbias, None, None


opaque(
    "bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor",
    lambda *inputs: last_rung("bias_gelu").bias_gelu(*inputs),
    lambda x, bias, tanh: torch.empty_like(x),
)
opaque(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)",
    lambda *inputs: last_rung("bias_gelu").bias_gelu_backward(*inputs),
    lambda grad, x, bias, tanh: (torch.empty_like(x), torch.empty_like(bias)),
)


def cost(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> Cost:
    """Reads x and the bias, writes the result; about 10 operations an element."""
    return Cost(bytes=(2 * x.numel() + bias.numel()) * x.element_size(), flops=10 * x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    Two roundings an element, of x + bias (where it is stored) and of the result, at half an epsilon
    each; GELU's slope is at most 1.13. In float32 the error function adds as much.
    """
    return (2 if torch.finfo(dtype).bits == 16 else 4) * torch.finfo(dtype).eps


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``, for gradients.

    That of the bias is a sum of both signs: what cancels leaves its rounding errors behind, one for
    each row, √rows of them on top of each other in float32 and float64.
    """
    return (4 if torch.finfo(dtype).bits == 16 else 500) * torch.finfo(dtype).eps


def cases() -> list[Case]:
    """Row lengths around the sizes of a pack, a warp and a block; every layout, dtype and form."""
    # Not one element alone: 1 + erf of a negative number has few digits left, and no norm hides it.
    shapes = [(0, 8), (8, 0), (40,), (40, 1), (5, 30), (33, 24), (7, 257), (3, 5, 64), (129, 1000)]
    wanted = [(shape, "contiguous") for shape in shapes]
    wanted += [((1000, 8), "contiguous"), ((2, 4104), "contiguous"), ((3, 4099), "contiguous")]
    wanted += [((9, 64), "misaligned"), ((64, 48), "transposed"), ((64, 48), "strided")]
    wanted += [((64, 48), "expanded"), ((10, 100), "nonfinite"), ((512, 2048), "contiguous")]
    both = [(shape, layout, form) for shape, layout in wanted for form in ("none", "tanh")]
    found = [_case(*one, torch.float32) for one in both]
    for i, dtype in enumerate(FLOATS[1:]):  # which share the cases out
        found += [_case(*one, dtype) for one in both[i::3]]
    found.append(_case((3, 7), "contiguous", "none", torch.float64))  # small, for gradcheck
    # Past 32-bit indices: more rows than a grid has blocks in y, and one long row.
    found.append(_case(((1 << 21) + 1, 1024), "contiguous", "none", torch.float16))
    found.append(_case((1, (1 << 31) + 8), "contiguous", "none", torch.float16))
    return found


def bench_cases() -> list[Case]:
    """Activations of a large model; then other dtypes, the tanh form, narrow rows, odd rows."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    found = [_case((8192, 8192), "contiguous", "none", dtype) for dtype in (bf16, f32, f16)]
    found += [_case((8192, 8192), "contiguous", "tanh", dtype) for dtype in (bf16, f32)]
    found += [_case((rows, 1024), "contiguous", "none", bf16) for rows in (16, 256, 4096)]
    found.append(_case((1 << 20, 128), "contiguous", "none", bf16))
    return [*found, _case((16384, 4097), "contiguous", "none", bf16)]


def baselines() -> dict[str, Callable]:
    """Two calls of PyTorch's."""
    gelu = torch.nn.functional.gelu
    return {"eager": lambda x, bias, approximate: gelu(x + bias, approximate=approximate)}


def _case(shape: tuple[int, ...], layout: str, form: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor, str]:
        of_bias = layout if layout == "misaligned" else "contiguous"
        bias = tensor(shape[-1:], dtype, device, of_bias).div_(4)
        return tensor(shape, dtype, device, layout), bias, form

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout} {form}"
    return Case(name, inputs, torch.Size(shape).numel())
