"""The operators of Three Layers, compiled: ``three_layers.vector_add.vector_add(a, b)``.

Each submodule is kernel and binding of one operator: tensors in and out, no gradients. Beside the
rung that takes every input, as ``three_layers.softmax``, lie those that are faster on some inputs,
as ``three_layers.softmax_7_short_rows``. ``BUILT`` says of each which rung it is and what it was
built from, for which torch and which GPUs.
"""

import json
from pathlib import Path

import torch  # noqa: F401  without its libraries in the process no submodule can be loaded

_built = Path(__file__).with_name("built.json")
if not _built.exists():
    raise ImportError(f"{_built.parent} is not built: python setup.py build_ext --inplace")
BUILT: dict[str, dict] = json.loads(_built.read_text())
