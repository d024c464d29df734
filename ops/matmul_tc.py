"""matmul_tc: the product of two float16 or bfloat16 matrices on the Tensor Cores.

Products and sums are float32; only the result is rounded back to the inputs' dtype. A bias and an
activation may follow: a linear layer in one call. The last rung applies them before it rounds;
where it cannot be used, PyTorch does so afterwards, and each step rounds.
"""

import types
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from ops.common import Case, Cost, last_rung, stored, takes_hopper_code, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # every rung adds the products of an element in one fixed order
ACTIVATIONS = ("none", "relu", "gelu")
DTYPES = (torch.float16, torch.bfloat16)
GENERAL = "4_cp_async"  # takes any shape and any strides, from sm_75 on; the rungs after it do not
LARGEST = 2**31 - 1025  # rows or columns of those: their coordinates have 32 bits
ON_CPU = "1_wmma"  # the one that the CPU machine can run: the others are inline PTX


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """``activation(a @ b + bias)`` in float64."""
    return _finished(a.double() @ b.double(), None if bias is None else bias.double(), activation)


def matmul_tc(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    kernel: types.ModuleType | None = None,
) -> torch.Tensor:
    """``activation(a @ b + bias)`` with float32 sums; differentiable.

    Args:
        a, b: matrices (M, K) and (K, N) of one dtype, float16 or bfloat16, on one device.
        bias: (N,), of their dtype and device, or None.
        activation: "none", "relu" or "gelu" (with Φ from the error function).
        kernel: what ``loader.load("matmul_tc", rung)`` returned. For None, the last rung where it
            can be used (a Hopper GPU and aligned rows, see ``fits_tma``), else ``GENERAL``, which
            takes any strides; bias and activation are PyTorch's kernels then. On the CPU machine
            ``ON_CPU``, of copies that it takes.

    Returns:
        A contiguous matrix (M, N) of the same dtype; where K is 0, of a product of zeros.

    Raises:
        RuntimeError: device, dtype or shape do not fit, or this rung wants another layout, or has
            no epilogue for a bias or an activation.
        ValueError: there is no such activation.
    """
    if kernel and is_compiling():
        return out_of_graph(matmul_tc, a, b, bias, activation, kernel)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    return MatMulTC.apply(a, b, bias, activation, kernel or in_graph())


class MatMulTC(torch.autograd.Function):
    """C = A·B gives dA = dC·Bᵀ and dB = Aᵀ·dC: two more products, of transposed matrices.

    The fastest rung that takes them computes them, whichever was called: some take no transposes.

    The activation's gradient comes first. ReLU's slope is read off the result. GELU's needs the
    value before the activation, which is computed again: a product more, a matrix less to keep.
    The bias gets the sums of the columns. All of it can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        kernel: types.ModuleType | None,
    ) -> torch.Tensor:
        inputs = stored(a), stored(b)
        if bias is not None or activation != "none":
            shift = None if bias is None else stored(bias).contiguous()
            inputs = *inputs, shift, ACTIVATIONS.index(activation)
        c = kernel.matmul_tc(*inputs) if kernel else _fastest(*inputs)
        ctx.save_for_backward(a, b, bias, c if activation == "relu" else None)
        ctx.activation = activation
        return c

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, bias, c = ctx.saved_tensors
        if ctx.activation == "relu":
            grad = torch.where(c <= 0, 0, grad)  # past NaN, as PyTorch does
        if ctx.activation == "gelu":
            grad = torch.ops.aten.gelu_backward(grad, matmul_tc(a, b, bias))
        da = matmul_tc(grad, b.t()) if ctx.needs_input_grad[0] else None
        db = matmul_tc(a.t(), grad) if ctx.needs_input_grad[1] else None
        return da, db, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None


def fits_tma(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the last rung takes these: a Hopper GPU; rows or columns that TMA can copy.

    TMA wants matrices whose rows (or columns) are contiguous and begin at multiples of 16 bytes,
    and so for the result.
    """

    def aligned(x: torch.Tensor) -> bool:
        along, across = sorted(x.stride())
        return x.data_ptr() % 16 == 0 and along == 1 and across % 8 == 0 and min(x.shape) > 1

    if not a.is_cuda or a.dim() != 2 or b.dim() != 2 or not takes_hopper_code(a.device):
        return False
    fits = b.shape[1] % 8 == 0 and max(*a.shape, *b.shape) <= LARGEST
    return fits and aligned(a) and aligned(b)


def _fastest(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, activation: int = 0
) -> torch.Tensor:
    """``activation(a @ b + bias)`` by the fastest rung that takes these; contiguous."""
    plain = bias is None and activation == 0
    if fits_tma(a, b):
        return last_rung("matmul_tc").matmul_tc(a, b, *(() if plain else (bias, activation)))
    c = _on_cpu(a, b) if a.device.type == "cpu" else last_rung("matmul_tc", GENERAL).matmul_tc(a, b)
    if bias is not None:
        got, want = ((x.shape[-1:], x.dtype, x.device) for x in (bias, c))
        if bias.dim() != 1 or got != want:
            raise RuntimeError(
                "matmul_tc: bias must have one element for each column of b, and a's dtype and "
                f"device, got {list(bias.shape)}, {bias.dtype} on {bias.device} for b "
                f"{list(b.shape)}, {b.dtype} on {b.device}"
            )
    return _finished(c, bias, ACTIVATIONS[activation])


