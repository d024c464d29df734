"""conv2d: every rung against float64, those with PTX too; every refusal, and the gradients.

The CPU machine runs no PTX. Where there is no GPU, the few functions of a rung that hold it are
replaced by ``software_ptx.h`` or ``software_tma.h``, and all that is left of the rung is tested.
Whether a rung that uses wgmma has all of its fences and waits, only a Hopper GPU can tell.
"""

import math
import re
from pathlib import Path

import pytest
import torch

import lab
import loader
import ops.conv2d
from ops.conv2d import (
    GENERAL,
    IM2COL,
    RESIDENT,
    TILES,
    WGMMA,
    conv2d,
    fastest,
    reference,
    tolerance,
)
from tests.conftest import ROOT

RUNGS = loader.rungs("conv2d")
EVERYTHING = ("1_direct", "3_implicit_gemm", GENERAL)
HOPPER = (WGMMA, RESIDENT, IM2COL)
BUILT_WITHOUT = "attributes.sharedSizeBytes == 0"  # which the CPU machine always says
SOFTWARE = {IM2COL: Path(__file__).with_name("software_tma.h")}
SOFTWARE_PTX = Path(__file__).with_name("software_ptx.h")
PTX = (  # whole functions, of one line or more, and the macro that wgmma() uses
    r"(?:template <[^\n]*>\n)?__device__ void "
    r"(?:cp_async|ldmatrix|stmatrix|mma|wgmma|fence_proxy|mbarrier|tma|warpgroup_barrier)\w*\("
    r"[^{]*\{(?:[^\n]*\}|[^\n]*\n.*?^\})\n|#define WGMMA(?:[^\n]*\\\n)+[^\n]*\n"
)
DRIVER = {  # names that the CPU machine refuses or does not have → those in software_tma.h
    r"\bCUtensorMap\b": "SoftwareMap",
    "cuTensorMapEncode": "software_encode_",
    "cudaGetDriverEntryPointByVersion": "software_driver",
    "#include <cuda.h>": "",
}


def has_ptx(rung):
    return "asm volatile" in loader.find_rung("conv2d", rung).read_text()


def runnable(rung, folder):
    """The rung, or where there is no GPU a copy of it with its PTX in software."""
    path = loader.find_rung("conv2d", rung)
    if torch.cuda.is_available() or not has_ptx(rung):
        return path
    text = re.sub(PTX, "", path.read_text(), flags=re.M | re.S)
    assert "asm" not in text
    assert (BUILT_WITHOUT in text) == (rung in HOPPER)
    text = text.replace(BUILT_WITHOUT, "false")
    for driver, software in DRIVER.items():
        text = re.sub(driver, software, text)
    software = f'#include "{SOFTWARE.get(rung, SOFTWARE_PTX)}"\n#include <cstdint>'
    copy = folder / path.name
    copy.write_text(text.replace("#include <cstdint>", software))
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("software")


def skip_if_it_cannot_run(rung):
    if torch.cuda.is_available() and rung in HOPPER and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{rung} needs sm_90a")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung, folder):
    skip_if_it_cannot_run(rung)
    report = lab.check("conv2d", runnable(rung, folder), isolate=False)
    assert bool(report.having("outside")) == (rung not in EVERYTHING)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_public_function_chooses_a_rung(device, dtype, groups):
    """One that can be used: any shape works."""
    for channels, size in ((16, (5, 6)), (24, (1, 1)), (8, (1, 3))):
        x = torch.randn(2, channels, *size, device=device).to(dtype)
        w = torch.randn(16, channels // groups, 3, 3, device=device).to(dtype)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            given = x.to(memory_format=memory_format)
            y = conv2d(given, w, padding=1, groups=groups)
            expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1, groups=groups)
            assert (y - expected).norm() <= tolerance(dtype) * expected.norm()


