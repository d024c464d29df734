"""What the loader saves: this kit's load() and plain torch load(), side by side, in one run.

    python tests/bench_loader.py            (two cores: taskset -c 0,1 python tests/bench_loader.py)

Builds vector_add both ways in an empty cache. Plain load() gets the binding as most tutorials write
it, with torch/extension.h. Needs no GPU; with one, the result is checked and calls are timed too.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
KERNEL = ROOT / "kernels" / "vector_add" / "1_naive.cu"


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def verified(module) -> None:
    """The answer is right (where it can run): what a learner waits for."""
    if torch.cuda.is_available():
        a = torch.randn(1 << 20, device="cuda")
        assert torch.equal(module.vector_add(a, a), a + a)


def in_fresh_process(code: str) -> float:
    """Seconds that ``code`` takes once torch is imported, the best of three."""
    code = (
        "import sys, time, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(3)]  # fmt: skip
    return min(float(run.stdout.split()[-1]) for run in runs)


def call_microseconds(function, *arguments) -> float:
    """CPU time of one call, the median of 25 batches: small ones, which never fill the queue."""
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(400):
            function(*arguments)
        times.append((time.perf_counter() - start) / 400)
    return statistics.median(times) * 1e6


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "cache")
    import loader

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", loader.arch_list())
    toolkit = loader.cuda_home()
    os.environ["CUDA_HOME"] = str(toolkit)
    from torch.utils import cpp_extension

    binding = (ROOT / "bindings" / "vector_add.cpp").read_text()
    lean = re.compile(r"#include <(ATen/core|ATen/ops|torch/csrc)/.*>\n")
    (folder / "binding.cpp").write_text("#include <torch/extension.h>\n" + lean.sub("", binding))
    (folder / "kernel.cu").write_text(KERNEL.read_text())
    (folder / "mine.cu").write_text(KERNEL.read_text())
    # pip's toolkit needs help that plain load() does not give: a libcudart.so to link with
    cudart = next(iter(sorted(toolkit.glob("lib*/libcudart.so*"))))
    (folder / "libcudart.so").symlink_to(cudart)
    (folder / "plain").mkdir()
    half = [flag for flag in loader.CUDA_FLAGS if flag.startswith("-U")]

    def plain():
        verified(
            cpp_extension.load(
                "plain_vector_add",
                [str(folder / "binding.cpp"), str(folder / "kernel.cu")],
                extra_cuda_cflags=["-O3", *half],
                extra_ldflags=[f"-L{folder}"],
                build_directory=str(folder / "plain"),
            )
        )

    def ours():
        verified(loader.load("vector_add", folder / "mine.cu", backend="cuda"))

    def edit(name: str, block: int):
        text = KERNEL.read_text().replace("BLOCK = 256", f"BLOCK = {block}")
        (folder / name).write_text(text)

    rows = [("first build", seconds(ours), seconds(plain))]
    edits = []
    for block in (128, 512, 64):
        edit("mine.cu", block)
        edits.append(seconds(ours))
    edit("kernel.cu", 128)
    rows.append(("edit the kernel, load again", statistics.median(edits), seconds(plain)))
    rows.append(("nothing changed, load again", seconds(ours), seconds(plain)))
    once = "import loader; loader.load('vector_add', {!r}, backend='cuda')"
    cached = in_fresh_process(once.format(str(folder / "mine.cu")))
    rows.append(("cached, in a fresh process", cached, None))

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{gpu}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores")
    print(f"{'':<30}{'loader':>10}{'plain load()':>14}{'ratio':>8}")
    for name, mine, theirs in rows:
        plain_load = f"{theirs:>12.2f} s{theirs / mine:>7.1f}x" if theirs else ""
        print(f"{name:<30}{mine:>8.2f} s{plain_load}")
    if torch.cuda.is_available():
        a = torch.randn(1024, device="cuda")
        module = loader.load("vector_add")
        arms = {"torch.add": torch.add, "bound op": module.vector_add}
        times = {name: call_microseconds(f, a, a) for _ in range(3) for name, f in arms.items()}
        for name, time_us in times.items():
            print(f"one call of {name:<18}{time_us:>8.2f} us{time_us / times['torch.add']:>12.2f}x")


if __name__ == "__main__":
    main()
