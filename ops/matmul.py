"""matmul: the product of two float32 matrices, in full float32 precision (no TF32)."""

import types
from collections.abc import Callable

import torch

from ops.common import Case, Cost, last_rung, stored, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # every rung adds the products of an element in one fixed order


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float64."""
    return a.double() @ b.double()


def matmul(
    a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """``a @ b``; differentiable.

    Args:
        a, b: float32 matrices (M, K) and (K, N) on one device, of any strides. Nothing is copied:
            a transposed matrix costs no more memory than it has.
        kernel: what ``loader.load("matmul", rung)`` returned; the last rung for None.

    Returns:
        A contiguous float32 matrix (M, N); zeros where K is 0.

    Raises:
        RuntimeError: device, dtype or shape do not fit, or this rung wants another layout.
    """
    if kernel and is_compiling():
        return out_of_graph(matmul, a, b, kernel)
    return MatMul.apply(a, b, kernel or in_graph() or last_rung("matmul"))


class MatMul(torch.autograd.Function):
    """C = A·B gives dA = dC·Bᵀ and dB = Aᵀ·dC: two more products, of transposed matrices.

    The last rung computes them whichever rung was called: it takes any strides.
    """

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return kernel.matmul(stored(a), stored(b))

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        last = in_graph() or last_rung("matmul")
        # through apply(): so they can be differentiated again
        da = MatMul.apply(grad, b.t(), last) if ctx.needs_input_grad[0] else None
        db = MatMul.apply(a.t(), grad, last) if ctx.needs_input_grad[1] else None
        return da, db, None


opaque(
    "matmul(Tensor a, Tensor b) -> Tensor",
    lambda *inputs: last_rung("matmul").matmul(*inputs),
    lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
)


def cost(a: torch.Tensor, b: torch.Tensor) -> Cost:
    """Reads both matrices, writes the product; K multiplications and additions an element."""
    m, k, n = *a.shape, b.shape[1]
    return Cost(bytes=(m * k + k * n + m * n) * a.element_size(), flops=2 * m * n * k)


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    A sum of K random products, added one by one, is off by about 0.2·√K epsilon of its size (each
    partial sum is rounded; roundings add up like a random walk). That is 13 epsilon for K = 4096
    and 26 for 16384.
    """
    return 32 * torch.finfo(dtype).eps


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``; but where the incoming gradient is one value and a factor one repeated row,
    all of dA is one sum, and its terms may cancel to a tenth of their usual sum, or less."""
    return 16 * tolerance(dtype)


def baselines() -> dict[str, Callable]:
    """cuBLAS through torch. TF32 is off unless somebody has switched it on."""
    return {"eager": torch.matmul}


def cases() -> list[Case]:
    """Sizes around a warp, a tile and a stage, none at all, and more than 2^31; every layout."""
    usual, plain = (68, 132, 36), "contiguous"
    wanted = [((m, n, k), plain, plain) for m, n, k in [
        (0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1), (33, 33, 33), (1, 300, 70), (300, 1, 70),
        (64, 128, 16), (128, 128, 32), (129, 127, 17), usual, (16, 260, 32), (136, 264, 8),
    ]]  # fmt: skip
    wanted += [(usual, la, lb) for la, lb in [
        (plain, "transposed"), ("transposed", plain), ("transposed", "transposed"),
        ("misaligned", plain), (plain, "misaligned"), ("strided", plain), (plain, "strided"),
        ("expanded", plain), (plain, "expanded"),
    ]]  # fmt: skip
    wanted += [((77, 33, 53), "transposed", "transposed"), ((64, 36, 4), "nonfinite", plain)]
    wanted += [((1024, 1024, 1024), plain, plain), ((4093, 4093, 4093), plain, plain)]
    wanted += [((4100, 1000, 2044), la, lb) for la, lb in [(plain, plain), ("transposed",) * 2]]
    huge = [((1 << 26) + 1, 8, 32), ((1 << 16) + 1, 1 << 15, 8)]  # A, and C, past 32-bit offsets
    return [_case(*w) for w in [*wanted, *((shape, plain, plain) for shape in huge)]]


def bench_cases() -> list[Case]:
    """4096 cubed; a sweep of squares; then odd sizes, few rows, little depth, other layouts."""
    shapes = [(4096,) * 3, (1024,) * 3, (2048,) * 3, (8192,) * 3, (4095,) * 3, (4097,) * 3]
    shapes += [(1, 4096, 4096), (16, 4096, 4096), (4096, 4096, 32), (8192, 1024, 4096)]
    found = [_case(shape, "contiguous", "contiguous") for shape in shapes]
    found += [_case((4096,) * 3, "contiguous", "transposed")]
    return [*found, _case((4096,) * 3, "transposed", "contiguous")]


def _case(shape: tuple[int, int, int], layout_a: str, layout_b: str) -> Case:
    m, n, k = shape

    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        a = tensor((m, k), torch.float32, device, layout_a)
        return a, tensor((k, n), torch.float32, device, layout_b)

    layouts = layout_a if layout_a == layout_b else f"{layout_a} @ {layout_b}"
    return Case(f"float32 {(m, k)} @ {(k, n)} {layouts}", inputs, max(m * k, k * n, m * n))
