"""matmul_tc: the product of two float16 or bfloat16 matrices on the Tensor Cores.

Products and sums are float32; only the result is rounded back to the inputs' dtype.
"""

import types
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ops.common import Case, Cost, last_rung, stored, tensor

DETERMINISTIC = True  # every rung adds the products of an element in one fixed order
DTYPES = (torch.float16, torch.bfloat16)
GENERAL = "4_cp_async"  # takes any shape and any strides, from sm_75 on; the rungs after it do not
ON_CPU = "1_wmma"  # the one that the CPU machine can run: the others are inline PTX


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in float64."""
    return a.double() @ b.double()


def matmul_tc(
    a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType | None = None
) -> torch.Tensor:
    """``a @ b`` with float32 sums; differentiable.

    Args:
        a, b: matrices (M, K) and (K, N) of one dtype, float16 or bfloat16, on one device.
        kernel: what ``loader.load("matmul_tc", rung)`` returned. For None, the last rung where it
            can be used (a Hopper GPU and aligned rows, see ``fits_tma``), else ``GENERAL``, which
            takes any strides. On the CPU machine ``ON_CPU``, of copies that it takes.

    Returns:
        A contiguous matrix (M, N) of the same dtype; zeros where K is 0.

    Raises:
        RuntimeError: device, dtype or shape do not fit, or this rung wants another layout.
    """
    return MatMulTC.apply(a, b, kernel)


class MatMulTC(torch.autograd.Function):
    """C = A·B gives dA = dC·Bᵀ and dB = Aᵀ·dC: two more products, of transposed matrices."""

    @staticmethod
    def forward(
        ctx, a: torch.Tensor, b: torch.Tensor, kernel: types.ModuleType | None
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        a, b = stored(a), stored(b)
        return kernel.matmul_tc(a, b) if kernel else _product(a, b)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        # Through apply(): so they can be differentiated again.
        da = MatMulTC.apply(grad, b.t(), None) if ctx.needs_input_grad[0] else None
        db = MatMulTC.apply(a.t(), grad, None) if ctx.needs_input_grad[1] else None
        return da, db, None


def fits_tma(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the last rung takes these: a Hopper GPU; rows or columns that TMA can copy.

    TMA wants matrices whose rows (or columns) are contiguous and begin at multiples of 16 bytes,
    and so for the result.
    """

    def aligned(x: torch.Tensor) -> bool:
        along, across = sorted(x.stride())
        return x.data_ptr() % 16 == 0 and along == 1 and across % 8 == 0 and min(x.shape) > 1

    if a.dim() != 2 or b.dim() != 2:
        return False  # the kernel says so
    hopper = a.is_cuda and torch.cuda.get_device_capability(a.device)[0] == 9
    return hopper and b.shape[1] % 8 == 0 and aligned(a) and aligned(b)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` by the fastest rung that takes these."""
    if a.device.type != "cpu":
        return last_rung("matmul_tc", None if fits_tma(a, b) else GENERAL).matmul_tc(a, b)
    kernel = last_rung("matmul_tc", ON_CPU)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return kernel.matmul_tc(a, b)  # which says what is wrong
    # Beyond the next whole fragment: so there always is one, in a fresh row-major copy.
    a_whole, b_whole = (pad(x, (0, 16 - x.shape[1] % 16, 0, 16 - x.shape[0] % 16)) for x in (a, b))
    return kernel.matmul_tc(a_whole, b_whole)[: a.shape[0], : b.shape[1]].contiguous()


def cost(a: torch.Tensor, b: torch.Tensor) -> Cost:
    """Reads both matrices, writes the product; K multiplications and additions an element."""
    m, k, n = *a.shape, b.shape[1]
    return Cost(bytes=(m * k + k * n + m * n) * a.element_size(), flops=2 * m * n * k)


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    The result is rounded once, by at most half an epsilon of each element and 0.2 to 0.4 epsilon of
    the norm. The float32 sums before that are off by less than a thousandth of it.
    """
    return torch.finfo(dtype).eps / 2


def baselines() -> dict[str, Callable]:
    """cuBLAS through torch."""
    return {"eager": torch.matmul}


def cases() -> list[Case]:
    """Sizes around a fragment, a tile and a stage, none at all, and more than 2^31; all layouts."""
    usual, plain = (200, 144, 264), "contiguous"
    wanted = [((m, n, k), plain, plain) for m, n, k in [
        (0, 5, 3), (5, 0, 3), (5, 8, 0), (1, 1, 1), (33, 33, 33), (1, 304, 72), (300, 1, 70),
        (16, 16, 16), (64, 128, 16), (128, 256, 64), (129, 127, 17), usual, (16, 264, 32),
        (136, 264, 8), (272, 528, 320),
    ]]  # fmt: skip
    wanted += [(usual, la, lb) for la, lb in [
        (plain, "transposed"), ("transposed", plain), ("transposed", "transposed"),
        ("misaligned", plain), (plain, "misaligned"), ("strided", plain), (plain, "strided"),
        ("expanded", plain), (plain, "expanded"),
    ]]  # fmt: skip
    wanted += [((77, 33, 53), "transposed", "transposed"), ((64, 40, 8), "nonfinite", plain)]
    wanted += [((1024, 1024, 1024), plain, plain), ((4093, 4093, 4093), plain, plain)]
    wanted += [((4104, 1000, 2040), la, lb) for la, lb in [(plain, plain), ("transposed",) * 2]]
    huge = [((1 << 26) + 1, 8, 32), ((1 << 16) + 1, 1 << 15, 8)]  # A, and C, past 32-bit offsets
    found = [_case(*w, dtype) for dtype in DTYPES for w in wanted]
    return [*found, *(_case(shape, plain, plain, torch.bfloat16) for shape in huge)]


def bench_cases() -> list[Case]:
    """4096 cubed in bfloat16; a sweep of squares; odd sizes, few rows, little depth, layouts."""
    shapes = [(4096,) * 3, (1024,) * 3, (2048,) * 3, (8192,) * 3, (4095,) * 3, (4097,) * 3]
    shapes += [(1, 4096, 4096), (16, 4096, 4096), (4096, 4096, 32), (8192, 1024, 4096)]
    found = [_case(shape, "contiguous", "contiguous", torch.bfloat16) for shape in shapes]
    found += [_case((4096,) * 3, "contiguous", "transposed", torch.bfloat16)]
    found += [_case((4096,) * 3, "transposed", "contiguous", torch.bfloat16)]
    return [*found, _case((4096,) * 3, "contiguous", "contiguous", torch.float16)]


def _case(shape: tuple[int, int, int], layout_a: str, layout_b: str, dtype: torch.dtype) -> Case:
    m, n, k = shape

    def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor((m, k), dtype, device, layout_a), tensor((k, n), dtype, device, layout_b)

    layouts = layout_a if layout_a == layout_b else f"{layout_a} @ {layout_b}"
    name = f"{str(dtype).removeprefix('torch.')} {(m, k)} @ {(k, n)} {layouts}"
    return Case(name, inputs, max(m * k, k * n, m * n))
