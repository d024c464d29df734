"""A file of its own: it loads Dynamo, which takes seconds that only ``torch.compile`` is worth."""

from collections.abc import Callable

import torch


@torch.compiler.disable(
    reason="an operator of three_layers was given a kernel, which torch.compile cannot trace; "
    "with kernel=None it is a node of the graph"
)
def call(function: Callable, *args):
    return function(*args)
