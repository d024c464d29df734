"""The operators under ``torch.compile``: each call of a default kernel is one node of the graph.

Dynamo, which traces the Python code, cannot look into a kernel; it only knows ``torch.ops``. So
what a kernel's binding offers is registered there as well, as ``torch.ops.three_layers``, together
with what Dynamo has to know of the result. ``torch.autograd.Function`` it traces by itself.
"""

import types
from collections.abc import Callable

import torch
from torch.compiler import is_compiling


def opaque(schema: str, run: Callable, fake: Callable) -> None:
    """Registers ``torch.ops.three_layers.<name>``.

    Args:
        schema: as in ``"vector_add(Tensor a, Tensor b) -> Tensor"``.
        run: computes the result, which may not be one of the arguments. It is not looked into, so
            here is the place to choose a rung by sizes, strides and pointers.
        fake: makes an empty result: its shape, dtype and strides; of tensors that hold nothing.
    """
    name, brace, rest = schema.partition("(")
    operator = torch.library.custom_op(
        f"three_layers::{name}", run, mutates_args=(), schema=brace + rest
    )
    operator.register_fake(fake)


def in_graph() -> types.ModuleType | None:
    """While ``torch.compile`` traces: what stands in for a kernel. None in eager mode.

    There it is not wanted: it costs some 10 µs a call.
    """
    return torch.ops.three_layers if is_compiling() else None


def out_of_graph(function: Callable, *args):
    """``function(*args)``, where the graph ends and after which a new one begins."""
    return torch.compiler.disable(
        function,
        reason="an operator of three_layers was given a kernel, which torch.compile cannot trace; "
        "with kernel=None it is a node of the graph",
    )(*args)
