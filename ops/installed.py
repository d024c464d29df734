"""Builds that ``packaging/`` installed, and whether they fit what lies here."""

import hashlib
import importlib
import re
import types
import warnings

import torch

import loader


def installed(op: str, rung: str | None = None) -> types.ModuleType | None:
    """``three_layers.<op>`` or ``three_layers.<op>_<rung>``; None where there is none that fits.

    It fits if it is of this rung and was built from the very kernel and binding that lie here, for
    this torch and this GPU (``sm_90a``, if the rung needs what only Hopper has). One that is out of
    date is left alone, with a warning that says why.
    """
    try:
        package = importlib.import_module("three_layers")
    except ImportError:
        return None
    kernel = loader.find_rung(op, rung)
    names = [n for n in (op, f"{op}_{kernel.stem}") if n in package.BUILT]
    name = next((n for n in names if package.BUILT[n]["rung"] == kernel.stem), None)
    if name is None:
        return None
    built = package.BUILT[name]
    here = hashlib.sha256(kernel.read_bytes() + loader.find_binding(op).read_bytes()).hexdigest()
    why = ""
    if built["sources"] != here:
        why = f"it was built from another {kernel.name} or {op}.cpp than lie here"
    elif built["torch"] != torch.__version__:
        why = f"it was built for torch {built['torch']}, and this is {torch.__version__}"
    elif torch.cuda.is_available():
        gpu = torch.cuda.get_device_capability()
        hopper = gpu[0] == 9 and "FEAT_SM90_ALL" in kernel.read_text()
        if not any(runs_on(gpu, arch) for arch in built["arch"]):
            why = f"it was built for {', '.join(built['arch'])}, and this GPU is sm_%d%d" % gpu
        elif hopper and "sm_90a" not in built["arch"]:
            why = f"it was built for {', '.join(built['arch'])}, and {kernel.stem} needs sm_90a"
    if why:
        folder = package.__path__[0]
        warnings.warn(f"{folder} is not used for {name}: {why}. Install it again.", stacklevel=3)
        return None
    return importlib.import_module(f"three_layers.{name}")


def runs_on(gpu: tuple[int, int], arch: str) -> bool:
    """Whether a GPU, as (9, 0), runs code for ``arch``, as ``"sm_90a"`` or ``"compute_80"``.

    Machine code (sm) runs on its own major version from there on, PTX (compute) on all newer ones;
    code that ends in "a" on one chip alone.
    """
    kind, major, minor, one_chip = re.fullmatch(r"(\w+)_(\d+)(\d)(\w?)", arch).groups()
    built = int(major), int(minor)
    newer = built <= gpu and (kind == "compute" or built[0] == gpu[0])
    return built == gpu or (newer and not one_chip)
