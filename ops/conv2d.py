"""conv2d: a 2-D convolution with its bias and its activation, in one call, with gradients."""

import types
from collections.abc import Callable

import torch
from torch._prims_common import suggest_memory_format

from ops.common import Case, Cost, differentiable_once, last_rung, stored, takes_hopper_code, tensor
from ops.compiled import in_graph, is_compiling, opaque, out_of_graph

DETERMINISTIC = True  # every rung adds the products of an element in one fixed order
ACTIVATIONS = ("none", "relu", "gelu")
GENERAL = "7_any_shape"  # takes every shape, layout and dtype, from sm_75 on
TILES, WGMMA, RESIDENT, IM2COL = "8_tiles", "9_wgmma", "10_resident", "11_im2col"  # see fastest()
Pair = int | tuple[int, int]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str = "none",
) -> torch.Tensor:
    """``activation(conv2d(x, weight) + bias)`` in float64."""
    bias = None if bias is None else bias.double()
    inputs = x.double(), weight.double(), bias
    return _composed(*inputs, stride, padding, dilation, groups, activation)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str = "none",
    kernel: types.ModuleType | None = None,
) -> torch.Tensor:
    """``activation(conv2d(x, weight) + bias)``; differentiable, once.

    Args:
        x: (N, C, H, W), float32, float64, float16 or bfloat16. Contiguous and channels-last tensors
            are read as they lie; any others are copied once.
        weight: (K, C / groups, R, S), of x's dtype and device; copied if it lies unlike x.
        bias: (K,), or None.
        stride, padding, dilation: pixels, one number or (vertical, horizontal).
        groups: the channels and the filters fall into that many groups which do not mix.
        activation: "none", "relu" or "gelu" (with Φ from the error function).
        kernel: what ``loader.load("conv2d", rung)`` returned. For None, that of the rung which
            ``fastest`` names.

    Returns:
        (N, K, P, Q) of x's dtype, channels-last if x is. P = (H + 2·padding - dilation·(R - 1) - 1)
        / stride + 1, rounded down, and Q likewise.

    Raises:
        RuntimeError: device, dtype or shape do not fit, or this rung wants another layout.
        ValueError: there is no such activation.
    """
    if kernel and is_compiling():
        inputs = (x, weight, bias, stride, padding, dilation, groups, activation)
        return out_of_graph(conv2d, *inputs, kernel)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    geometry = (_pair(stride), _pair(padding), _pair(dilation), groups)
    return Conv2d.apply(x, weight, bias, geometry, activation, kernel or in_graph())


