"""What Python adds to a module that was built for the CPU machine.

Its functions are wrapped: an error that the machine found is raised even if the binding ignored
it, Ctrl-C becomes KeyboardInterrupt, what kernels printed appears in the notebook, and with
``check=True`` the checker learns the exact extent of every tensor for the time of the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .report import Report


class Library:
    """The exported functions of one built library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)  # it is loaded already: this finds it, with its state
        self._library.simt_fault.restype = ctypes.c_char_p
        self._library.simt_output.restype = ctypes.c_char_p
        self._library.simt_output()  # from now on it keeps what kernels print for us

    def call_starts(self) -> None:
        self._library.simt_call_starts()

    def fault(self) -> str | None:
        """What the machine found during the call, in words."""
        text = self._library.simt_fault()
        return text.decode(errors="replace") if text else None

    def interrupted(self) -> bool:
        return bool(self._library.simt_interrupted())

    def output(self) -> str:
        """What kernels have printed since the last time."""
        return self._library.simt_output().decode(errors="replace")

    def watch(self, tensor: torch.Tensor, name: str) -> None:
        """Tells the checker that kernels may use this tensor: its elements, no byte beyond."""
        if tensor.numel() == 0 or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in strides)
        self._library.simt_watch(
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_size_t((last + 1) * tensor.element_size()),
            ctypes.c_size_t(tensor.element_size()),
            f"{name}{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}".encode(),
        )

    def forget(self) -> None:
        self._library.simt_forget()

    def counters(self) -> str:
        self._library.simt_counters.restype = ctypes.c_char_p
        return self._library.simt_counters().decode()

    def reset(self) -> None:
        self._library.simt_reset()


class WatchNewTensors(TorchDispatchMode):
    """Sees the tensors that a binding makes during a call: its results and its scratch space."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._library = library
        self._kept: list[torch.Tensor] = []  # so that their memory is not used again meanwhile

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Private to torch, which else imports Dynamo at the first call, to switch it off: 2 s.
        return False

    def __torch_dispatch__(self, function, types_, args=(), kwargs=None):  # noqa: ANN001, ANN204
        result = function(*args, **(kwargs or {}))
        name = f"the result of {function.__name__.split('.')[0]}"
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._kept.append(tensor)
                self._library.watch(tensor, name)
        return result


def tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an argument, with a name for each."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}[{i}]")


def argument_names(function: Callable) -> list[str]:
    """The names that a pybind11 function has given its arguments: its docstring shows them."""
    signature = (function.__doc__ or "").split("->")[0]
    return re.findall(r"(\w+): ", signature)


def wrap(function: Callable, library: Library, check: bool) -> Callable:
    names = argument_names(function)

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        named = [*zip([*names, *("argument",) * len(args)], args, strict=False), *kwargs.items()]
        found = [pair for name, value in named for pair in tensors(value, name)]
        for name, tensor in found:
            if tensor.is_cuda:  # the binding's own message would ask for a CUDA tensor
                raise RuntimeError(
                    f"{function.__name__}: {name} must be on the CPU, where the CPU machine "
                    f"(backend='simt') works, got {tensor.device}; pass {name}.cpu()"
                )
        library.call_starts()
        try:
            with contextlib.ExitStack() as stack:
                if check:
                    stack.callback(library.forget)
                    for name, tensor in found:
                        library.watch(tensor, name)
                    stack.enter_context(WatchNewTensors(library))
                result = function(*args, **kwargs)
        except RuntimeError:
            if library.interrupted():
                raise KeyboardInterrupt from None
            raise
        finally:
            sys.stdout.write(library.output())
        if library.interrupted():
            raise KeyboardInterrupt
        if fault := library.fault():
            raise RuntimeError(f"{function.__name__}: {fault}\n(The binding ignored this error.)")
        return result

    return call


def attach(module: types.ModuleType, check: bool) -> types.ModuleType:
    library = Library(module.__file__)
    for name, value in list(vars(module).items()):
        if isinstance(value, types.BuiltinFunctionType) and not name.startswith("_"):
            setattr(module, name, wrap(value, library, check))
    module.simt = Report(module.__name__.rpartition(".")[2], library, check)
    return module
