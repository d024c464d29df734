"""scan: running sums along the last dimension."""

import types
from collections.abc import Callable

import torch

from ops.common import FLOATS, Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

# The look-back adds what it finds published, and that depends on who is faster.
DETERMINISTIC = ("1_block", "2_warp_shuffle", "3_three_kernels")


def reference(x: torch.Tensor) -> torch.Tensor:
    """``x.cumsum(-1)`` in float64."""
    return x.double().cumsum(-1)


def scan(x: torch.Tensor, kernel: types.ModuleType | None = None) -> torch.Tensor:
    """``x.cumsum(-1)``: out[..., i] = x[..., 0] + … + x[..., i]; differentiable.

    Args:
        x: (..., n), float32, float64, float16 or bfloat16; 16-bit types are added up in float32.
            Any strides; what is not contiguous is copied once.
        kernel: what ``loader.load("scan", rung)`` returned; the last rung for None.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        RuntimeError: device, dtype or shape do not fit.
    """
    if kernel and is_compiling():
        return out_of_graph(scan, x, kernel)
    return Scan.apply(x, kernel or in_graph() or last_rung("scan"))


class Scan(torch.autograd.Function):
    """x[i] counts in out[i] and all after it, so its gradient is a running sum from the end."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kernel: types.ModuleType) -> torch.Tensor:
        ctx.kernel = kernel
        return kernel.scan(stored(x).contiguous())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Scan.apply(grad.flip(-1), ctx.kernel).flip(-1), None


opaque("scan(Tensor x) -> Tensor", lambda x: last_rung("scan").scan(x), torch.empty_like)


def cost(x: torch.Tensor) -> Cost:
    """Reads each element once and writes one for it; one addition each."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=x.numel())


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖, for inputs of one sign.

    Each result is rounded once (half an epsilon). float32 results also carry the rounding of the
    tiles before them, one addition each: √(tiles / 12) epsilons, 16 at 2^24. The reference is
    float64 itself, and adds one by one.
    """
    if dtype == torch.float64:
        return 1e-12
    return (16 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``; gradients of both signs may cancel, so their sums err relatively more."""
    return (1 if torch.finfo(dtype).bits == 16 else 100) * tolerance(dtype)


def cases() -> list[Case]:
    """Lengths around the sizes of a pack, a warp, a block and a tile; every layout and dtype."""
    shapes = [(0,), (1,), (7,), (33,), (257,), (1000,), (4099,), (20001,), (0, 8), (8, 0), (5, 1)]
    shapes += [(3, 31), (100, 48), (7, 4097), (2, 3, 130), (65, 1025), (1 << 16,)]
    wanted = [(shape, "contiguous") for shape in shapes]
    wanted += [((9000,), "misaligned"), ((5, 4099), "misaligned"), ((64, 48), "transposed")]
    wanted += [((64, 48), "strided"), ((64, 48), "expanded"), ((1000,), "nonfinite")]
    found = [_case(*one, torch.float32) for one in wanted]
    for i, dtype in enumerate(FLOATS[1:]):  # which share the cases out
        found += [_case(*one, dtype) for one in wanted[i::3]]
    # float16 ends at 65504: the longer, the smaller are its elements.
    found.append(_case((4, (1 << 29) + 8), "contiguous", torch.bfloat16))  # past 32-bit indices
    return found


def bench_cases() -> list[Case]:
    """One row of 2^28; then rows from short to long, 16-bit types, and odd lengths."""
    f32 = torch.float32
    found = [_case((1 << 28,), "contiguous", f32), _case((1 << 28,), "contiguous", torch.bfloat16)]
    found += [_case((1 << k,), "contiguous", f32) for k in (16, 20, 24)]
    found += [_case(((1 << 28) + 3,), "misaligned", f32)]
    found += [_case((1 << (28 - k), 1 << k), "contiguous", f32) for k in (8, 10, 12, 16, 20)]
    return [*found, _case((1 << 16, 4097), "contiguous", f32)]


def baselines() -> dict[str, Callable]:
    """PyTorch's own, which for one row is CUB's single-pass scan."""
    return {"eager": lambda x: x.cumsum(-1)}


def _case(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Case:
    def inputs(device: str) -> tuple[torch.Tensor]:
        # Of one sign: where sums of both signs cancel, no tolerance is right.
        if layout == "expanded":
            return (tensor((1, *shape[1:]), dtype, device).abs_().expand(shape),)
        x = tensor(shape, dtype, device, layout).abs_()
        return (x.mul_(min(1.0, 32768 / max(shape[-1], 1))) if dtype == torch.float16 else x,)

    name = f"{str(dtype).removeprefix('torch.')} {tuple(shape)} {layout}"
    # tolerance() is that of tiles of 4096; rung 1 carries its sum on after every 256 elements.
    slack = max(1.0, (max(shape[-1], 1) / 2**20) ** 0.5) if dtype == torch.float32 else 1.0
    return Case(name, inputs, torch.Size(shape).numel(), slack)
