"""vector_add: the sum of two tensors, the first operator of the kit."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` in float64."""
    return a.double() + b.double()


def vector_add(
    a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """``a + b``, elementwise; differentiable.

    Args:
        a, b: tensors of one shape, device and dtype (float32, float64, float16 or bfloat16). Any
            strides; what is not contiguous is copied once.
        kernel: what ``loader.load("vector_add", rung)`` returned; the last rung for None.

    Returns:
        A contiguous tensor of the same shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(vector_add, a, b, kernel)
    return VectorAdd.apply(a, b, kernel or in_graph() or last_rung("vector_add"))


class VectorAdd(torch.autograd.Function):
    """d(a + b)/da = d(a + b)/db = 1, so both gradients are the incoming one."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType) -> torch.Tensor:
        return kernel.vector_add(stored(a).contiguous(), stored(b).contiguous())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad, grad, None


opaque(
    "vector_add(Tensor a, Tensor b) -> Tensor",
    lambda *inputs: last_rung("vector_add").vector_add(*inputs),
    lambda a, b: torch.empty_like(a),
)


def cost(a: torch.Tensor, b: torch.Tensor) -> Cost:
    """Reads ``a`` and ``b``, writes the sum; one addition an element."""
    return Cost(bytes=3 * a.numel() * a.element_size(), flops=a.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    One rounding an element: half an epsilon each, so half an epsilon of the norm.
    """
    return torch.finfo(dtype).eps / 2


def cases() -> list[Case]:
    """Lengths around the sizes of a vector, a warp and a block; every layout; every dtype."""
    shapes = [(0,), (1,), (3,), (31,), (257,), (1000,), (4099,), (0, 8), (65, 33), (3, 5, 7)]
    wanted = [(shape, "contiguous") for shape in shapes]
    wanted += [((n,), "misaligned") for n in (1, 7, 1000, 4099)]
    wanted += [((64, 48), "transposed"), ((64, 48), "strided"), ((64, 48), "expanded")]
    wanted += [((1000,), "nonfinite"), ((1 << 20,), "contiguous"), (((1 << 20) + 3,), "misaligned")]
    found = [_case(shape, layout, dtype) for dtype in FLOATS for shape, layout in wanted]
    return [*found, _case(((1 << 31) + 512,), "contiguous", torch.float16)]  # past 32-bit indices


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(shape, dtype, device, layout), tensor(shape, dtype, device, layout)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    return Case(name, inputs, torch.Size(shape).numel())


DETERMINISTIC = True  # one addition an element, in no order


def bench_cases() -> list[Case]:
    """2^28 float32 first: 3 GB, far beyond any cache. Then sizes, dtypes and awkward vectors."""
    found = [_case((1 << 28,), "contiguous", torch.float32)]
    found += [_case((1 << n,), "contiguous", torch.float32) for n in (12, 16, 20, 24)]
    found += [_case((1 << 28,), "contiguous", dtype) for dtype in FLOATS[1:]]
    return [*found, _case(((1 << 28) + 1,), "misaligned", torch.float32)]


def baselines() -> dict[str, Callable[..., torch.Tensor]]:
    """PyTorch's own addition."""
    return {"eager": torch.add}
