"""Build one rung of one operator at run time and return it as a Python module.

    import loader
    kernel = loader.load("vector_add", "1_naive")
    out = kernel.vector_add(a, b)

A rung is one CUDA file, ``kernels/<op>/<n>_<idea>.cu``, linked with ``bindings/<op>.cpp``. This file
also works alone, copied into another project: without a ``kernels`` folder beside it,
``load("scale")`` builds ``scale.cu`` and ``scale.cpp`` from the folder it lies in.

``torch.utils.cpp_extension.load()`` and ninja do the compiling. What is added here: every build runs
in a scratch folder of its own, and its objects are kept under a name made from all that went into
them (source, headers, flags, torch, CUDA, architecture, compiler, Python). So an edited kernel costs
one call of nvcc, nothing stale is ever run, and a build that fails, is killed or meets another one
leaves nothing behind that matters.

Shell: ``python loader.py doctor | list | build [op [rung]] | clean``
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent
FORMAT = "1"  # part of every cache key: raise it when the way of building changes
DEFAULT_ARCH = "9.0a"  # compiled for where there is no GPU to ask
KEEP_DAYS = 30

# torch switches the operators of __half off; a plain nvcc call has them.
CUDA_FLAGS = shlex.split(
    "-O3 -lineinfo -Xptxas -v --threads 0 -Xcompiler -Wall,-Wextra,-fvisibility=hidden "
    "-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ "
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"
)
CXX_FLAGS = ["-O1", "-Wall", "-Wextra", "-fvisibility=hidden"]
# All rungs define the same launcher: -Bsymbolic makes each library call its own. -lstdc++: a g++
# set up to link it statically would bring in a second one, which crashes when it prints a number.
LD_FLAGS = ["-shared", "-Wl,-Bsymbolic", "-ltorch_python", "-lstdc++"]

# Stands in for the compilers during a build, and keeps what torch and ninja throw away: the command,
# the messages and the dependency file of each object.
WRAPPER = """#!/bin/sh
for arg; do
  shift
  case $arg in *.cu) kernel=1 arg={kernel};; esac
  [ "$last" = -o ] && out=$arg
  last=$arg
  set -- "$@" "$arg"
