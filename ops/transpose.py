"""transpose: the last two dimensions swapped in memory, where ``x.mT`` only swaps the strides."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # bits are moved


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its last two dimensions swapped, in float64."""
    return x.mT.contiguous().double()


def transpose(x: torch.Tensor, kernel: types.ModuleType | None = None) -> torch.Tensor:
    """``x.mT.contiguous()``; differentiable, as often as one likes.

    Args:
        x: (..., R, C), any dtype of 1, 2, 4 or 8 bytes. Any strides; what is not contiguous is
            copied once.
        kernel: what ``loader.load("transpose", rung)`` returned; the last rung for None.

    Returns:
        A contiguous tensor (..., C, R) of x's dtype, with the same bits.

    Raises:
        RuntimeError: device, dtype or shape do not fit, or not with this rung.
    """
    if kernel and is_compiling():
        return out_of_graph(transpose, x, kernel)
    return Transpose.apply(x, kernel or in_graph() or last_rung("transpose"))


class Transpose(torch.autograd.Function):
    """The transpose is its own inverse, and being linear its own gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: types.ModuleType) -> torch.Tensor:
        ctx.kernel = kernel
        return kernel.transpose(stored(x).contiguous())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Transpose.apply(grad, ctx.kernel), None


opaque(
    "transpose(Tensor x) -> Tensor",
    lambda x: last_rung("transpose").transpose(x),
    lambda x: x.new_empty(x.mT.shape),
)


def cost(x: torch.Tensor) -> Cost:
    """Reads each element once and writes it once."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=0)


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖: bits are moved, so none."""
    return 0.0


def cases() -> list[Case]:
    """Sides around the sizes of a pack and of the tiles; every layout; each size of element."""
    shapes = [(0, 8), (8, 0), (1, 1), (1, 7), (33, 1), (5, 3), (31, 33), (64, 65), (130, 257)]
    shapes += [(64, 64), (16, 160), (192, 48), (3, 40, 24), (2, 3, 5, 7), (0, 4, 4), (512, 1024)]
    wanted = [(shape, "contiguous") for shape in shapes]
    wanted += [((64, 64), "misaligned"), ((64, 48), "transposed"), ((64, 48), "strided")]
    wanted += [((64, 48), "expanded"), ((20, 30), "nonfinite")]
    found = [_case(*one, torch.float32) for one in wanted]
    for i, dtype in enumerate(FLOATS[1:]):  # which share the cases out
        found += [_case(*one, dtype) for one in wanted[i::3]]
    found += [_case(shape, "contiguous", torch.int8) for shape in shapes]
    found.append(_case((1 << 16, (1 << 15) + 16), "contiguous", torch.int8))  # past 32-bit indices
    found.append(_case((65536, 5, 9), "contiguous", torch.float16))  # past a grid's z
    found.append(_case(((1 << 21) + 8, 8), "contiguous", torch.float16))  # past a grid's y
    return found


def bench_cases() -> list[Case]:
    """16384²; then other sizes of element, small ones, batches, and sides that fit no pack."""
    f32, bf16 = torch.float32, torch.bfloat16
    found = [_case((16384, 16384), "contiguous", dtype) for dtype in (f32, bf16, torch.int8)]
    found += [_case((n, n), "contiguous", f32) for n in (256, 1024, 4096)]
    found += [_case((64, 2048, 2048), "contiguous", f32), _case((4096, 65536), "contiguous", f32)]
    return found + [_case((16385, 16383), "contiguous", dtype) for dtype in (f32, bf16)]


def baselines() -> dict[str, Callable]:
    """PyTorch's own."""
    return {"eager": lambda x: x.mT.contiguous()}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor]:
        if dtype == torch.int8:
            return (torch.randint(-128, 128, shape, dtype=dtype, device=device),)
        return (tensor(shape, dtype, device, layout),)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())