CHOICES = [  # channels, weight, stride, dilation, groups, the rung on Hopper
    (64, (64, 64, 3, 3), 1, 1, 1, RESIDENT),
    (40, (8, 40, 3, 3), 1, 1, 1, RESIDENT),
    (32, (64, 32, 3, 3), 1, 1, 1, WGMMA),  # few channels
    (72, (64, 72, 3, 3), 1, 1, 1, IM2COL),  # many
    (64, (72, 64, 3, 3), 1, 1, 1, IM2COL),
    (128, (128, 64, 3, 3), 1, 1, 2, WGMMA),
    (64, (64, 64, 3, 3), 1, 2, 1, IM2COL),
    (64, (64, 64, 3, 3), 2, 1, 1, IM2COL),
    (64, (64, 64, 1, 1), 8, 1, 1, IM2COL),
    (64, (64, 64, 1, 1), 9, 1, 1, TILES),
    (32, (64, 32, 5, 9), 1, 1, 1, WGMMA),  # 8 x 16 pixels
    (32, (64, 32, 5, 10), 1, 1, 1, TILES),
    (32, (64, 32, 3, 3), 2, 1, 1, TILES),
    (64, (60, 64, 3, 3), 1, 1, 1, TILES),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_rung_takes_what_is_chosen_for_it(monkeypatch, device, folder, choice):
    channels, shape, stride, dilation, groups, wanted = choice
    geometry = (stride, stride), (0, 0), (dilation, dilation), groups
    x = torch.randn(1, channels, 7, 12, device=device, dtype=torch.float16)
    w = torch.randn(shape, device=device, dtype=torch.float16) / math.prod(shape[1:]) ** 0.5
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    monkeypatch.setattr(ops.conv2d, "fits_tiles", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert fastest(x, w, geometry) == TILES
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert fastest(x, w, geometry) == wanted
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # without what only Hopper has
    assert fastest(x, w, geometry) == TILES
    monkeypatch.undo()
    skip_if_it_cannot_run(wanted)
    kernel = loader.load("conv2d", runnable(wanted, folder))
    out, want = conv2d(x, w, None, *geometry, kernel=kernel), reference(x, w, None, *geometry)
    assert (out.double() - want).norm() <= tolerance(x.dtype) * want.norm()


@pytest.mark.parametrize("arch", ["7.5", "9.0a"])
@pytest.mark.parametrize("rung", [r for r in RUNGS if has_ptx(r)])
def test_it_compiles_for_other_gpus(monkeypatch, rung, arch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # no GPU here has a say in it
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch)
    build = loader.load("conv2d", rung, backend="cuda").build
    if rung in (TILES, *HOPPER):
        assert all(k.spill_stores == 0 for k in build.kernels)
    assert build.kernels and "warning" not in build.log.read_text()


def test_a_convolution_is_described_alike_everywhere():
    """The struct crosses the border between the layers: other members would be read as garbage."""
    files = [ROOT / "bindings/conv2d.cpp", *(loader.find_rung("conv2d", r) for r in RUNGS)]
    found = {re.search(r"struct Conv \{.*?\n\};", f.read_text(), re.S)[0] for f in files}
    assert len(found) == 1


GEOMETRY = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "activation": 0}
REFUSALS = {
    "device": (lambda t: (t(1, 4, 5, 5, device="meta"), t(8, 4, 3, 3)), {}, "x must be on .* meta"),
    "devices": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3, device="meta")), {}, "one device, .* meta"),
    "dtype": (lambda t: (t(1, 4, 5, 5).long(), t(8, 4, 3, 3)), {}, "float32, .* got Long"),
    "dtypes": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3).half()), {}, "one dtype, got Float, Half"),
    "dimensions": (lambda t: (t(4, 5, 5), t(8, 4, 3, 3)), {}, r"4 dimensions, got .* \[4, 5, 5\]"),
    "channels": (lambda t: (t(1, 4, 5, 5), t(8, 3, 3, 3)), {}, r"got weight \[8, 3, 3, 3\], x \[1"),
    "no channels": (lambda t: (t(1, 0, 5, 5), t(8, 0, 3, 3)), {}, r"got weight \[8, 0, 3, 3\]"),
    "steps": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"stride": (1, 1 << 25)}, r"at most 2\^24"),
    "filters": (lambda t: (t(1, 4, 5, 5), t(9, 2, 3, 3)), {"groups": 2}, "and groups 2"),
    "groups": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"groups": 0}, "and groups 0"),
    "bias": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3), t(4)), {}, r"each filter .* got \[4\]"),
    "stride": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"stride": (0, 1)}, "got stride 0"),
    "padding": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"padding": (0, -1)}, "padding -1"),
    "window": (lambda t: (t(1, 4, 5, 2), t(8, 4, 3, 3)), {}, r"must fit .* got x \[1, 4, 5, 2\]"),
    "gaps": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"dilation": (1, 3)}, "dilation 3"),
    "huge": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"padding": (1 << 30, 0)}, r"over 2\^29"),
    "activation": (lambda t: (t(1, 4, 5, 5), t(8, 4, 3, 3)), {"activation": 3}, "got 3"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, changes, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    tensors = make(t)
    with pytest.raises(RuntimeError, match=f"conv2d: .*{message}"):
        loader.load("conv2d", 1).conv2d(
            tensors[0], tensors[1], *(tensors[2:] or [None]), **{**GEOMETRY, **changes}
        )


def test_an_unknown_activation_is_refused(device):
    with pytest.raises(ValueError, match=r"one of \('none', 'relu', 'gelu'\), got 'tanh'"):
        conv2d(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), activation="tanh")


