"""swiglu: silu(gate) * up in one kernel, with both gradients; the gate of a transformer's MLP."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, differentiable_once, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # no element depends on another


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` in float64."""
    return torch.nn.functional.silu(gate.double()) * up.double()


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """``silu(gate) * up``, with silu(g) = g·σ(g) (arXiv:2002.05202); differentiable, once.

    Args:
        gate, up: tensors of one shape, device and dtype (float32, float64, float16 or bfloat16).
            Any strides; what is not contiguous is copied once.
        kernel: what ``loader.load("swiglu", rung)`` returned; the last rung for None.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(swiglu, gate, up, kernel)
    return Swiglu.apply(gate, up, kernel or in_graph() or last_rung("swiglu"))


class Swiglu(torch.autograd.Function):
    """Keeps gate and up, and computes silu(gate) again: cheaper than a third tensor in memory."""

    @staticmethod
    def forward(
        ctx, gate: torch.Tensor, up: torch.Tensor, kernel: types.ModuleType
    ) -> torch.Tensor:
        gate, up = stored(gate).contiguous(), stored(up).contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernel = kernel
        return kernel.swiglu(gate, up)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *ctx.kernel.swiglu_backward(stored(grad).contiguous(), *ctx.saved_tensors), None


opaque(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    lambda *inputs: last_rung("swiglu").swiglu(*inputs),
    lambda gate, up: torch.empty_like(gate),
)
opaque(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda *inputs: last_rung("swiglu").swiglu_backward(*inputs),
    lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)


def cost(gate: torch.Tensor, up: torch.Tensor) -> Cost:
    """Reads gate and up, writes the result; about 5 operations an element."""
    return Cost(bytes=3 * gate.numel() * gate.element_size(), flops=5 * gate.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    Two roundings an element, of silu(gate) (where it is stored) and of the product, at half an
    epsilon each; in float32 and float64 the exponential and the division add as much again.
    """
    return (2 if torch.finfo(dtype).bits == 16 else 4) * torch.finfo(dtype).eps


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``; rung 1 rounds each gradient twice, in the middle of a longer product."""
    return 2 * tolerance(dtype)


def cases() -> list[Case]:
    """Lengths around the sizes of a pack, a warp and a block; every layout; every dtype."""
    shapes = [(0,), (1,), (3,), (31,), (257,), (1000,), (4099,), (0, 8), (65, 33), (3, 5, 7)]
    wanted = [(shape, "contiguous") for shape in shapes]
    wanted += [((n,), "misaligned") for n in (1, 7, 1000, 4099)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((1000,), "nonfinite"), ((1 << 20,), "contiguous")]
    found = [_case(*one, torch.float32) for one in wanted]
    for i, dtype in enumerate(FLOATS[1:]):  # which share the cases out
        found += [_case(*one, dtype) for one in wanted[i::3]]
    return [*found, _case(((1 << 31) + 512,), "contiguous", torch.float16)]  # past 32-bit indices


def bench_cases() -> list[Case]:
    """Activations of a large model; then small ones, other dtypes, and a misaligned slice."""
    f32, bf16 = torch.float32, torch.bfloat16
    found = [_case((16384, 8192), "contiguous", dtype) for dtype in (bf16, f32, torch.float16)]
    found += [_case((1 << k,), "contiguous", bf16) for k in (16, 20, 24)]
    return [*found, _case(((1 << 27) + 3,), "misaligned", bf16)]


def baselines() -> dict[str, Callable]:
    """Two calls of PyTorch's."""
    return {"eager": lambda gate, up: torch.nn.functional.silu(gate) * up}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(shape, dtype, device, layout), tensor(shape, dtype, device, layout)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
