"""reduce_sum: the sum of a tensor, or along one of its dimensions."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = ("6_last_block", "7_any_dimension")  # the others add in the order of arrival


def reference(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The sum in float64."""
    return x.double().sum() if dim is None else x.double().sum(dim)


def reduce_sum(
    x: torch.Tensor, dim: int | None = None, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """``x.sum()`` or ``x.sum(dim)``; differentiable.

    Args:
        x: any shape, float32, float64, float16 or bfloat16; 16-bit types are added up in float32.
            Any strides; what is not contiguous is copied once.
        dim: the dimension to sum over, negative from the end; None for all.
        kernel: what ``loader.load("reduce_sum", rung)`` returned; the last rung for None. The
            rungs before it sum whole tensors only.

    Returns:
        A contiguous tensor of x's dtype, without ``dim``.

    Raises:
        RuntimeError: device, dtype or dim do not fit, or not with this rung.
    """
    if kernel and is_compiling():
        return out_of_graph(reduce_sum, x, dim, kernel)
    return ReduceSum.apply(x, dim, kernel or in_graph() or last_rung("reduce_sum"))


class ReduceSum(torch.autograd.Function):
    """Each element counts once, so its gradient is that of the sum it went into."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int | None, kernel: types.ModuleType) -> torch.Tensor:
        ctx.shape, ctx.dim = x.shape, dim
        return kernel.reduce_sum(stored(x).contiguous(), dim)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad if ctx.dim is None else grad.unsqueeze(ctx.dim)
        return grad.expand(ctx.shape), None, None  # a view: nothing is written


opaque(
    "reduce_sum(Tensor x, int? dim) -> Tensor",
    lambda *inputs: last_rung("reduce_sum").reduce_sum(*inputs),
    lambda x, dim: x.new_empty(() if dim is None else x.select(dim, 0).shape),
)


def cost(x: torch.Tensor, dim: int | None = None) -> Cost:
    """Reads x; the result counts only along a dimension. One addition an element."""
    outputs = 1 if dim is None else x.numel() // max(x.shape[dim], 1)
    return Cost(bytes=(x.numel() + outputs) * x.element_size(), flops=x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖, for inputs of one sign.

    The result is rounded once (half an epsilon). Adding k numbers in a row errs by about
    √(k/12) epsilons of the accumulator; a thread adds a few hundred, and their errors average out.
    Only float64 has no wider type for a total to which 2^20 threads add: √(2^20/12) is 300.
    """
    return 1e-12 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps


def cases() -> list[Case]:
    """Lengths around the sizes of a pack, a warp, a block and its share of a tensor."""
    whole = [(0,), (1,), (3,), (31,), (257,), (1000,), (4099,), (0, 8), (65, 33), ()]
    wanted = [(shape, None, "contiguous") for shape in whole]
    wanted += [((n,), None, "misaligned") for n in (1, 7, 1000, 70001)]
    wanted += [((64, 48), None, layout) for layout in ("transposed", "strided", "expanded")]
    wanted += [((1000,), None, "nonfinite"), ((1 << 20,), None, "contiguous")]
    rows = [(5, 1), (300, 3), (77, 33), (9, 257), (3, 4099), (2, 70000), (0, 5), (5, 0), (1, 9000)]
    wanted += [(shape, -1, "contiguous") for shape in rows]
    columns = [(3, 5), (257, 8), (1000, 3), (4099, 24), (70, 1000), (0, 5), (5, 0), (9000, 160)]
    wanted += [(shape, 0, "contiguous") for shape in columns]
    wanted += [((3, 50, 7), 1, "contiguous"), ((2, 5000, 16), 1, "contiguous")]
    wanted += [((4, 6, 5, 8), 2, "contiguous"), ((33, 100), 1, "misaligned")]
    wanted += [((100, 40), 0, "misaligned"), ((64, 48), 0, "transposed")]
    wanted += [((20, 30), 1, "nonfinite")]
    found = [_case(*one, torch.float32) for one in wanted]
    for i, dtype in enumerate(FLOATS[1:]):  # which share the cases out
        found += [_case(*one, dtype) for one in wanted[i::3]]
    found.append(_case(((1 << 31) + 512,), None, "contiguous", torch.float16))  # 32-bit indices
    found.append(_case((1 << 16, (1 << 15) + 8), 0, "contiguous", torch.float16))
    return found


def bench_cases() -> list[Case]:
    """2^28 elements; then whole tensors from small to large, a misaligned one, rows and columns."""
    f32 = torch.float32
    found = [_case((1 << 28,), None, "contiguous", f32)]
    found += [_case((1 << k,), None, "contiguous", f32) for k in (16, 20, 24)]
    found.append(_case((1 << 28,), None, "contiguous", torch.bfloat16))
    found.append(_case(((1 << 28) + 3,), None, "misaligned", f32))
    found += [_case((65536, 128), 1, "contiguous", f32), _case((32768, 4097), 1, "contiguous", f32)]
    found += [_case((32768, 4096), 0, "contiguous", f32)]
    found += [_case((1024, 128, 1024), 1, "contiguous", f32)]
    return found


def baselines() -> dict[str, Callable]:
    """PyTorch's own."""
    return {"eager": lambda x, dim: x.sum() if dim is None else x.sum(dim)}


def _case(shape: tuple[int, ...], dim: int | None, layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, int | None]:
        # Of one sign: a sum of both signs may cancel, and then no tolerance is right.
        if layout == "expanded":
            return tensor((1, *shape[1:]), dtype, device).abs_().expand(shape), dim
        x = tensor(shape, dtype, device, layout).abs_()
        return (x.mul_(1 / 32) if dtype == torch.float16 else x), dim  # its largest is 65504

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout} dim={dim}"
    return Case(name, inputs, torch.Size(shape).numel())