class Conv2d(torch.autograd.Function):
    """The gradient passes the activation first; then PyTorch's own convolutions carry it on.

    ReLU's slope is read off the result. GELU's needs the value before the activation, which is
    computed again: that costs one convolution more, and saves a tensor as large as the result.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, geometry, activation, kernel) -> torch.Tensor:
        x, weight, bias = (t if t is None else stored(t) for t in (x, weight, bias))
        if kernel is None:
            kernel = last_rung("conv2d", fastest(x, weight, geometry))
        y = kernel.conv2d(x, weight, bias, *geometry, ACTIVATIONS.index(activation))
        ctx.save_for_backward(x, weight, bias, y if activation == "relu" else None)
        ctx.geometry, ctx.activation, ctx.kernel = geometry, activation, kernel
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, y = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        if ctx.activation == "relu":
            grad = torch.where(y <= 0, 0, grad)  # past NaN, as PyTorch does
        if ctx.activation == "gelu":
            z = ctx.kernel.conv2d(x, weight, bias, *ctx.geometry, ACTIVATIONS.index("none"))
            grad = torch.ops.aten.gelu_backward(grad, z)
        grads = torch.ops.aten.convolution_backward(
            grad, x, weight, None if bias is None else list(bias.shape), stride, padding, dilation,
            False, (0, 0), groups, [*ctx.needs_input_grad[:3]],
        )  # fmt: skip
        return *grads, None, None, None


def fastest(x: torch.Tensor, weight: torch.Tensor, geometry: tuple) -> str:
    """The rung for these: ``TILES`` where they fit, ``GENERAL`` for all else. But on Hopper, for
    more than 32 channels in one group, ``RESIDENT`` for a plain 3 x 3 layer of up to 64, otherwise
    ``IM2COL``; and ``WGMMA`` for the rest with stride 1 and small windows."""
    stride, padding, dilation, groups = geometry
    if not fits_tiles(x, weight, groups):
        return GENERAL
    filters, depth, *taps = weight.shape
    if not takes_hopper_code(x.device) or filters % (8 * groups):
        return TILES
    height, width = (d * (tap - 1) for d, tap in zip(dilation, taps, strict=True))
    # IM2COL and RESIDENT multiply 64 channels whatever there are, WGMMA 32 at a time.
    if groups == 1 and depth > 32:
        plain = taps == [3, 3] and stride == dilation == (1, 1)
        if plain and depth <= 64 >= filters:
            return RESIDENT
        if max(stride) <= 8 and max(*padding, height, width) <= 127:
            return IM2COL
    fits = stride == (1, 1) and (4 + height) * (8 + width) <= 128  # pixels under a tile
    return WGMMA if fits else TILES


def fits_tiles(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether ``TILES`` takes these: 16 bits, channels-last, groups of 8, 16, … channels.

    And whether it pays: with fewer than 8 filters in a group its tiles would be nearly empty.
    """
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    if x.dim() != 4 or weight.dim() != 4:
        return False
    channels = x.shape[1]
    return (
        torch.cuda.get_device_capability(x.device) >= (8 if x.dtype == torch.bfloat16 else 7, 0)
        and groups > 0
        and channels % (8 * groups) == 0
        and weight.shape[0] >= 8 * groups
        and x.stride(3) == channels
        # One image can be contiguous both ways; the binding goes by what PyTorch suggests.
        and suggest_memory_format(x) == torch.channels_last
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def _run(x, weight, bias, stride, padding, dilation, groups, activation):
    geometry = (tuple(stride), tuple(padding), tuple(dilation), groups)
    kernel = last_rung("conv2d", fastest(x, weight, geometry))
    return kernel.conv2d(x, weight, bias, *geometry, activation)


def _empty(x, weight, bias, stride, padding, dilation, groups, activation):
    out = [
        (size + 2 * pad - spread * (tap - 1) - 1) // step + 1
        for size, tap, step, pad, spread in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    size, like = (x.shape[0], weight.shape[0], *out), suggest_memory_format(x)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=like)


opaque(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int[2] dilation,"
    " int groups, int activation) -> Tensor",
    _run,
    _empty,
)


def _pair(x: Pair) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else tuple(x)


def _composed(x, weight, bias, stride, padding, dilation, groups, activation) -> torch.Tensor:
    """PyTorch's convolution and its activation."""
    z = torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if activation == "relu":
        return torch.relu(z)
    return torch.nn.functional.gelu(z) if activation == "gelu" else z


def cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str = "none",
) -> Cost:
    """Reads the pixels that some window covers and the weights, writes the result, once each.

    Two operations for each weight and pixel of the result; bias and activation are next to nothing.
    """
    n, c, *size = x.shape
    k, depth, *taps = weight.shape
    out, seen = [], []
    geometry = zip(size, taps, _pair(stride), _pair(padding), _pair(dilation), strict=True)
    for length, tap, step, pad, spread in geometry:
        out.append((length + 2 * pad - spread * (tap - 1) - 1) // step + 1)
        seen.append(min(length, out[-1] * tap))  # a 1x1 kernel with stride 2 skips every other
    pixels = n * out[0] * out[1]
    moved = n * c * seen[0] * seen[1] + weight.numel() + k * (bias is not None) + pixels * k
    return Cost(moved * x.element_size(), 2 * pixels * k * depth * taps[0] * taps[1])


def tolerance(dtype: torch.dtype) -> float:
    """Largest ‖out − reference‖ / ‖reference‖.

    16-bit results are rounded twice where bias and activation are a second kernel, by at most half
    an epsilon each. Sums are float32 (float64 for float64) and their rounding errors grow with the
    root of their length: here up to 2304 products.
    """
    return (1 if torch.finfo(dtype).bits == 16 else 16) * torch.finfo(dtype).eps


def grad_tolerance(dtype: torch.dtype) -> float:
    """As ``tolerance``, for gradients, which are sums over a whole image, of both signs.

    In 16 bits GELU's argument, its slope and the gradient behind it are rounded one after another.
    """
    return (4 if torch.finfo(dtype).bits == 16 else 64) * torch.finfo(dtype).eps


def baselines() -> dict[str, Callable]:
    """cuDNN with the algorithm it found fastest, as ``lab`` asks it to; with the one it guesses
    without trying; with bias and ReLU in its own kernel, which PyTorch keeps to itself."""
    return {"eager": _composed, "cudnn_guess": _guessed, "cudnn_fused": _fused}


def _guessed(x, *rest) -> torch.Tensor:
    if x.element_size() != 2:
        raise RuntimeError("not supported by this rung: its plan would be the searched one")
    # PyTorch keeps cuDNN's plans whether they were searched or guessed. TF32 means nothing to 16
    # bits, but another setting of it is another plan.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=True):
        return _composed(x, *rest)


def _fused(x, weight, bias, stride, padding, dilation, groups, activation) -> torch.Tensor:
    try:
        if activation == "relu" and bias is not None:
            geometry = (_pair(stride), _pair(padding), _pair(dilation), groups)
            return torch.cudnn_convolution_relu(x, weight, bias, *geometry)
        reason = "cuDNN fuses a bias and ReLU"
    except (RuntimeError, NotImplementedError) as error:  # it has no kernel for this, or no cuDNN
        reason = str(error)
    raise RuntimeError(f"not supported by this rung: {reason}")  # so lab leaves it out


def cases() -> list[Case]:
    """Windows, steps and gaps of every kind, groups, odd sizes, no images, both layouts, no bias.

    (x, weight, stride, padding, dilation, groups, activation), spread over dtypes and layouts.
    """
    wanted = [
        ((2, 8, 9, 11), (16, 8, 3, 3), 1, 1, 1, 1, "relu"),
        ((1, 16, 12, 12), (24, 16, 1, 1), 1, 0, 1, 1, "gelu"),
        ((2, 16, 10, 9), (16, 16, 3, 3), 2, 1, 1, 1, "none"),
        ((1, 3, 15, 17), (8, 3, 7, 7), 2, 3, 1, 1, "gelu"),
        ((1, 8, 13, 13), (8, 8, 3, 3), 1, 2, 2, 1, "relu"),
        ((1, 16, 9, 9), (24, 8, 3, 3), 1, 1, 1, 2, "gelu"),
        ((2, 6, 10, 10), (6, 1, 3, 3), 1, 1, 1, 6, "relu"),  # depthwise
        ((1, 5, 7, 9), (7, 5, 2, 3), (2, 1), (1, 2), (3, 1), 1, "none"),
        ((1, 1, 1, 1), (1, 1, 1, 1), 1, 0, 1, 1, "none"),
        ((3, 32, 4, 5), (9, 32, 1, 1), 3, 0, 1, 1, "relu"),
    ]
    plain, last = "contiguous", "channels-last"
    f32, f16, bf16, f64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
    found = []
    for i, shape in enumerate(wanted):
        layouts = (last, plain) if i % 3 == 0 else (plain, last)
        found.append(_case(*shape, layouts[0], (f32, f32, f64)[i % 3]))
        found.append(_case(*shape, layouts[1], (bf16, f16)[i // 2 % 2]))
    tiles = ((3, 40, 7, 9), (72, 40, 3, 3), 1, 1, 1, 1, "gelu")  # several in each direction
    found += [_case(*tiles, last, bf16), _case(*tiles, last, f16), _case(*tiles, plain, f32)]
    many = ((3, 16, 29, 25), (24, 16, 3, 3), 1, 1, 1, 1, "gelu")  # several for each SM
    found += [_case(*many, last, bf16)]
    found += [_case((1, 40, 5, 9), (64, 40, 3, 3), 1, (2, 0), 1, 1, "relu", last, f16)]
    odd = (2, 8, 9, 8), (8, 8, 3, 3), 1, 1, 1, 1, "none"
    for dtype in (f32, bf16):
        found.append(_case((0, 8, 5, 5), (4, 8, 3, 3), 1, 1, 1, 1, "relu", plain, dtype))
        kinds = ("transposed", "misaligned", "strided", "expanded", "nonfinite")
        found += [_case(*odd, kind, dtype) for kind in kinds[dtype == bf16 :: 2]]
    tiny = ((1, 1, 3, 3), (2, 1, 2, 2), 1, 1, 1, 1), ((1, 2, 3, 2), (2, 1, 3, 1), 1, 1, 1, 2)
    found += [_case(*tiny[0], "gelu", plain, f64), _case(*tiny[1], "relu", last, f64)]  # gradcheck
    large = [
        ((12, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1),
        ((4, 256, 15, 13), (250, 256, 3, 3), 1, 1, 1, 1),
        ((4, 128, 61, 28), (256, 128, 1, 1), 2, 0, 1, 1),
        ((4, 96, 44, 44), (96, 1, 5, 5), 1, 2, 1, 96),
        ((4, 48, 64, 60), (48, 16, 3, 3), 1, 3, 3, 3),
    ]
    for shape in large:  # for a GPU
        found += [_case(*shape, "gelu", last, bf16), _case(*shape, "none", plain, f32)]
        found += [_case(*shape, "gelu", plain, f16), _case(*shape, "none", last, f32)]
    past = ((1 << 14) + 1, 64, 64, 32), (8, 64, 1, 1), 1, 0, 1, 1, "none"  # past 32-bit offsets
    return [*found, *(_case(*past, layout, f16) for layout in (plain, last))]


def bench_cases() -> list[Case]:
    """An early layer of a ResNet; its other layers, other dtypes; groups, odd sizes, a stem."""
    first = ((32, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1, "relu")
    last, plain, bf16, f32 = "channels-last", "contiguous", torch.bfloat16, torch.float32
    found = [_case(*first, last, bf16), _case(*first, plain, f32)]
    found += [_case(*first, last, torch.float16), _case(*first, plain, bf16)]
    found += [_case(*shape, last, bf16) for shape in [
        ((32, 128, 28, 28), (128, 128, 3, 3), 1, 1, 1, 1, "relu"),
        ((32, 256, 28, 28), (256, 256, 3, 3), 1, 1, 1, 1, "relu"),
        ((32, 256, 14, 14), (256, 256, 3, 3), 1, 1, 1, 1, "relu"),
        ((32, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1, 1, "relu"),
        ((32, 256, 56, 56), (64, 256, 1, 1), 1, 0, 1, 1, "gelu"),
        ((32, 128, 56, 56), (128, 128, 3, 3), 2, 1, 1, 1, "relu"),
        ((32, 256, 56, 56), (512, 256, 1, 1), 2, 0, 1, 1, "none"),
        ((32, 128, 56, 56), (128, 4, 3, 3), 1, 1, 1, 32, "relu"),
        ((32, 256, 28, 28), (256, 1, 3, 3), 1, 1, 1, 256, "relu"),
        ((32, 64, 57, 55), (60, 64, 3, 3), 1, 1, 1, 1, "gelu"),
        ((32, 64, 56, 56), (64, 64, 3, 3), 1, 2, 2, 1, "relu"),
        ((32, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1, 1, "relu"),
    ]]  # fmt: skip
    return [*found, _case((32, 63, 57, 55), (61, 63, 3, 3), 1, 1, 1, 1, "relu", plain, f32)]


def _case(x, weight, stride, padding, dilation, groups, activation, layout, dtype) -> Case:
    """``layout``: of x and weight "contiguous" or "channels-last"; any other is that of x alone.

    Half of the weights' filters are as large as the root of their length, so that results are
    about 1. For ReLU all numbers are multiples of 1/8 and the bias is an odd multiple of 1/16: no
    sum is 0, and no rounding decides on which side of the corner an element lies.
    """

    def inputs(device: str) -> tuple:
        kind = "contiguous" if layout == "channels-last" else layout
        image, filters = tensor(x, dtype, device, kind), tensor(weight, dtype, device)
        bias = tensor(weight[:1], dtype, device)
        if activation == "relu":
            for t, unit in ((image, 1), (filters, 8), (bias, 8)):
                t.copy_(t.mul(1.5).round().clamp(-2, 2) / unit)
            bias += 1 / 16
        else:
            filters /= max(1, filters[0].numel()) ** 0.5
        if layout == "channels-last":
            image, filters = (t.to(memory_format=torch.channels_last) for t in (image, filters))
        shift = bias if activation != "none" or groups > 1 else None
        return image, filters, shift, stride, padding, dilation, groups, activation

    sizes = f"{x} * {weight} stride {stride} padding {padding} dilation {dilation} groups {groups}"
    name = f"{str(dtype).removeprefix('torch.')} {sizes} {activation} {layout}"
    return Case(name, inputs, max(torch.Size(s).numel() for s in (x, weight)))
