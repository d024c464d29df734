"""The kernels as an installable package, ``three_layers``: a compiled module for each rung in use.

    TORCH_CUDA_ARCH_LIST="8.0;9.0a" pip install --no-build-isolation ./packaging

``kernels``, ``bindings`` and ``loader.py`` in this folder are links to those of the repository, so
both routes build the same files, with the same flags but for the host's -O3. README.md explains the
rest.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from setuptools import setup

os.chdir(Path(__file__).parent)  # all paths below are relative to here: an sdist wants that
sys.path.insert(0, ".")
try:
    import torch

    import loader
except ImportError as error:  # pip builds in an empty environment unless it is told not to
    sys.exit(f"{error}. This is built for the torch you have: give pip --no-build-isolation")

os.environ["CUDA_HOME"] = str(loader.cuda_home())  # torch reads it when it is imported below
from torch.utils.cpp_extension import BuildExtension, CUDAExtension  # noqa: E402

PACKAGE = Path("three_layers")
# Where ops/ chooses among rungs. The first takes every input; elsewhere the last one does.
RUNGS = {
    "conv2d": ["7_any_shape", "8_tiles", "9_wgmma", "10_resident", "11_im2col"],
    "layer_norm": ["10_any_row", "6_short_rows", "4_vectorized", "7_ahead", "8_in_order"],
    "layer_norm_backward": [
        "2_split_rows", "4_short_rows", "5_in_flight", "6_clusters", "7_any_address",
    ],  # fmt: skip
    "matmul_tc": ["4_cp_async", "10_epilogue"],
    "rms_norm": ["5_any_row", "2_registers", "3_ahead"],
    "rms_norm_backward": ["1_two_kernels", "3_short_rows", "2_in_flight", "4_clusters"],
    "softmax": ["9_any_row", "7_short_rows", "8_in_order"],
    "softmax_backward": ["4_any_row", "3_short_rows"],
}
OPS = os.environ.get("THREE_LAYERS_OPS", "").replace(",", " ").split() or loader.ops()


def modules() -> dict[str, tuple[str, str]]:
    """The name of each module, its operator and its rung; the general rung is plain ``<op>``."""
    found = {}
    for op in OPS:
        general, *others = RUNGS.get(op, loader.rungs(op)[-1:])
        found[op] = op, general
        found |= {f"{op}_{rung}": (op, rung) for rung in others}
    return found


def sources(op: str, rung: str) -> list[str]:
    """The kernel and the binding of a module, relative to this folder."""
    files = loader.find_rung(op, rung), loader.find_binding(op)
    return [str(path.relative_to(loader.ROOT)) for path in files]


def extension(name: str, op: str, rung: str) -> CUDAExtension:
    """``three_layers.<name>``: its TORCH_EXTENSION_NAME is ``<name>``, its PyInit is its own."""
    # By its path, because pip's CUDA has libcudart.so.13 and no libcudart.so for -lcudart to find.
    cudart = sorted(loader.cuda_home().glob("lib*/libcudart.so*"))[0]
    made = CUDAExtension(
        f"{PACKAGE}.{name}",
        sources(op, rung),
        # All that is hidden or "symbolic" keeps the operators, and their rungs, out of each other.
        extra_compile_args={
            "cxx": ["-O2", "-g0", "-fvisibility=hidden", "-fno-gnu-unique"],  # Python asks for -g
            "nvcc": ["-O3", *loader.CUDA_FLAGS],  # has -Xcompiler -fvisibility=hidden
        },
        extra_link_args=["-Wl,-Bsymbolic"],
        extra_objects=[str(cudart)],
    )
    made.libraries.remove("cudart")
    return made


class Build(BuildExtension):
    """Also writes down what was built, and from what, for whoever imports it."""

    def run(self) -> None:
        if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            sys.exit('no GPU here says what to build for: set TORCH_CUDA_ARCH_LIST="8.0;9.0a"')
        super().run()
        built = {}
        for name, (op, rung) in modules().items():
            text = b"".join(Path(path).read_bytes() for path in sources(op, rung))
            built[name] = {
                "rung": rung,
                "sources": hashlib.sha256(text).hexdigest(),
                "torch": torch.__version__,
                "arch": architectures(),
            }
        folder = PACKAGE if self.inplace else Path(self.build_lib, PACKAGE)
        (folder / "built.json").write_text(json.dumps(built, indent=1) + "\n")


def architectures() -> list[str]:
    """What was compiled for: ``["sm_80", "sm_90a", "compute_90a"]``; the last is PTX."""
    from torch.utils import cpp_extension

    flags = cpp_extension._get_cuda_arch_flags()
    return [flag.rpartition("code=")[2] for flag in flags]


setup(
    name="three-layers",
    version="0.1.0",
    description="CUDA operators for PyTorch, one compiled module each",
    packages=[str(PACKAGE)],
    ext_modules=[extension(name, *of) for name, of in modules().items()],
    cmdclass={"build_ext": Build},
    python_requires=">=3.11",
    install_requires=[f"torch=={torch.__version__.partition('+')[0]}"],  # C++ of one version only
)
