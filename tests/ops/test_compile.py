"""torch.compile: an operator is one node of the graph, forward and backward, and says the same."""

import importlib
import inspect
import itertools
import re

import pytest
import torch

import loader
from ops.vector_add import vector_add

OPS = loader.ops()
MODULES = {op: importlib.import_module(f"ops.{op}") for op in OPS}


def two_sizes(op, dtype, device):
    """Arguments of two small cases, alike except for their sizes if there are such; or None."""
    small = [
        case.inputs(device)
        for case in MODULES[op].cases()
        if 40 < case.elements < 1 << 12
        and case.name.startswith(dtype)
        and "nonfinite" not in case.name
    ]

    def like(pair):
        kinds = [[x.dim() if torch.is_tensor(x) else x for x in inputs] for inputs in pair]
        return kinds[0] == kinds[1] and pair[0][0].shape != pair[1][0].shape

    return max(itertools.combinations(small, 2), key=like, default=None)


def leaves(op, inputs):
    """``inputs`` as leaves of autograd, unless the operator has no gradient."""
    grad = not op.endswith("_backward")
    return [x.detach().requires_grad_(grad) if torch.is_tensor(x) else x for x in inputs]


def values_and_gradients(function, inputs):
    found = function(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(1)
    weights = [torch.randn_like(x) for x in outputs]
    tensors = [x for x in inputs if torch.is_tensor(x)]
    wanted = outputs[0].requires_grad
    return [*outputs, *(torch.autograd.grad(outputs, tensors, weights) if wanted else ())]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_graph(device, op, dtype):
    function = getattr(MODULES[op], op)

    def model(*inputs):
        out = function(*(x * 1.5 if torch.is_tensor(x) else x for x in inputs))
        return tuple(x * 2 for x in out) if isinstance(out, tuple) else out * 2

    pair = two_sizes(op, dtype, device)
    if pair is None:
        pytest.skip(f"{op} does not take {dtype}")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for inputs in pair:
        inputs = leaves(op, inputs)
        got, want = (values_and_gradients(f, inputs) for f in (compiled, model))
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            assert x.stride() == y.stride()
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("op", OPS)
def test_what_is_registered(device, op, monkeypatch):
    """Each operator that ops/<op>.py registers is called and changes no input; its fake is true."""
    calls = []

    class Recorder:
        def __getattr__(self, name):
            operator = getattr(torch.ops.three_layers, name)

            def call(*inputs):
                calls.append((operator.default, inputs))
                return operator(*inputs)

            return call

    for module in MODULES.values():
        monkeypatch.setattr(module, "in_graph", Recorder)
    dtype = "bfloat16" if op == "matmul_tc" else "float32"
    for inputs in two_sizes(op, dtype, device):
        values_and_gradients(getattr(MODULES[op], op), leaves(op, inputs))
    registered = re.findall(r'opaque\(\s*"(\w+)\(', inspect.getsource(MODULES[op]))
    called = [operator._schema.name.removeprefix("three_layers::") for operator, _ in calls]
    assert registered and set(registered) <= set(called)
    for operator, inputs in calls:
        plain = tuple(x.detach() if torch.is_tensor(x) else x for x in inputs)
        torch.library.opcheck(operator, plain, test_utils=("test_schema", "test_faketensor"))


def refuses_and_leaves(model, inputs):
    """With ``fullgraph=True`` there is one message; without, the result of eager mode."""
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="was given a kernel, which torch.compile cannot trace"):
        torch.compile(model, fullgraph=True, backend="eager")(*inputs)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(*inputs), model(*inputs))


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_ends_the_graph(device, op):
    inputs, _ = two_sizes(op, "bfloat16" if op == "matmul_tc" else "float32", device)
    kernel = torch.ops.three_layers  # has a function for each operator, and takes every size
    refuses_and_leaves(lambda *inputs: getattr(MODULES[op], op)(*inputs, kernel=kernel), inputs)


def test_a_kernel_ends_the_graph_without_warnings(device, recwarn):
    kernel, x = loader.load("vector_add", "1_naive"), torch.randn(100, device=device)
    refuses_and_leaves(lambda x: vector_add(x, x, kernel) * 2, [x])
    assert not [str(w.message) for w in recwarn if "Dynamo" in str(w.message)]


def test_a_negated_view_gives_what_its_values_give(device):
    x = torch.randn(100, device=device)
    compiled = torch.compile(vector_add, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch._neg_view(-x), x), x + x)


def test_what_does_not_fit_is_refused_by_the_binding(device):
    compiled = torch.compile(vector_add, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"vector_add: .* one shape, got \[8, 1\] and \[8, 8\]"):
        compiled(torch.zeros(8, 1, device=device), torch.zeros(8, 8, device=device))
