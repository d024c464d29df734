"""matmul_tc: every rung on a GPU; what can be tested without one: refusals, compiling, choosing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lab
import loader
from ops.matmul_tc import (
    ACTIVATIONS,
    DTYPES,
    GENERAL,
    ON_CPU,
    fits_tma,
    matmul_tc,
    reference,
    tolerance,
)
from tests.conftest import needs_gpu

RUNGS = loader.rungs("matmul_tc")
EPILOGUE = RUNGS[-1]  # takes a bias and an activation; no other does


def skip_if_it_cannot_run(rung):
    if not torch.cuda.is_available():
        if rung != ON_CPU:
            pytest.skip(f"{rung} is inline PTX, which the CPU machine does not run")
    elif RUNGS.index(rung) > RUNGS.index(GENERAL) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"{rung} needs sm_90a")


@pytest.mark.parametrize("rung", RUNGS)
def test_every_case(rung):
    skip_if_it_cannot_run(rung)
    report = lab.check("matmul_tc", rung, isolate=False)
    layers = ["no epilogue" in result.message for result in report.having("outside")]
    assert any(layers) == (rung != EPILOGUE)
    assert all(layers) == (rung == GENERAL)


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
        for out in (matmul_tc(a, b, kernel=loader.load("matmul_tc", rung)), a @ b)
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


@needs_gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_a_thread_that_has_not_used_the_gpu_yet(rung):
    """Autograd's threads begin so, and the driver's call for a tensor map needs a context."""
    skip_if_it_cannot_run(rung)
    kernel = loader.load("matmul_tc", rung)
    a, b = torch.randn(2, 128, 128, device="cuda", dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(kernel.matmul_tc, a, b).result()
    assert torch.equal(out, kernel.matmul_tc(a, b))


def test_the_public_function_refuses_what_does_not_fit(device):
    a = torch.randn(2, 3, device=device, dtype=torch.bfloat16)
    for b in (a, a[0], a.t().float()):
        with pytest.raises(RuntimeError, match="matmul_tc: a"):
            matmul_tc(a, b)


@pytest.mark.parametrize(
    ("rung", "arch"), [(GENERAL, "7.5"), (EPILOGUE, "7.5"), (EPILOGUE, "9.0a")]
)
def test_it_compiles_for_other_gpus(monkeypatch, rung, arch):
    """What only Hopper has is left out elsewhere, and the launcher refuses."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # no GPU here has a say in it
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", arch)
    build = loader.load("matmul_tc", rung, backend="cuda").build
    assert build.kernels and all(k.spill_stores == 0 for k in build.kernels)
    log = build.log.read_text()
    assert "warning" not in log and "serialized" not in log  # so ptxas says of wgmma that waits


STUB = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstdint>
__global__ void nothing() {}
template <typename T>
__global__ void echo(const T* bias, T* c, int64_t n, int activation) {
  c[threadIdx.x] = T(static_cast<float>(bias ? bias[threadIdx.x % n] : T(0.0f)) + activation);
}
#define LAUNCH(T, dtype)                                                                        \\
  extern "C" cudaError_t matmul_tc_launch_##dtype(const T*, const T*, T*, int64_t, int64_t,     \\
                                                  int64_t, int64_t, int64_t, int64_t, int64_t,  \\
                                                  cudaStream_t) {                               \\
    return cudaErrorNotSupported;                                                               \\
  }
LAUNCH(__half, f16)
LAUNCH(__nv_bfloat16, bf16)
"""
ECHO = """
#define EPILOGUE(T, dtype)                                                                      \\
  extern "C" cudaError_t matmul_tc_bias_launch_##dtype(                                         \\
      const T*, const T*, const T* bias, T* c, int64_t m, int64_t n, int64_t, int64_t, int64_t, \\
      int64_t, int64_t, int activation, cudaStream_t stream) {                                  \\
    echo<<<1, static_cast<unsigned>(m * n), 0, stream>>>(bias, c, n, activation);               \\
    return cudaGetLastError();                                                                  \\
  }
