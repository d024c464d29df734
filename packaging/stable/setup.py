"""vector_add as one wheel for many versions of torch and of Python, through the stable ABI.

    TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" pip install --no-build-isolation ./packaging/stable
"""

import os
import sys
from pathlib import Path

from setuptools import setup

os.chdir(Path(__file__).parent)
sys.path.insert(0, ".")
try:
    import torch

    import loader
except ImportError as error:
    sys.exit(f"{error}. This builds with the torch you have: give pip --no-build-isolation")

os.environ["CUDA_HOME"] = str(loader.cuda_home())  # torch reads it when it is imported below
from torch.utils.cpp_extension import BuildExtension, CUDAExtension  # noqa: E402

if not torch.cuda.is_available() and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
    sys.exit('no GPU here says what to build for: set TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"')

# Headers newer than this hide what an older torch does not have: 2.11 is the oldest that loads it.
TARGET = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA"]  # USE_CUDA: the stream
EXTENSION = CUDAExtension(
    "three_layers_stable._C",
    ["vector_add.cpp", str(loader.find_rung("vector_add", None).relative_to(loader.ROOT))],
    extra_compile_args={
        "cxx": ["-O2", "-g0", "-fvisibility=hidden", *TARGET],
        "nvcc": ["-O3", *loader.CUDA_FLAGS],
    },
    # torch's C++ library by name: some compilers link one of their own into the binary, and torch
    # cannot catch what that one throws.
    extra_link_args=["-Wl,-Bsymbolic", "-l:libstdc++.so.6"],
    extra_objects=[str(sorted(loader.cuda_home().glob("lib*/libcudart.so*"))[0])],
    py_limited_api=True,  # no part of Python but what is the same in all versions: here, none
)
EXTENSION.libraries.remove("cudart")  # linked by its path above

setup(
    name="three-layers-stable",
    version="0.1.0",
    packages=["three_layers_stable"],
    ext_modules=[EXTENSION],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # the tag in the wheel's name
    python_requires=">=3.11",
    install_requires=["torch>=2.11"],
)