@pytest.mark.parametrize("rung", [r for r in RUNGS if r not in EVERYTHING])
def test_a_rung_says_what_it_does_not_do(device, rung, folder):
    skip_if_it_cannot_run(rung)
    module = loader.load("conv2d", runnable(rung, folder))
    x, w = torch.zeros(1, 8, 5, 5, device=device), torch.zeros(8, 8, 3, 3, device=device)
    if rung == "2_shared_tile":
        x = x.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match=r"not supported by this rung .* got Float, x \[1, 8"):
        conv2d(x, w, kernel=module)


def test_the_layout_follows_the_input(device):
    """Also where a size of 1 makes it both, and for weights that lie otherwise."""
    w = torch.randn(4, 8, 3, 3, device=device)
    for x in (torch.randn(2, 8, 1, 1, device=device), torch.randn(2, 8, 5, 4, device=device)):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            y = conv2d(x.to(memory_format=memory_format), w, padding=1)
            assert y.is_contiguous(memory_format=memory_format)
            expected = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
            torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_one_image_that_lies_both_ways(device):
    """Contiguous channels-last by its strides, and not what PyTorch's C++ calls so."""
    x = torch.randn(8, 8, 64, device=device).bfloat16().permute(2, 0, 1).unsqueeze(0)
    assert x.is_contiguous(memory_format=torch.channels_last) and x.stride(0) != x.numel()
    weight = torch.randn(32, 64, 3, 3, device=device).bfloat16()
    weight = weight.contiguous(memory_format=torch.channels_last)
    expected = reference(x, weight, None, 1, 1, 1, 1, "relu")
    out = conv2d(x, weight, None, padding=1, activation="relu")
    assert (out - expected).norm() <= tolerance(x.dtype) * expected.norm()


def test_what_needs_no_gradient_gets_none(device):
    x = torch.randn(1, 2, 4, 4, device=device)
    w = torch.randn(3, 2, 3, 3, device=device, requires_grad=True)
    conv2d(x, w, activation="gelu").sum().backward()
    assert x.grad is None and w.grad.shape == w.shape


def test_a_second_derivative_is_refused(device):
    x = torch.randn(1, 2, 4, 4, device=device, requires_grad=True)
    out = conv2d(x, torch.randn(3, 2, 3, 3, device=device), activation="gelu")
    with pytest.raises(RuntimeError, match="is differentiable once; create_graph=True asks for"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
