"""vector_add: every refusal by its message, and what lab.check does not look at."""

import pytest
import torch

import loader
from ops.common import tensor
from ops.vector_add import vector_add
from tests.conftest import needs_gpu

RUNGS = loader.rungs("vector_add")


@pytest.fixture(params=RUNGS)
def kernel(request):
    return loader.load("vector_add", request.param)


def test_the_ladder():
    assert RUNGS == ["1_naive", "2_grid_stride", "3_vectorized"]


def test_every_rung_compiles_without_a_gpu_and_without_spills():
    for rung in RUNGS:
        build = loader.load("vector_add", rung, backend="cuda").build
        assert build.kernels and all(k.spill_stores == 0 for k in build.kernels)
        assert "warning" not in build.log.read_text()


REFUSALS = {
    "device": (
        lambda t: (t(8, device="meta"), t(8, device="meta")),
        r"a (must be on .*, got|is on) meta",
    ),
    "devices": (lambda t: (t(8), t(8, device="meta")), r"on one device, got .* and meta"),
    "dtypes": (lambda t: (t(8), t(8).double()), "one dtype, got Float and Double"),
    "dtype": (lambda t: (t(8).long(), t(8).long()), "float32, float64, .* got Long"),
    "empty": (lambda t: (t(0).long(), t(0).long()), "float32, float64, .* got Long"),
    "shape": (lambda t: (t(8), t(4)), r"one shape, got \[8\] and \[4\]"),
    "broadcast": (lambda t: (t(8, 1), t(8, 8)), r"one shape, got \[8, 1\] and \[8, 8\]"),
    "strides of a": (
        lambda t: (t(8, 4).t(), t(4, 8)),
        r"a must be contiguous, got shape \[4, 8\] with strides \[1, 4\]; pass a\.contiguous\(\)",
    ),
    "strides of b": (
        lambda t: (t(4, 8), t(4, 16)[:, ::2]),
        r"b must be contiguous, got shape \[4, 8\] with strides \[16, 2\]; pass b\.contiguous\(\)",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(device, what):
    make, message = REFUSALS[what]

    def t(*size, device=device):
        return torch.zeros(size, device=device)

    module = loader.load("vector_add")
    with pytest.raises(RuntimeError, match=f"vector_add: .*{message}"):
        module.vector_add(*make(t))


def test_a_cpu_tensor_is_refused_by_the_cuda_build():
    module = loader.load("vector_add", backend="cuda")
    with pytest.raises(RuntimeError, match="a must be on a CUDA device, got cpu"):
        module.vector_add(torch.zeros(4), torch.zeros(4))


def test_what_is_no_tensor_is_refused(kernel):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        kernel.vector_add([1.0], [2.0])


def test_the_public_function_takes_any_strides(device, kernel):
    for layout in ("transposed", "strided", "expanded", "misaligned"):
        a = tensor((64, 48), torch.float32, device, layout)
        b = tensor((64, 48), torch.float32, device)
        assert torch.equal(vector_add(a, b, kernel=kernel), a + b), layout


def test_gradients(device, kernel):
    a = torch.randn(5, 3, device=device, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, 3, device=device, dtype=torch.float64, requires_grad=True)

    def f(a, b):
        return vector_add(a, b, kernel=kernel)

    assert torch.autograd.gradcheck(f, (a, b))
    assert torch.autograd.gradgradcheck(f, (a, b))
    (grad,) = torch.autograd.grad(f(a, b.detach()).sum(), a)
    assert torch.equal(grad, torch.ones_like(a))


@needs_gpu
def test_the_current_stream_is_used(kernel):
    """On the default stream the addition would read its input before it is there."""
    a, b = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(5):
        a.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # some 25 ms
            a.fill_(1)
            out = kernel.vector_add(a, b)
        stream.synchronize()
        assert torch.equal(out, torch.ones_like(a))


@needs_gpu
def test_capture_and_replay(kernel):
    a, b = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    kernel.vector_add(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.vector_add(a, b)
    for _ in range(2):
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, a + b)


@needs_gpu
def test_past_32_bit_indices(kernel):
    n = (1 << 31) + 512
    if torch.cuda.mem_get_info()[0] < 4 * n * 2:
        pytest.skip("needs 17 GB of GPU memory")
    a = torch.randn(n, device="cuda", dtype=torch.float16)
    out = kernel.vector_add(a, a)
    for part in (slice(0, 1000), slice(n // 2 - 500, n // 2 + 500), slice(n - 1000, n)):
        assert torch.equal(out[part], a[part] + a[part])
    assert torch.equal(out.view(torch.int16).sum(), (a + a).view(torch.int16).sum())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_gpu_of_the_arguments_is_used(kernel):
    a, b = torch.randn(1000, device="cuda:1"), torch.randn(1000, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out = kernel.vector_add(a, b)
    assert out.device == a.device and torch.equal(out, a + b)
    with pytest.raises(RuntimeError, match="on one device, got cuda:1 and cuda:0"):
        kernel.vector_add(a, b.to("cuda:0"))


@needs_gpu
def test_a_refused_launch_is_reported(tmp_path):
    """2048 threads a block: without the check after the launch the output would be garbage."""
    text = (loader.ROOT / "kernels/vector_add/1_naive.cu").read_text()
    rung = tmp_path / "too_many_threads.cu"
    rung.write_text(text.replace("BLOCK = 256", "BLOCK = 2048"))
    module = loader.load("vector_add", rung)
    a = torch.randn(10_000, device="cuda")
    with pytest.raises(RuntimeError, match="the launch failed: invalid (argument|configuration)"):
        module.vector_add(a, a)
    good = loader.load("vector_add", "1_naive").vector_add(a, a)  # and nothing is lost
    assert torch.equal(good, a + a)
