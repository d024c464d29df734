"""The kernels as an installable package, ``three_layers``: one compiled module an operator.

    TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" pip install --no-build-isolation ./packaging

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
# Elsewhere the last rung takes every input.
GENERAL = {
    "matmul_tc": "4_cp_async",
    "conv2d": "7_any_shape",
    "layer_norm_backward": "2_split_rows",
    "rms_norm_backward": "1_two_kernels",
}
OPS = os.environ.get("THREE_LAYERS_OPS", "").replace(",", " ").split() or loader.ops()


def sources(op: str) -> list[str]:
    """The kernel and the binding of an operator, relative to this folder."""
    files = loader.find_rung(op, GENERAL.get(op)), loader.find_binding(op)
    return [str(path.relative_to(loader.ROOT)) for path in files]


def extension(op: str) -> CUDAExtension:
    """``three_layers.<op>``: its TORCH_EXTENSION_NAME is ``<op>``, so its PyInit is its own."""
    # By its path, because pip's CUDA has libcudart.so.13 and no libcudart.so for -lcudart to find.
    cudart = sorted(loader.cuda_home().glob("lib*/libcudart.so*"))[0]
    made = CUDAExtension(
        f"{PACKAGE}.{op}",
        sources(op),
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
            sys.exit('no GPU here says what to build for: set TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"')
        super().run()
        built = {}
        for op in OPS:
            text = b"".join(Path(path).read_bytes() for path in sources(op))
            built[op] = {
                "rung": Path(sources(op)[0]).stem,
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
    ext_modules=[extension(op) for op in OPS],
    cmdclass={"build_ext": Build},
    python_requires=">=3.11",
    install_requires=[f"torch=={torch.__version__.partition('+')[0]}"],  # C++ of one version only
)
