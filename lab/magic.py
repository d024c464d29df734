"""``%load_ext lab``: cells that are rungs, and errors without the frames that led to them."""

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

import loader
from lab import child, overlay
from lab.benchmark import BenchError
from lab.checker import CheckError
from lab.diagnose import explain, warnings
from lab.occupancy import occupancy
from lab.pictures import picture_of_errors
from lab.sanitizer import Finding
from lab.table import Table

THREADS = 256  # a block, to state an occupancy; what it will be, only the launch decides


def kernel(line: str, cell: str) -> None:
    """``%%kernel op/name``: compile this cell's CUDA C++ as the rung ``name`` of ``op``."""
    _build(line, cell, "kernel")


def binding(line: str, cell: str) -> None:
    """``%%binding op/name``: compile this cell as the binding of the rung ``name``.

    If no ``%%kernel`` cell has that name, it is linked with the last rung.
    """
    _build(line, cell, "binding")


def _build(line: str, cell: str, layer: str) -> None:
    op, _, rung = line.strip().partition("/")
    if not rung:
        raise UsageError(f"%%{layer} needs an operator and a name: %%{layer} vector_add/my_rung")
    child.start()  # it gets ready while the compiler works
    overlay.write(op, rung, layer, cell)
    build = overlay.load(op, rung).build
    display(build_table(build, overlay.find(op, rung)))
    print(*(f"\n{warning}" for warning in warnings(build)), sep="\n", end="")


def build_table(build: loader.Build, files: overlay.Files) -> Table:
    """What a build cost, and what it made of ``files``."""
    own = {files.kernel.name, files.binding.name if files.binding else f"{build.op}.cpp"}
    made = ", ".join(name for name in build.compiled if name in own) or "nothing"
    cached = ", ".join(name for name in build.cached if name in own)
    title = f"{build.op}/{files.name}: {build.seconds:.2f} s, compiled {made}"
    title += f"; from the cache: {cached}" if cached else ""
    columns = ["kernel", "registers", "spilled bytes", "shared bytes", "occupancy"]
    rows = []
    is_own = files.kernel.stem == files.name  # a %%binding cell alone is linked with a known rung
    for k in build.kernels if is_own else ():
        share = occupancy(k.registers, k.shared, k.arch, THREADS)
        spills = str(k.spill_stores + k.spill_loads)
        held = "unknown" if share is None else f"{share:.0%}"
        rows.append([k.name, str(k.registers), spills, str(k.shared), held])
    notes = [f"Occupancy: share of an SM's warps with {THREADS} threads a block."] * bool(rows)
    return Table(title, columns, rows, notes)


def _message(error: Exception) -> list[str]:
    """Stands in for the traceback: these errors are about the learner's code, not about ours."""
    is_compiler = isinstance(error, loader.CompileError)
    text = explain(error) if is_compiler else overlay.relabel(str(error))
    if isinstance(error, CheckError) and not hasattr(error, "was_shown"):
        error.was_shown = True  # IPython asks for the message more than once
        if picture := picture_of_errors(error.report):
            display(picture)
    return [f"{type(error).__name__}: {text}"]


QUIET = (loader.CompileError, loader.ToolchainError, CheckError, BenchError, child.Died,
         child.Failed, Finding)  # fmt: skip


def load(shell: InteractiveShell) -> None:
    """Add the magics to ``shell``, and start the process that checks will run in."""
    shell.register_magic_function(kernel, "cell")
    shell.register_magic_function(binding, "cell")
    for error in QUIET:
        error._render_traceback_ = _message
    child.start()


def unload(shell: InteractiveShell) -> None:
    """Take back what ``load`` changed."""
    for name in ("kernel", "binding"):
        shell.magics_manager.magics["cell"].pop(name, None)
    for error in QUIET:
        del error._render_traceback_
    child.stop()
