"""matmul_tc: every rung on a GPU; what can be tested without one: refusals, compiling, choosing."""

import pytest
import torch

import lab
import loader
from ops.matmul_tc import DTYPES, GENERAL, ON_CPU, fits_tma, matmul_tc, reference, tolerance
from tests.conftest import needs_gpu

RUNGS = loader.rungs("matmul_tc")


def skip_if_it_cannot_run(rung):
    if not torch.cuda.is_available():
        if rung != ON_CPU:
            pytest.skip(f"{rung} is inline PTX, which the CPU machine does not run")
    elif rung > GENERAL and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{rung} needs sm_90a")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    skip_if_it_cannot_run(rung)
    report = lab.check("matmul_tc", rung, isolate=False)
    assert bool(report.having("outside")) == (rung != GENERAL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS)
def test_the_error_is_that_of_torch(device, rung, dtype):
    """On a GPU that is cuBLAS: both sum in float32 and round once."""
    skip_if_it_cannot_run(rung)
    a = torch.randn(64, 512, device=device, dtype=dtype)
    b = torch.randn(512, 128, device=device, dtype=dtype)
    exact = reference(a, b)
    own, torchs = (
        (out - exact).norm() / exact.norm()
        for out in (matmul_tc(a, b, loader.load("matmul_tc", rung)), a @ b)
    )
    assert own <= 1.05 * torchs


def test_the_public_function_chooses_a_rung(device):
    """The last one where it can be used, the general one elsewhere: any shape works."""
    for m, n, k in ((64, 128, 96), (33, 127, 65), (1, 8, 8), (5, 8, 0), (0, 3, 5)):
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(k, n, device=device, dtype=torch.bfloat16)
        for x, y in ((a, b), (b.t(), a.t())):
            out = matmul_tc(x, y)
            assert out.is_contiguous()
            torch.testing.assert_close(out, x @ y)


def test_the_public_function_refuses_what_does_not_fit(device):
    a = torch.randn(2, 3, device=device, dtype=torch.bfloat16)
    for b in (a, a[0], a.t().float()):
        with pytest.raises(RuntimeError, match="matmul_tc: a"):
            matmul_tc(a, b)


@pytest.mark.parametrize("rung", [GENERAL, RUNGS[-1]])
def test_it_compiles_for_other_gpus(monkeypatch, rung):
    """What only Hopper has is left out there, and the launcher refuses."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # no GPU here has a say in it
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    build = loader.load("matmul_tc", rung, backend="cuda").build
    assert build.kernels and all(k.spill_stores == 0 for k in build.kernels)
    assert "warning" not in build.log.read_text()


STUB = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
__global__ void nothing() {}
#define LAUNCH(T, dtype)                                                                        \\
  extern "C" cudaError_t matmul_tc_launch_##dtype(const T*, const T*, T*, int64_t, int64_t,     \\
                                                  int64_t, int64_t, int64_t, int64_t, int64_t,  \\
                                                  cudaStream_t) {                               \\
    return cudaErrorNotSupported;                                                               \\
  }
LAUNCH(__half, f16)
LAUNCH(__nv_bfloat16, bf16)
"""


@pytest.fixture
def stub(tmp_path):
    """The binding with a rung that refuses everything: the CPU machine runs no inline PTX."""
    path = tmp_path / "stub.cu"
    path.write_text(STUB)
    return loader.load("matmul_tc", path)


REFUSALS = {
    "device": (lambda t: (t(2, 3, device="meta"), t(3, 4)), "a (must be on .*, got|is on) meta"),
    "devices": (
        lambda t: (t(2, 3), t(3, 4, device="meta")),
        "(on one device, got .* and|is on) meta",
    ),
    "dtypes": (lambda t: (t(2, 3), t(3, 4).bfloat16()), "one dtype, got Half and BFloat16"),
    "dtype": (lambda t: (t(2, 3).float(), t(3, 4).float()), "float16 or bfloat16, got Float"),
    "dimensions": (lambda t: (t(2, 2, 3), t(3, 4)), r"2 dimensions, got shapes \[2, 2, 3\] and"),
    "shapes": (lambda t: (t(2, 3), t(4, 5)), r"as many columns .*, got \[2, 3\] and \[4, 5\]"),
    "layout": (
        lambda t: (t(2, 3), t(3, 4)),
        r"not supported by this rung .* \[2, 3\] and",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, stub, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device, dtype=torch.float16)

    with pytest.raises(RuntimeError, match=f"matmul_tc: .*{message}"):
        stub.matmul_tc(*make(t))


def test_nothing_to_compute_never_reaches_the_rung(device, stub):
    a = torch.zeros(0, 3, device=device, dtype=torch.float16)
    assert stub.matmul_tc(a, a.new_zeros(3, 4)).shape == (0, 4)


@needs_gpu
def test_what_fits_tma():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("TMA needs a Hopper GPU")
    x = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    assert fits_tma(x, x) and fits_tma(x.t(), x) and fits_tma(x, x.t())
    assert not fits_tma(x[:, 1:], x[1:])  # begins 2 bytes late
    assert not fits_tma(x, x[:, :63])  # rows of C would not be aligned
    assert not fits_tma(x[:, ::2], x[:32])
    assert not fits_tma(x[:0], x) and not fits_tma(x[:, :0], x[:0])


def test_the_second_derivative(device):
    """Of squares, so that it is not zero; a backward that is a bare kernel would give none."""
    a, b = (torch.randn(n, m, device=device, dtype=torch.float16, requires_grad=True)
            for n, m in ((5, 7), (7, 3)))  # fmt: skip

    def mixed(product, a, b):
        (first,) = torch.autograd.grad(product(a, b).square().sum(), a, create_graph=True)
        return torch.autograd.grad(first.sum(), b)[0]

    want = mixed(
        torch.matmul, a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    )
    got = mixed(matmul_tc, a, b)
    assert (got - want).norm() < 16 * tolerance(torch.float16) * want.norm()


def test_fragments_are_counted_as_they_lie():
    """A row of 16 halves is one sector; each lane on a row of its own would be counted 8 times."""
    a, b = torch.randn(32, 32).half(), torch.randn(32, 32).half()
    totals = lab.count("matmul_tc", ["1_wmma"], a, b).totals["1_wmma"]
    assert totals["global_bytes_moved"] == totals["global_bytes_ideal"]