opaque(
    "matmul_tc(Tensor a, Tensor b, Tensor? bias=None, int activation=0) -> Tensor",
    _fastest,
    lambda a, b, bias=None, activation=0: a.new_empty(a.shape[0], b.shape[1]),
)


def _on_cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kernel = last_rung("matmul_tc", ON_CPU)
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return kernel.matmul_tc(a, b)  # which says what is wrong
    # Beyond the next whole fragment: so there always is one, in a fresh row-major copy.
    a_whole, b_whole = (pad(x, (0, 16 - x.shape[1] % 16, 0, 16 - x.shape[0] % 16)) for x in (a, b))
    return kernel.matmul_tc(a_whole, b_whole)[: a.shape[0], : b.shape[1]].contiguous()


def _finished(c: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """``activation(c + bias)``, by PyTorch."""
    z = c if bias is None else c + bias
    if activation == "relu":
        return torch.relu(z)
    return torch.nn.functional.gelu(z) if activation == "gelu" else z


def _composed(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """As a model writes it: cuBLAS adds the bias itself."""
    z = torch.matmul(a, b) if bias is None else torch.nn.functional.linear(a, b.t(), bias)
    return _finished(z, None, activation)


def cost(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> Cost:
    """Reads both matrices, writes the product; K multiplications and additions an element.

    Bias and activation are next to nothing.
    """
    m, k, n = *a.shape, b.shape[1]
    moved = m * k + k * n + m * n + n * (bias is not None)
    return Cost(bytes=moved * a.element_size(), flops=2 * m * n * k)


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    The result is rounded once, by at most half an epsilon of each element and 0.2 to 0.4 epsilon of
    the norm. The float32 sums before that are off by less than a thousandth of it.
    """
    return torch.finfo(dtype).eps / 2


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``, for gradients.

    Behind GELU its argument and its slope are rounded too, and in a sum of both signs the errors
    stay when the values cancel: up to 1.2 epsilon were seen, for the bias of 8 columns.
    """
    return 2 * torch.finfo(dtype).eps


def baselines() -> dict[str, Callable]:
    """cuBLAS through torch, and for an activation another kernel."""
    return {"eager": _composed}


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
    wanted += [(usual, plain, plain, "none"), (usual, plain, plain, "relu")]
    wanted += [(shape, plain, plain, "gelu") for shape in [
        usual, (64, 8, 16), (5, 8, 0), (33, 33, 33), (129, 520, 72), (4104, 1000, 2040),
    ]]  # fmt: skip
    wanted += [(usual, *("transposed",) * 2, "gelu"), ((64, 40, 8), "nonfinite", plain, "relu")]
    wanted += [((64, 304, 72), plain, plain, "gelu without bias")]
    found = [_case(*w, dtype=dtype) for dtype in DTYPES for w in wanted]
    return [*found, *(_case(shape, plain, plain, dtype=torch.bfloat16) for shape in huge)]


def bench_cases() -> list[Case]:
    """4096 cubed in bfloat16; a sweep of squares; odd sizes, few rows, little depth, layouts.

    Then layers, with a bias and an activation.
    """
    plain, turned, bf16 = "contiguous", "transposed", torch.bfloat16
    shapes = [(4096,) * 3, (1024,) * 3, (2048,) * 3, (8192,) * 3, (4095,) * 3, (4097,) * 3]
    shapes += [(1, 4096, 4096), (16, 4096, 4096), (4096, 4096, 32), (8192, 1024, 4096)]
    found = [_case(shape, plain, plain, dtype=bf16) for shape in shapes]
    found += [_case((4096,) * 3, plain, turned, dtype=bf16)]
    found += [_case((4096,) * 3, turned, plain, dtype=bf16)]
    found += [_case((4096,) * 3, plain, plain, dtype=torch.float16)]
    layers = [((4096,) * 3, "gelu"), ((4096,) * 3, "relu"), ((8192, 4096, 1024), "gelu")]
    # cuBLAS is many times slower behind a bias that begins between two multiples of 16 bytes
    return [*found, *(_case(shape, plain, turned, how, bf16, plain) for shape, how in layers)]


def _case(
    shape: tuple[int, int, int],
    layout_a: str,
    layout_b: str,
    finish: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout_bias: str = "misaligned",
) -> Case:
    """``finish``: an activation, after a bias unless it ends in "without bias"; None: neither.

    Results are then about 1. For ReLU all numbers are multiples of 1/8 and the bias is an odd
    multiple of 1/16: no sum is 0, and no rounding decides on which side of the corner one lies.
    """
    m, n, k = shape

    def inputs(device: str) -> tuple:
        a, b = tensor((m, k), dtype, device, layout_a), tensor((k, n), dtype, device, layout_b)
        if finish is None:
            return a, b
        activation = finish.partition(" ")[0]
        bias = tensor((n,), dtype, device, layout_bias)
        if activation == "relu":
            for t, unit in ((a, 1), (b, 8), (bias, 8)):
                t.copy_(torch.where(t.isfinite(), t.mul(1.5).round().clamp(-2, 2) / unit, t))
            bias += 1 / 16
        else:
            b /= max(1, k) ** 0.5
        return a, b, None if finish.endswith("without bias") else bias, activation

    layouts = layout_a if layout_a == layout_b else f"{layout_a} @ {layout_b}"
    name = f"{str(dtype).removeprefix('torch.')} {(m, k)} @ {(k, n)} {layouts}"
    name += f" {finish}" if finish else ""
    return Case(name, inputs, max(m * k, k * n, m * n))