done
if [ "$kernel" ]; then set -- {kernel_compiler} "$@"; else set -- {cxx} "$@"; fi
echo "$*" > "$out.command"
"$@" > "$out.log" 2>&1
status=$?
cat "$out.log"
[ -f "$out.d" ] && cp "$out.d" "$out.deps"
exit $status
"""

HINTS = {  # what compilers say and do not explain
    r"unsupported GNU version|parameter packs not expanded": "This g++ is too new for this nvcc: "
    "install an older one and set CXX to it, for example CXX=g++-13.",
    r"cu(sparse|blas|solver)\w*\.h: No such file": "ATen/cuda/CUDAContext.h wants the whole toolkit; "
    "c10/cuda/CUDAStream.h and CUDAGuard.h do not.",
    r"AT_CHECK|AT_ASSERTM?\b|DeprecatedTypeProperties|no member named .data.": "This is gone from "
    "torch: write TORCH_CHECK, t.scalar_type() and t.data_ptr<T>().",
    r"data_ptr(<|I)(long|l)\b|data_ptrI[lm]E": "Write data_ptr<int64_t>(): long differs by platform.",
    r"No space left on device": "The disk is full. `python loader.py clean` empties the cache.",
    r"Killed|out of memory": "A compiler ran out of memory. MAX_JOBS=1 runs one at a time.",
}


class ToolchainError(RuntimeError):
    """This machine cannot build: a compiler is missing or does not match. Says what to do."""


class CompileError(RuntimeError):
    """A source did not compile, link or load. The message holds what the compiler said.

    ``output`` is all that it said, ``log`` the file with it, ``sources`` the files that failed.
    """

    def __init__(self, message: str, output: str, log: Path, sources: Sequence[Path]):
        hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, output)]
        super().__init__("\n".join([message, *hints, f"(whole output: {log})"]))
        self.output, self.log, self.sources = output, log, list(sources)


@dataclass(frozen=True)
class Kernel:
    """What ptxas reports of one kernel: registers per thread; all else in bytes."""

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    stack: int


@dataclass(frozen=True)
class Build:
    """How a module came to be. ``compiled`` and ``cached`` are file names."""

    op: str
    rung: str
    backend: str
    seconds: float
    compiled: tuple[str, ...]
    cached: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    log: Path  # what the compilers printed, warnings included, also for cached objects
    library: Path

    def __str__(self) -> str:
        how = f"compiled {', '.join(self.compiled)}" if self.compiled else "nothing to compile"
        lines = [f"{self.op}/{self.rung} ({self.backend}): {self.seconds:.2f} s, {how}"]
        for k in self.kernels:
            spills = f", {k.spill_stores + k.spill_loads} B of spills" if k.spill_stores else ""
            lines.append(f"  {k.name}: {k.registers} registers, {k.shared} B shared{spills}")
        return "\n".join(lines)


# ---- which files -------------------------------------------------------------------------------


def ops() -> list[str]:
    """The operators that can be built."""
    if (ROOT / "kernels").is_dir():
        return sorted(p.name for p in (ROOT / "kernels").iterdir() if any(p.glob("*.cu")))
    return sorted(p.stem for p in ROOT.glob("*.cu"))


def rungs(op: str) -> list[str]:
    """The rungs of ``op`` from first to last: ``["1_naive", "2_grid_stride", …]``."""
    return [path.stem for path in _rung_files(op)]


def _rung_files(op: str) -> list[Path]:
    if op not in ops():
        raise LookupError(f"there is no operator {op!r} in {ROOT}. {_suggest(op, ops())}")
    if not (ROOT / "kernels").is_dir():
        return [ROOT / f"{op}.cu"]
    number = re.compile(r"\d*")
    files = (ROOT / "kernels" / op).glob("*.cu")
    return sorted(files, key=lambda p: (int(number.match(p.stem)[0] or 10**9), p.stem))


def _find_rung(op: str, rung: str | int | os.PathLike | None) -> Path:
    if str(rung).endswith(".cu"):
        if not Path(rung).is_file():
            raise LookupError(f"there is no kernel file {rung}")
        return Path(rung).resolve()
    files = _rung_files(op)
    for path in files:
        if rung is None or str(rung) in (path.stem, *path.stem.split("_", 1)):
            return path if rung is not None else files[-1]
    raise LookupError(f"{op} has no rung {rung!r}. {_suggest(str(rung), [p.stem for p in files])}")


def _find_binding(op: str) -> Path:
    path = (ROOT / "bindings" if (ROOT / "kernels").is_dir() else ROOT) / f"{op}.cpp"
    if not path.exists():
        raise LookupError(f"{op} has a kernel but no binding: write {_short(path)}")
    return path


def _suggest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return (f"Did you mean {close[0]!r}? " if close else "") + f"There is: {', '.join(names)}."


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ---- which compilers ---------------------------------------------------------------------------


@functools.cache
def _toolkits() -> list[tuple[Path, str, str, str]]:
    """CUDA toolkits, the preferred one first: (home, where found, version, what is wrong or "")."""
    candidates = [(os.environ.get("CUDA_HOME"), "CUDA_HOME")]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        candidates += [(p.parents[1], "pip") for p in sorted(Path(folder).glob("cu*/bin/nvcc"))]
    nvcc = shutil.which("nvcc")
    candidates += [(nvcc and Path(nvcc).resolve().parents[1], "nvcc on PATH")]
    candidates += [("/usr/local/cuda", "the usual place")]
    found = {}
    for home, where in candidates:
        if not home or not (where == "CUDA_HOME" or (Path(home) / "bin/nvcc").exists()):
            continue
        home = Path(home).resolve()
        header = home / "include" / "cuda.h"
        text = header.read_text() if header.exists() else ""
        number = int((re.search(r"#define CUDA_VERSION (\d+)", text) or [0, 0])[1])
        version = f"{number // 1000}.{number % 1000 // 10}"
        problem = ""
        if not (home / "bin" / "nvcc").exists() or not number:
            problem = "has no bin/nvcc and include/cuda.h"
        elif torch.version.cuda and version.split(".")[0] != torch.version.cuda.split(".")[0]:
            problem = f"is CUDA {version}, and this torch is built for CUDA {torch.version.cuda}"
        found.setdefault(home, (home, where, version, problem))
    return list(found.values())


def _cuda_home() -> Path:
    if torch.version.cuda is None:
        raise ToolchainError(
            f"this torch ({torch.__version__}) is a CPU build and cannot load CUDA kernels. Install "
            "one with CUDA (pip install -r requirements.txt), or use backend='simt'."
        )
    for home, _, _, problem in _toolkits():
        if not problem:
            return home
    seen = "".join(f"\n  {home} ({where}) {problem}" for home, where, _, problem in _toolkits())
    raise ToolchainError(
        f"there is no CUDA compiler for torch {torch.__version__} (CUDA {torch.version.cuda}).{seen}"
        f"\nInstall one: {sys.executable} -m pip install 'cuda-toolkit[nvcc,cccl]=="
        f"{torch.version.cuda}.*'"
    )


def _cxx() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise ToolchainError("there is no C++ compiler. Install one: apt-get install g++")


def _ninja() -> str:
    """pip puts ninja beside python, and that folder need not be on PATH in a Jupyter kernel."""
    places = [str(Path(sys.executable).parent), str(Path(sys.prefix) / "bin")]
    if found := shutil.which("ninja", path=os.pathsep.join([*places, os.environ.get("PATH", "")])):
        return found
    raise ToolchainError(f"there is no ninja. Install it: {sys.executable} -m pip install ninja")


def _arch_list() -> str:
    """What to compile for, in torch's spelling: TORCH_CUDA_ARCH_LIST, else the GPUs here."""
    gpus = range(torch.cuda.device_count())
    gpus = sorted({torch.cuda.get_device_capability(i) for i in gpus})
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip().replace(" ", ";")
    if listed in ("", "native"):
        # From Hopper on, instructions of one chip alone (wgmma, setmaxnreg) need the "a".
        names = [f"{major}.{minor}{'a' * (major >= 9)}" for major, minor in gpus]
        return ";".join(names) or DEFAULT_ARCH
    covered = set()
    for arch in listed.split(";"):
        if wrong := re.fullmatch(r"(?:sm_?|compute_)?(\d+)(\d)(a?(?:\+PTX)?)", arch):
            right = f"{wrong[1]}.{wrong[2]}{wrong[3]}"
            raise ToolchainError(f"TORCH_CUDA_ARCH_LIST={listed}: torch spells {arch} {right}")
        if not (numbers := re.match(r"(\d+)\.(\d+)(a?)(\+PTX)?", arch)):
            return listed  # names like Hopper: torch knows them
        built = int(numbers[1]), int(numbers[2])
        for gpu in gpus:  # code runs on its own major version, PTX on everything newer
            newer = built[0] == gpu[0] or numbers[4]
            if built == gpu or (not numbers[3] and newer and built <= gpu):
                covered.add(gpu)
    if left := [f"{major}.{minor}" for major, minor in gpus if (major, minor) not in covered]:
        raise ToolchainError(
            f"TORCH_CUDA_ARCH_LIST={listed} makes no code for the GPU here ({', '.join(left)}): "
            f"every launch would fail. Unset it, or add {left[0]}."
        )
    return listed


