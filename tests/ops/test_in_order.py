"""The rungs whose rows a counter hands out: softmax and layer_norm, 8_in_order."""

import importlib
import re
import types

import pytest
import torch

import loader
from ops import common
from tests.conftest import needs_gpu

OPS = {"softmax": "LONG", "layer_norm": "IN_ORDER"}
RUNG = "8_in_order"


def module_of(op):
    module = importlib.import_module(f"ops.{op}")
    assert getattr(module, OPS[op]) == RUNG
    return module


def arguments(op, shape, device, dtype=torch.float32):
    x, weight, bias = (torch.randn(n, device=device) for n in (shape, shape[-1:], shape[-1:]))
    every = (x,) if op == "softmax" else (x, weight, bias)
    return tuple(t.to(dtype) for t in every)


def close(op, out, inputs):
    module = module_of(op)
    want = module.reference(*inputs)
    return (out.double() - want).norm() <= module.tolerance(out.dtype) * want.norm()


@pytest.mark.parametrize(
    ("shape", "dtype", "chosen"),
    [
        ((512, 16384), torch.float32, False),  # one block has room for the row
        ((512, 16388), torch.float32, True),
        ((511, 16388), torch.float32, False),  # less than 32 MB
        ((512, 8194), torch.float64, True),
        ((1024, 16392), torch.bfloat16, True),
        ((1024, 16387), torch.bfloat16, False),  # rows that begin between multiples of 16 bytes
        ((32, 1 << 18), torch.float32, True),
        ((32, (1 << 18) + 4), torch.float32, False),  # more than 16 blocks can hold
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_which_rows_it_is_chosen_for(op, shape, dtype, chosen):
    sizes = (shape,) if op == "softmax" else (shape, shape[-1:], shape[-1:])
    inputs = [torch.empty(size, dtype=dtype) for size in sizes]
    assert (module_of(op).fastest(*inputs) == RUNG) == chosen


@pytest.mark.parametrize("op", OPS)
def test_x_between_the_boundaries_is_for_another_rung(op):
    x = torch.empty((512 * 16388) + 1)[1:].view(512, 16388)
    inputs = (x,) if op == "softmax" else (x, torch.empty(16388), torch.empty(16388))
    assert module_of(op).fastest(*inputs) != RUNG


def test_chips_without_clusters_are_not_asked(monkeypatch):
    on_gpu = types.SimpleNamespace(is_cuda=True, device="cuda")
    for capability, expected in ((8, 9), False), ((9, 0), True), ((12, 0), True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert common.may_have_clusters(on_gpu) == expected


@pytest.mark.parametrize("cols", [512, 1000, 2056, 20_000])
@pytest.mark.parametrize("op", OPS)
def test_many_rows(device, op, cols):
    """Each cluster has some that were dealt out, and some that it was handed."""
    inputs = arguments(op, (600 if device == "cpu" else 4000, cols), device)
    function = getattr(module_of(op), op)
    out = function(*inputs, kernel=loader.load(op, RUNG))
    assert close(op, out, inputs)


QUERY = r"error = cudaOccupancyMaxActiveClusters\(&fitting, kernel, &config\);"
ANSWERS = {  # of a chip, or a slice of one, that has no cluster of the size, or no memory
    "none": (QUERY, "fitting = 0;"),
    "an error": (QUERY, "error = cudaSetDevice(-1);"),  # which is remembered, too
    "no memory": (r"error = make_counter\(.*?\);", "error = cudaErrorMemoryAllocation;"),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("op", OPS)
def test_where_no_cluster_is_granted_another_rung_takes_the_rows(
    device, tmp_path, monkeypatch, op, answer
):
    module = module_of(op)
    text, count = re.subn(*ANSWERS[answer], loader.find_rung(op, RUNG).read_text())
    assert count == 1
    path = tmp_path / "none_granted.cu"
    path.write_text(text)
    refusing = loader.load(op, path)
    inputs = arguments(op, (3, 20_000), device)
    function = getattr(module, op)
    with pytest.raises(RuntimeError, match=r"not supported by this rung \(operation not supported"):
        function(*inputs, kernel=refusing)

    def last_rung(op, rung):
        return refusing if rung == RUNG else loader.load(op, rung)

    monkeypatch.setattr(module, "fastest", lambda *_: RUNG)
    monkeypatch.setattr(common, "last_rung", last_rung)
    assert close(op, function(*inputs), inputs)


@needs_gpu
@pytest.mark.parametrize("op", OPS)
def test_two_streams_at_once(op):
    """Each launch counts its own rows: with one counter, some would be written by nobody."""
    function, kernel = getattr(module_of(op), op), loader.load(op, RUNG)
    sets = [arguments(op, (1000, 20_000), "cuda", torch.bfloat16) for _ in range(2)]
    wanted = [function(*inputs, kernel=kernel) for inputs in sets]
    assert all(close(op, *pair) for pair in zip(wanted, sets, strict=True))
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    outs = []
    for _ in range(10):
        for stream, inputs in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                outs.append(function(*inputs, kernel=kernel))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted[i % 2]) for i, out in enumerate(outs))


@needs_gpu
@pytest.mark.parametrize("op", OPS)
def test_a_graph_that_is_replayed_beside_an_eager_call(op):
    function, kernel = getattr(module_of(op), op), loader.load(op, RUNG)
    inputs = arguments(op, (1000, 20_000), "cuda", torch.bfloat16)
    wanted = function(*inputs, kernel=kernel)
    assert close(op, wanted, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function(*inputs, kernel=kernel)
    for _ in range(2):
        captured.fill_(7)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(torch.cuda.Stream()):
            eager = function(*inputs, kernel=kernel)
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted) and torch.equal(eager, wanted)