EPILOGUE(__half, f16)
EPILOGUE(__nv_bfloat16, bf16)
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """The binding with a rung that refuses everything: the CPU machine runs no inline PTX."""
    path = tmp_path_factory.mktemp("stub") / "stub.cu"
    path.write_text(STUB)
    return loader.load("matmul_tc", path)


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A rung that refuses every product, with an epilogue that writes the arguments it got."""
    path = tmp_path_factory.mktemp("echo") / "echo.cu"
    path.write_text(STUB + ECHO)
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
    "bias device": (lambda t: (t(2, 3), t(3, 4), t(4, device="meta")), "got Half on meta"),
    "bias dtype": (lambda t: (t(2, 3), t(3, 4), t(4).float()), "bias .* Half on .* got Float"),
    "bias shape": (lambda t: (t(2, 3), t(3, 4), t(3)), r"each column of b, got bias \[3\] and b"),
    "bias rows": (lambda t: (t(2, 3), t(3, 4), t(1, 4)), r"each column .* got bias \[1, 4\]"),
    "bias strides": (lambda t: (t(2, 3), t(3, 4), t(8)[::2]), r"contiguous, got strides \[2\]"),
    "activation": (lambda t: (t(2, 3), t(3, 4), None, 3), r"0 \(none\), .* got 3"),
    "epilogue": (lambda t: (t(2, 3), t(3, 4), t(4)), "not supported by this rung: it has no epi"),
    "epilogue for ReLU": (lambda t: (t(2, 3), t(3, 4), None, 1), "supported by this rung: it has"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, stub, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device, dtype=torch.float16)

    with pytest.raises(RuntimeError, match=f"matmul_tc: .*{message}"):
        stub.matmul_tc(*make(t))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_epilogue_gets_the_bias_and_the_activation(device, echo, dtype):
    a, b = (torch.zeros(n, m, device=device, dtype=dtype) for n, m in ((2, 3), (3, 4)))
    bias = torch.arange(4, device=device).to(dtype)
    for i, activation in enumerate(ACTIVATIONS):
        out = matmul_tc(a, b, bias, activation, echo)
        assert out.tolist() == [[i, i + 1, i + 2, i + 3]] * 2
    assert matmul_tc(a, b, activation="gelu", kernel=echo).tolist() == [[2] * 4] * 2
    with pytest.raises(RuntimeError, match="not supported by this rung .* with strides"):
        matmul_tc(a, b, kernel=echo)  # a plain product goes to the other launcher


@pytest.mark.parametrize("size", [(33, 25, 47), (64, 48, 32)])  # the second one fits TMA
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer(device, dtype, activation, with_bias, size):
    """Composed of a product and PyTorch's kernels where no rung with an epilogue can be used."""
    m, n, k = size
    a = torch.randn(m, k, device=device).to(dtype).requires_grad_()
    b = (torch.randn(k, n, device=device) / k**0.5).to(dtype).requires_grad_()
    bias = torch.randn(n, device=device).to(dtype).requires_grad_() if with_bias else None
    out = matmul_tc(a, b, bias, activation)
    given = [x for x in (a, b, bias) if x is not None]
    doubles = [x.detach().double().requires_grad_() for x in given]
    expected = reference(*doubles, *[None] * (not with_bias), activation)
    assert out.dtype == dtype and (out - expected).norm() < 3 * tolerance(dtype) * expected.norm()
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, given, grad)
    if activation == "relu":  # where rounding decided on which side of the corner an element lies
        grad = torch.where((out > 0) == (expected > 0), grad, 0)
        got = torch.autograd.grad(matmul_tc(a, b, bias, activation), given, grad)
    for x, y in zip(got, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert x.dtype == dtype and (x - y).norm() < 4 * tolerance(dtype) * y.norm()


@pytest.mark.parametrize("shift", [(3,), (1, 4), (), (4, 1)])
def test_a_bias_that_does_not_fit_is_refused(device, shift):
    """Also where PyTorch would broadcast it."""
    a, b = torch.zeros(4, 3, device=device).half(), torch.zeros(3, 4, device=device).half()
    with pytest.raises(RuntimeError, match="matmul_tc: bias must have one element for each column"):
        matmul_tc(a, b, torch.zeros(shift, device=device).half())
    with pytest.raises(RuntimeError, match="matmul_tc: bias must .* got .*float32"):
        matmul_tc(a, b, torch.zeros(4, device=device))


def test_an_unknown_activation_is_refused(device):
    a = torch.zeros(2, 2, device=device).half()
    with pytest.raises(ValueError, match=r"one of \('none', 'relu', 'gelu'\), got 'tanh'"):
        matmul_tc(a, a, activation="tanh")


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

    bias = torch.randn(3, device=device, dtype=torch.float16)
    layer = mixed(lambda a, b: matmul_tc(a, b, bias, "gelu"), a, b)
    exact = mixed(
        lambda a, b: reference(a, b, bias, "gelu"),
        *(x.detach().double().requires_grad_() for x in (a, b)),
    )
    assert (layer - exact).norm() < 16 * tolerance(torch.float16) * exact.norm()
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