def _simt() -> types.ModuleType:
    """The CPU machine, if it lies beside this file."""
    if not (ROOT / "simt").is_dir():
        raise ToolchainError(f"backend='simt' needs the folder simt/ beside {__file__}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module("simt")


def default_backend() -> str:
    """``"cuda"`` where there is a GPU, else ``"simt"``, the CPU machine, if simt/ is there."""
    has_simt = (ROOT / "simt" / "__init__.py").exists()
    return "simt" if has_simt and not torch.cuda.is_available() else "cuda"


@dataclass(frozen=True)
class Toolchain:
    """What a build needs beside its sources. ``key`` stands for all of it in cache keys."""

    cxx: str
    kernel_compiler: list[str]
    home: Path | None  # of the CUDA toolkit; the CPU machine reads its headers only
    arch: str  # "" for the CPU machine
    sources: list[Path]
    include_paths: list[str]
    cxx_flags: list[str]
    cuda_flags: list[str]
    ld_flags: list[str]
    key: str


def _toolchain(backend: str, check: bool, flags: Sequence[str]) -> Toolchain:
    def identity(program: str | Path) -> str:  # asking each for its version would cost 50 ms
        path = Path(program).resolve()
        return f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"

    cxx = _cxx()
    cxx_flags = CXX_FLAGS + ["-fno-gnu-unique"] * ("clang" not in Path(cxx).name)
    if backend == "cuda":
        home, arch, more = _cuda_home(), _arch_list(), {}
        kernel_compiler = [str(home / "bin" / "nvcc"), "-ccbin", cxx]
        about = identity(kernel_compiler[0])
    elif backend == "simt":
        more, arch = _simt().settings(check), ""
        home = next((home for home, *_ in _toolkits()), None)
        kernel_compiler, about = more["kernel_compiler"], more["identity"]
    else:
        raise ValueError(f"backend must be 'cuda', 'simt' or None, got {backend!r}")
    include_paths = list(more.get("include_paths", ()))
    include_paths += [str(home / "include")] if home and not arch else []
    cxx_flags, ld_flags = cxx_flags + more.get("cflags", []), LD_FLAGS + more.get("ldflags", [])
    key = _digest(
        FORMAT, sys.implementation.cache_tag, torch.__version__, str(torch.version.git_version),
        torch.__file__, identity(cxx), about, arch, home, backend, check, cxx_flags, CUDA_FLAGS,
        flags, ld_flags, include_paths,
    )  # fmt: skip
    sources = [Path(path) for path in more.get("sources", ())]
    cuda_flags = [*CUDA_FLAGS, *flags]
    return Toolchain(cxx, kernel_compiler, home, arch, sources, include_paths, cxx_flags,
                     cuda_flags, ld_flags, key)  # fmt: skip


# ---- the store ---------------------------------------------------------------------------------


def _digest(*parts: object) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hasher.update(b"%d:%s" % (len(data), data))
    return hasher.hexdigest()[:24]


@functools.cache
def cache_folder() -> Path:
    """The first of $TORCH_EXTENSIONS_DIR, ~/.cache and the temporary folder that can be used."""
    places = [
        os.environ.get("TORCH_EXTENSIONS_DIR"),
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        f"{tempfile.gettempdir()}/three_layers-{os.getuid()}",
    ]
    problems = []
    for place in filter(None, places):
        folder = Path(place).resolve() / "three_layers"
        try:
            for name in ("objects", "libraries", "locks", "scratch", "logs"):
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            with tempfile.TemporaryFile(dir=folder / "scratch"):
                return folder
        except OSError as error:
            problems.append(f"\n  {folder}: {error}")
    raise ToolchainError(
        "there is no place to keep compiled kernels in. Set TORCH_EXTENSIONS_DIR to a folder of "
        f"yours.{''.join(problems)}"
    )


def _write(path: Path, text: str) -> None:
    """Another process sees the old file or the new one, never half of it."""
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    scratch.write_text(text)
    scratch.replace(path)


def _prune() -> None:
    """Delete what was not used for a month."""
    oldest = time.time() - KEEP_DAYS * 86400
    for path in cache_folder().glob("*/*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class Source:
    """A file to compile. ``key``: it and the toolchain; ``object``: its headers too ("": unknown)."""

    path: Path
    key: str
    object: str


def _source(path: Path, tools: Toolchain) -> Source:
    key = _digest(tools.key, path, path.read_bytes())
    try:  # the headers that the compiler read the last time
        headers = json.loads((cache_folder() / "objects" / f"{key}.json").read_text())
        return Source(path, key, _digest(key, *(Path(h).read_bytes() for h in headers)))
    except (OSError, ValueError):
        return Source(path, key, "")


def _own_headers(deps: str, source: Path, tools: Toolchain) -> list[str]:
    """The headers in a make-style dependency list that no version number stands for."""
    names = deps.replace("\\\n", " ").split(": ", 1)[1]
    paths = {Path(re.sub(r"\\(.)", r"\1", n)) for n in re.findall(r"(?:\\.|\S)+", names)}
    known = [Path(torch.__file__).parent, Path("/usr"), Path(sys.base_prefix), ROOT / "simt"]
    known += [tools.home] if tools.home else []
    own = {p.resolve() for p in paths} - {source}
    return sorted(str(p) for p in own if not any(p.is_relative_to(k) for k in known))


# ---- building ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _heartbeat(what: Callable[[], str]) -> Iterator[None]:
    """From the second second on, say on stderr that work goes on, and which."""
    done, start = threading.Event(), time.monotonic()

    def beat() -> None:
        width = 0
        while not done.wait(1 if width else 2):
            line = f"{what()}, {time.monotonic() - start:.0f} s"
            print(f"\r{line:<{width}}", end="", file=sys.stderr, flush=True)
            width = max(width, len(line))
        if width:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _locked(name: str, what: str) -> Iterator[None]:
    """One build of a thing at a time on this machine. The lock of a dead process is free."""
    with open(cache_folder() / "locks" / name, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _heartbeat(lambda: f"{what} is being built by another process; waiting"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    """Set variables for a while; None unsets."""
    before = {name: os.environ.get(name) for name in values}

    def put(settings: dict[str, str | None]) -> None:
        for name, value in settings.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})

    put(values)
    try:
        yield
    finally:
        put(before)


_torch_load_lock = threading.Lock()  # torch takes its settings from the environment


def _torch_load(scratch: Path, op: str, inputs, objects, tools: Toolchain, kernel: Path) -> Path:
    """Compile ``inputs``, link them with ``objects``, return the library: torch's ``load()``."""
    compiler = scratch / "three-layers-compiler"
    compiler.write_text(
        WRAPPER.format(
            kernel=shlex.quote(str(kernel)),
            kernel_compiler=shlex.join(tools.kernel_compiler),
            cxx=shlex.quote(tools.cxx),
        )
    )
    compiler.chmod(0o755)
    ld_flags = [*(shlex.quote(str(path)) for path in objects), *tools.ld_flags]
    if tools.arch:  # pip's toolkit has libcudart.so.13, and not the name the linker looks for
        folders = [tools.home / "lib64", tools.home / "lib"]
        if not any((folder / "libcudart.so").exists() for folder in folders):
            for library in [path for f in folders for path in f.glob("libcudart.so.*")][:1]:
                (scratch / "libcudart.so").symlink_to(library)
        ld_flags += [f"-L{shlex.quote(str(folder))}" for folder in (scratch, *folders)]
    with _torch_load_lock, _environment(
        PATH=os.pathsep.join([str(scratch), str(Path(_ninja()).parent), os.environ["PATH"]]),
        CXX=compiler.name,  # by name: torch would split a path at its spaces
        PYTORCH_NVCC=compiler.name,
        CC=None,  # torch would give nvcc a second -ccbin
        TORCH_CUDA_ARCH_LIST=tools.arch,
        TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES=None,
        TORCH_DONT_CHECK_COMPILER_ABI="1",  # it would run the stand-in
    ):  # fmt: skip
        logger = logging.getLogger("torch.utils.cpp_extension")
        logger.addFilter(_not_about_cuda_home)
        from torch.utils import cpp_extension  # late: a cached load does without its 0.2 s

        cpp_extension.CUDA_HOME = tools.home and str(tools.home)
        # "Standalone" makes torch return the path of what it linked: the extension's name stays
        # out of the objects, and nothing is imported under a name that was used before. The name
        # is new each time, so that torch never believes there is nothing to do.
        return Path(
            cpp_extension.load(
                name=f"build_{uuid.uuid4().hex}",
                sources=[str(path) for path in inputs],
                extra_cflags=[f"-DTORCH_EXTENSION_NAME={op}", *tools.cxx_flags],
                extra_cuda_cflags=tools.cuda_flags,
                extra_ldflags=ld_flags,
                extra_include_paths=tools.include_paths,
                build_directory=str(scratch),
                with_cuda=bool(tools.arch),
                is_python_module=False,
                is_standalone=True,
            )
        )


def _not_about_cuda_home(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()


def _build(op: str, kernel: Path, sources: list[Source], tools: Toolchain, force: bool) -> tuple:
    """Compile what the store lacks, and link. Returns (library, sources compiled, commands)."""
    store = cache_folder() / "objects"
    stored = {s: store / f"{s.object}.o" for s in sources}
    made, inputs = {}, []
    scratch = Path(tempfile.mkdtemp(prefix=f"{op}-", dir=cache_folder() / "scratch"))
    for source in (s for s in sources if force or not stored[s].exists()):
        path, suffix = source.path, ".o"
        if path.suffix == ".cu" and tools.arch:
            suffix = ".cuda.o"
        elif path.suffix == ".cu":  # torch would call op.cu and op.cpp both op.o
            path = scratch / f"{path.stem}_kernel.cu"  # the wrapper puts the real path back
            path.touch()
        made[source] = scratch / f"{path.stem}{suffix}"
        inputs.append(path)
    if not inputs:  # all were compiled before, and never linked with each other
        inputs = [scratch / "nothing_to_compile.cpp"]
        inputs[0].touch()

    def progress() -> str:
        busy = ", ".join(s.path.name for s in made if not made[s].exists())
        return f"building {op}/{kernel.stem}: {f'compiling {busy}' if busy else 'linking'}"

    try:
        with _heartbeat(progress):
            try:
                ready = [stored[s] for s in sources if s not in made]
                linked = _torch_load(scratch, op, inputs, ready, tools, kernel)
            except RuntimeError as error:
                raise _compile_error(op, kernel, made, scratch, str(error)) from None
        logs, commands = [], ""
        for source in sources:
            text = stored[source].with_suffix(".log")
            if source in made:
                headers = Path(f"{made[source]}.deps").read_text()
                headers = _own_headers(headers, source.path, tools)
                name = _digest(source.key, *(Path(h).read_bytes() for h in headers))
                made[source].replace(store / f"{name}.o")
                text = Path(f"{made[source]}.log").replace(store / f"{name}.log")
                _write(store / f"{source.key}.json", json.dumps(headers))
                commands += Path(f"{made[source]}.command").read_text()
            logs.append(text.read_text(errors="replace"))
        library = cache_folder() / "libraries" / f"{op}-{uuid.uuid4().hex[:12]}.so"
        _write(library.with_suffix(".log"), "".join(logs))
        return linked.replace(library), list(made), commands
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile_error(op: str, kernel: Path, made: dict, scratch: Path, torch_says: str):
    failed = [source.path for source, path in made.items() if not path.exists()]
    logs = [Path(f"{path}.log") for path in made.values() if not path.exists()]
    logs = [path for path in logs if path.exists()] or list(scratch.glob("build_*.log"))
    output = "".join(path.read_text(errors="replace") for path in logs) or torch_says
    lines = [line for line in output.splitlines() if not line.startswith("ptxas info")]
    log = cache_folder() / "logs" / f"{op}-{kernel.stem}.log"
    _write(log, output)
    what = f"{', '.join(map(_short, failed))} did not compile" if failed else f"{op} did not link"
    more = [f"… {len(lines) - 60} more lines"] if len(lines) > 60 else []
    return CompileError("\n".join([f"{what}:\n", *lines[:60], *more, ""]), output, log, failed)


def _kernels(log: str) -> list[Kernel]:
    """What ``ptxas -v`` said, an entry for each kernel and architecture."""
    parts = log.split("Compiling entry function ")[1:]
    heads = [re.match(r"'(\S+)' for '(\S+)'", part).groups() for part in parts]
    names = "\n".join(name for name, _ in heads)
    if parts and shutil.which("c++filt"):
        command = ["c++filt", "--no-params"]
        names = subprocess.run(command, input=names, capture_output=True, text=True).stdout
    patterns = (
        r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads",
        r"(\d+) bytes smem", r"(\d+) bytes stack frame",
    )  # fmt: skip
    numbers = [[int((re.search(p, part) or [0, 0])[1]) for p in patterns] for part in parts]
    return [
        Kernel(name, arch, *found)
        for name, (_, arch), found in zip(names.splitlines(), heads, numbers, strict=True)
    ]


# ---- loading -----------------------------------------------------------------------------------

_loaded: dict[str, types.ModuleType] = {}
_registered: dict[str, str] = {}  # TORCH_LIBRARY namespace → the library that registered it


def load(
    op: str,
    rung: str | int | os.PathLike | None = None,
    backend: str | None = None,
    force: bool = False,
    verbose: bool = False,
    *,
    check: bool = False,
    binding: str | os.PathLike | None = None,
    flags: Sequence[str] = (),
) -> types.ModuleType:
    """Build one rung, unless nothing that it depends on has changed, and return the module.

    Args:
        op: the operator: a folder of ``kernels/``.
        rung: its name, number or idea, or the path of a ``.cu`` file; the last rung for None.
        backend: ``"cuda"``, ``"simt"`` (the CPU machine), or None for the one that runs here.
        force: compile everything again, whatever the cache holds.
        verbose: print the compilers' commands and all that they said.
        check: on the CPU machine: watch every memory access and every barrier.
        binding: another C++ file in place of ``bindings/<op>.cpp``.
        flags: more flags for the kernel's compiler. Architectures go in TORCH_CUDA_ARCH_LIST.

    Returns:
        The extension module; ``.build`` tells how it was built. Other rungs and earlier versions
        that are still held keep running their own code.

    Raises:
        CompileError: a source does not compile, link or load.
        ToolchainError: a compiler is missing or does not match torch.
        LookupError: there is no such operator or rung.
    """
    start = time.perf_counter()
    backend = backend or default_backend()
    if not op.isidentifier():
        raise ValueError(f"op must be a name that Python accepts, got {op!r}")
    if any("arch" in flag or "gencode" in flag for flag in flags):
        raise ValueError(f"set TORCH_CUDA_ARCH_LIST; flags cannot name an architecture: {flags}")
    kernel = _find_rung(op, rung)
    wrapper = Path(binding).resolve() if binding else _find_binding(op)
    tools = _toolchain(backend, check, flags)

    def look() -> tuple[list[Source], Path, dict]:
        found = [_source(path, tools) for path in (wrapper, kernel, *tools.sources)]
        name = _digest(tools.key, op, *(s.object for s in found))
        file = cache_folder() / "libraries" / f"{name}.json"
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(file.read_text())
            if all(s.object for s in found) and file.with_name(known["library"]).exists():
                return found, file, known
        return found, file, {}

    sources, record, known = look()
    compiled: list[Source] = []
    if force or not known:
        with _locked(_digest(*(s.key for s in sources)), f"{op}/{kernel.stem}"):
            sources, record, known = look()
            while force or not known:
                library, compiled, commands = _build(op, kernel, sources, tools, force)
                log = library.with_suffix(".log").read_text()
                before, (sources, record, _) = sources, look()
                if [s.key for s in before] != [s.key for s in sources]:
                    continue  # a source was edited while it was being compiled
                known = {"library": library.name, "kernels": [asdict(k) for k in _kernels(log)]}
                _write(record, json.dumps(known))
                _loaded.pop(record.stem, None)
                _report(commands, log, verbose)
                _prune()
                break
    library = record.with_name(known["library"])
    for path in (record, library, library.with_suffix(".log")):
        with contextlib.suppress(OSError):
            os.utime(path)  # in use, so not to be pruned
    if record.stem not in _loaded:
        try:
            module = _import(op, library, wrapper)
        except ImportError as error:
            raise _import_error(str(error), op, wrapper, kernel, library) from None
        _loaded[record.stem] = _simt().attach(module, check) if backend == "simt" else module
    module = _loaded[record.stem]
    cached = tuple(s.path.name for s in sources if s.path not in {c.path for c in compiled})
    module.build = Build(
        op, kernel.stem, backend, time.perf_counter() - start,
        tuple(s.path.name for s in compiled), cached,
        tuple(Kernel(**k) for k in known["kernels"]), library.with_suffix(".log"), library,
    )  # fmt: skip
    return module


def _report(commands: str, log: str, verbose: bool) -> None:
    if verbose:
        print(commands + log, end="")
    elif "warning" in log:
        lines = [line for line in log.splitlines() if not line.startswith("ptxas info")]
        print("\n".join(lines), file=sys.stderr)


def _import(op: str, library: Path, binding: Path) -> types.ModuleType:
    """Import under a name never used before: Python and pybind11 both remember names."""
    code = re.sub(r"//.*|/\*.*?\*/", "", binding.read_text(), flags=re.DOTALL)
    for namespace in re.findall(r"\bTORCH_LIBRARY\s*\(\s*(\w+)", code):
        if _registered.setdefault(namespace, library.name) != library.name:
            raise ImportError(f"TORCH_LIBRARY({namespace}) is registered in this process already")
    name = f"{library.stem}.{op}"  # Python calls PyInit_<what follows the last dot>
    spec = importlib.util.spec_from_file_location(name, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_error(text: str, op: str, binding: Path, kernel: Path, library: Path) -> CompileError:
    """Explain why a library that was linked cannot be loaded."""
    why = "If the file was damaged, load(…, force=True) builds it again."
    if "PyInit_" in text:
        why = f"In {_short(binding)}, write PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)."
    elif "TORCH_LIBRARY" in text:
        why = (
            "torch would abort. Restart Python to load the new version, or register the operator "
            "from Python, with torch.library."
        )
    elif missing := re.search(r"undefined symbol: (\S+)", text):

        def output(*command: str) -> str:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()

        wanted = output("c++filt", missing[1]) or missing[1]
        symbols = output("nm", "-C", "--defined-only", str(library)).splitlines()
        symbols = {line.split(" ", 2)[2] for line in symbols if wanted.split("(")[0] in line}
        why = (
            f"{_short(binding)} calls `{wanted}`, which {_short(kernel)} does not define; "
            f"it defines: {', '.join(sorted(symbols)) or 'nothing of that name'}. "
            'Make declaration and definition the same, both with extern "C".'
        )
    message = f"{op} was built and cannot be loaded. {why}\n({text})"
    return CompileError(message, text, library.with_suffix(".log"), [binding, kernel])


# ---- doctor and shell --------------------------------------------------------------------------


def doctor() -> bool:
    """Print what this machine has for building and running kernels, and what to do about the rest.

    Returns True if kernels can be built here.
    """
    fine = True

    def line(name: str, check: Callable[[], str], needed: bool = True) -> None:
        nonlocal fine
        try:
            mark, text = "ok  ", check()
        except (ToolchainError, OSError) as error:
            mark, text = "FAIL" if needed else "-   ", str(error)
            fine = fine and not needed
        print(f"{mark} {name:<12} {text}")

    def first_line(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]

    def gpu() -> str:
        if not torch.cuda.is_available():
            raise ToolchainError("none that torch can use; kernels compile, and run on simt/ only")
        gpus = range(torch.cuda.device_count())
        return ", ".join(torch.cuda.get_device_name(i) for i in gpus)

    def cache() -> str:
        size = sum(path.stat().st_size for path in cache_folder().glob("*/*")) / 1e6
        free = shutil.disk_usage(cache_folder()).free / 1e9
        return f"{cache_folder()} ({size:.0f} MB used, {free:.0f} GB free)"

    print(f"     {'python':<12} {sys.version.split()[0]} ({sys.executable})")
    print(f"     {'torch':<12} {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    line("gpu", gpu, needed=False)
    line("g++", lambda: first_line(_cxx(), "--version"))
    line("ninja", lambda: f"{_ninja()} {first_line(_ninja(), '--version')}")
    line("nvcc", lambda: str(_cuda_home() / "bin" / "nvcc"), needed=default_backend() == "cuda")
    for home, where, version, problem in _toolkits():
        print(f"     {'':<12} {home} ({where}): {problem or f'CUDA {version}, usable'}")
    line("compile for", _arch_list)
    line("cache", cache)
    print(f"     {'backend':<12} {default_backend()}")
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the kernels of this project.")
    parser.add_argument("command", choices=["doctor", "list", "build", "clean"])
    parser.add_argument("op", nargs="?")
    parser.add_argument("rung", nargs="?")
    parser.add_argument("--backend", choices=["cuda", "simt"])
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return 0 if doctor() else 1
    if options.command == "clean":
        shutil.rmtree(cache_folder())
        return 0
    try:
        for op in [options.op] if options.op else ops():
            for rung in [options.rung] if options.rung else rungs(op):
                if options.command == "list":
                    print(f"{op}/{rung}")
                else:
                    module = load(op, rung, options.backend, options.force, options.verbose)
                    print(module.build, flush=True)
    except (CompileError, ToolchainError, LookupError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
