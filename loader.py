"""Build one rung of one operator at run time and return it as a Python module.

    kernel = loader.load("vector_add", "1_naive")
    out = kernel.vector_add(a, b)

A rung is ``kernels/<op>/<n>_<idea>.cu``, linked with ``bindings/<op>.cpp``. Where no folder
``kernels`` lies beside this file, ``load("scale")`` builds ``scale.cu`` and ``scale.cpp`` there.
Shell: ``python loader.py doctor | list | build [op [rung]] | clean``

``torch.utils.cpp_extension.load()`` compiles, each time in a new scratch folder. Objects are kept
under a hash of all that went into them: source, headers, flags, torch, Python, compilers. So an
edited kernel costs one call of nvcc, nothing stale is ever run, and a build that fails, is killed
or meets another one leaves nothing behind that matters.
"""

import argparse
import contextlib
import difflib
import fcntl
import functools
import hashlib
import importlib.util
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent
FORMAT = "6"  # part of every hash: raise it when the way of building changes
DEFAULT_ARCH = "9.0a"  # compiled for where there is no GPU to ask
KEEP_DAYS = 30
# torch switches the operators of __half off; a plain nvcc call has them. No -O3: it is for the host
# code alone, which launches and no more; the GPU's code is at -O3 without it.
CUDA_FLAGS = shlex.split(
    "-lineinfo -Xptxas -v --threads 0 -Xcompiler -Wall,-Wextra,-fvisibility=hidden "
    "-U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__ "
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"
)
# -Og compiles a binding faster than -O1, and a call takes 0.1 us longer; with -O0, 1.4 us longer.
CXX_FLAGS = ["-Og", "-Wall", "-Wextra", "-fvisibility=hidden"]
# All rungs define the same launcher: -Bsymbolic makes each library call its own. libtorch_python
# needs torch's other libraries, so that naming it is enough: reading their symbols takes 0.3 s.
LD_FLAGS = ["-shared", "-Wl,-Bsymbolic,--no-as-needed", "-ltorch_python"]

# Stands in for both compilers: puts the real files in place of torch's stubs, and keeps what torch
# and ninja throw away: command, messages, headers. The last argument is always the output.
WRAPPER = """#!/bin/sh
for arg; do
  shift
  out=$arg
  case $arg in
    */kernel*.cu) is_kernel=1 arg={kernel};;
    */binding.cpp) is_binding=1 arg={binding};;
    -ltorch|-ltorch_c*|-lc10*) continue;;
  esac
  set -- "$@" "$arg"
done
if [ "$is_kernel" ]; then set -- {kernel_compiler} "$@"
elif [ "$is_binding" ]; then set -- {cxx} "$@"
else set -- {cxx} "$@" {own_flags}; fi
exec > "$out.log" 2>&1
echo "+ $*"
"$@" || {{ status=$?; rm -f "$out"; exit $status; }}
if [ -f "$out.d" ]; then cp "$out.d" "$out.tmp" && mv "$out.tmp" "$out.deps"; fi
"""
NOISE = re.compile(r"^(\+ |ptxas info| +\d+ bytes stack frame).*\n", re.MULTILINE)  # in logs

HINTS = {  # for what compilers and Python say and do not explain
    "unsupported GNU version|packs not expanded": "This g++ is too new for nvcc: try CXX=g++-13.",
    r"cu(sparse|blas|solver)\w*\.h: No": "Include c10/cuda/CUDAStream.h, not CUDAContext.h.",
    "AT_CHECK|AT_ASSERT|DeprecatedTypeProp|no member named .data.":
        "This is gone from torch: write TORCH_CHECK, t.scalar_type() and t.data_ptr<T>().",
    "data_ptr(<|I)long|data_ptrI[lm]E": "Write data_ptr<int64_t>(): long differs by platform.",
    "No space left on device": "The disk is full. `python loader.py clean` empties the cache.",
    "Killed|out of memory": "A compiler ran out of memory. MAX_JOBS=1 runs one at a time.",
    "module export function": "The binding must say PYBIND11_MODULE(TORCH_EXTENSION_NAME, m).",
    r"TORCH_LIBRARY\(\w+\) is": "Restart Python to load the new version, or register in Python.",
    "invalid ELF|file too short|file format not recognized|file truncated":
        "A file in the cache is damaged. load(…, force=True) builds it again.",
    "three-layers-compiler: Permission denied|failed to map segment":
        "The cache is on a disk mounted noexec: set TORCH_EXTENSIONS_DIR to another folder.",
}  # fmt: skip


class ToolchainError(RuntimeError):
    """This machine cannot build: a compiler is missing or does not match. Says what to do."""


class CompileError(RuntimeError):
    """A source did not compile, link or load. ``output`` is all that was said about it, ``log``
    the file with it, ``sources`` the files that failed."""

    def __init__(self, message: str, output: str, log: Path, sources: Sequence[Path]):
        super().__init__(message, output, log, sources)  # all, for multiprocessing sends them on
        self.output, self.log, self.sources = output, log, list(sources)

    def __str__(self) -> str:
        lines = [line[:500] for line in NOISE.sub("", self.output).splitlines()]
        if len(lines) > 60:
            lines[60:] = [f"… {len(lines) - 60} more lines"]
        hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, self.output)]
        return "\n".join([self.args[0], "", *lines, "", *hints, f"(whole output: {self.log})"])


class Kernel(NamedTuple):
    """What ptxas reports of one kernel: registers per thread; all else in bytes."""

    name: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    stack: int


class Build(NamedTuple):
    """How a module came to be. ``compiled`` and ``cached`` are file names."""

    op: str
    rung: str
    backend: str
    seconds: float
    compiled: tuple[str, ...]
    cached: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    log: Path  # commands and messages of the compilers, also for what was cached
    library: Path

    def __str__(self) -> str:
        how = f"compiled {', '.join(self.compiled)}" if self.compiled else "nothing to compile"
        text = f"{self.op}/{self.rung} ({self.backend}): {self.seconds:.2f} s, {how}"
        for k in self.kernels:
            spills = f", {k.spill_stores + k.spill_loads} B of spills" if k.spill_stores else ""
            text += f"\n  {k.name}: {k.registers} registers, {k.shared} B shared{spills}"
        return text


def ops() -> list[str]:
    """The operators that can be built."""
    return sorted(_ladders())


def rungs(op: str) -> list[str]:
    """The rungs of ``op`` from first to last: ``["1_naive", …]``. LookupError: no such op."""
    return [path.stem for path in _pick("there is no operator", op, _ladders())]


def _ladders() -> dict[str, list[Path]]:
    """The kernel files of each operator, from the first rung to the last."""
    layered, ladders = (ROOT / "kernels").is_dir(), {}
    for path in ROOT.glob("kernels/*/[!.]*.cu" if layered else "[!.]*.cu"):  # editors leave .#x.cu
        ladders.setdefault(path.parent.name if layered else path.stem, []).append(path)
    for files in ladders.values():  # 2 before 10, and names without a number last
        files.sort(key=lambda p: (int(re.match(r"\d*", p.stem)[0] or sys.maxsize), p.stem))
    return ladders


def find_rung(op: str, rung: str | int | os.PathLike | None) -> Path:
    """The kernel file of a rung, named as for ``load()``. LookupError: there is none."""
    if str(rung).endswith(".cu"):
        if not Path(rung).is_file():
            raise LookupError(f"there is no kernel file {rung}")
        return Path(rung).resolve()
    files = _pick("there is no operator", op, _ladders())
    for path in files:
        if str(rung) in path.stem.split("_", 1):  # its number or its idea
            return path
    names = {path.stem: path for path in files}
    return files[-1] if rung is None else _pick(f"{op} has no rung", str(rung), names)


def find_binding(op: str) -> Path:
    """The C++ file of an operator. LookupError: there is none."""
    path = (ROOT / "bindings" if (ROOT / "kernels").is_dir() else ROOT) / f"{op}.cpp"
    if not path.is_file():
        raise LookupError(f"{op} has no binding: write {path}")
    return path


def _pick(complaint: str, name: str, choices: dict):
    if name in choices:
        return choices[name]
    close = "".join(f"Did you mean {n!r}? " for n in difflib.get_close_matches(name, choices, 1))
    raise LookupError(f"{complaint} {name!r}. {close}There is: {', '.join(choices)}.")


def default_backend() -> str:
    """``"cuda"`` where there is a GPU, else ``"simt"``, the CPU machine, if simt/ is there."""
    has_simt = (ROOT / "simt" / "__init__.py").exists()
    return "simt" if has_simt and not torch.cuda.is_available() else "cuda"


def _toolchain(backend: str, check: bool, flags: Sequence[str]) -> types.SimpleNamespace:
    """What a build needs beside its sources: what ``simt.settings()`` returns, or the same for
    nvcc, and cxx, home (of CUDA), arch ("" for the CPU machine). ``key`` is a hash of all that
    every object depends on."""
    cxx, home, arch, attach = _cxx(), None, "", None
    tools = {"sources": [], "include_paths": [], "cflags": [], "ldflags": [], "identity": "",
             "own_flags": []}  # fmt: skip
    if backend == "cuda":
        home, arch = cuda_home(), arch_list()
        tools["kernel_compiler"] = [f"{home}/bin/nvcc", "-ccbin", cxx]
    elif backend != "simt":
        raise ValueError(f"backend must be 'cuda', 'simt' or None, got {backend!r}")
    elif not (ROOT / "simt").is_dir():
        raise ToolchainError(f"backend='simt' needs the folder {ROOT / 'simt'}")
    else:
        sys.path += [] if str(ROOT) in sys.path else [str(ROOT)]
        simt = importlib.import_module("simt")
        attach, tools = simt.attach, tools | simt.settings(check)
        if strange := [flag for flag in flags if not flag.startswith(("-D", "-U", "-I"))]:
            raise ValueError(f"the CPU machine takes flags like -DNAME=1 only, got {strange}")
        for toolkit in sorted(_toolkits(), key=lambda found: found[3])[:1]:  # for its headers
            tools["include_paths"] = [*tools["include_paths"], f"{toolkit[0]}/include"]
    if " " in torch.__file__ or (arch and " " in str(home)):
        raise ToolchainError(
            f"there is a space in the path of torch ({torch.__file__}) or of CUDA ({home}), and "
            "torch does not quote its own paths. Move the Python environment to another folder."
        )
    # A "unique" symbol, as of a static in a template, would be shared by all libraries. And g++
    # is a tenth faster when it does not tidy its memory each time that it needs more.
    gnu = [] if "clang" in Path(cxx).name else ["-fno-gnu-unique", "--param=ggc-min-expand=400"]
    tools["cflags"] = [*CXX_FLAGS, *gnu, *tools["cflags"]]
    # Some g++ link libstdc++ statically: a second one beside torch's, and printing numbers crashes.
    loaded = re.findall(r"/\S*/libstdc\+\+\.so\S*", Path("/proc/self/maps").read_text())[:1]
    tools["ldflags"] = [*LD_FLAGS, *loaded, *tools["ldflags"]]
    tools |= {"cxx": cxx, "home": home, "arch": arch, "cuda_flags": CUDA_FLAGS}
    compilers = [Path(path).resolve() for path in (cxx, tools["kernel_compiler"][0])]
    stamps = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in compilers]
    variables = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "C_INCLUDE_PATH",
                 "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")  # fmt: skip
    stamps += [(name, os.environ.get(name)) for name in variables]
    # Not what differs by `check`: a binding is the same whether its kernel is watched or not.
    shared = {k: tools[k] for k in tools if k not in ("kernel_compiler", "sources", "own_flags")}
    key = _hash(FORMAT, sys.implementation.cache_tag, torch.__version__, torch.version.git_version,
                torch.__file__, shared, stamps)  # fmt: skip
    return types.SimpleNamespace(**tools, attach=attach, flags=list(flags), key=key)


def _toolkits() -> list[tuple[Path, str, str, str]]:
    """CUDA toolkits, the preferred first: (home, where found, version, what is wrong or "")."""
    homes = [(home, "CUDA_HOME") for home in [os.environ.get("CUDA_HOME")] if home]
    homes += [(home, "pip") for p in sys.path for home in sorted(Path(p).glob("nvidia/cu*"))]
    nvcc = shutil.which("nvcc")
    homes += [(Path(nvcc).resolve().parents[1], "nvcc on PATH")] if nvcc else []
    homes += [("/usr/local/cuda", "the usual place")]
    found = {}
    for home, where in homes:
        home = Path(home).resolve()
        has_nvcc, header = (home / "bin" / "nvcc").exists(), home / "include" / "cuda.h"
        text = header.read_text() if header.exists() else ""
        number = int((re.search(r"#define CUDA_VERSION (\d+)", text) or [0, 0])[1])
        version, problem = f"{number // 1000}.{number % 1000 // 10}", ""
        if not has_nvcc or not number:
            problem = "has no bin/nvcc and include/cuda.h"
        elif torch.version.cuda and version.split(".")[0] != torch.version.cuda.split(".")[0]:
            problem = f"is CUDA {version}, and this torch is built for CUDA {torch.version.cuda}"
        if has_nvcc or where == "CUDA_HOME":
            found.setdefault(home, (home, where, version, problem))
    return list(found.values())


def cuda_home() -> Path:
    """The CUDA toolkit that builds. ToolchainError: none here fits torch."""
    version = torch.version.cuda
    if version is None:
        raise ToolchainError(
            f"this torch ({torch.__version__}) is a CPU build and cannot load CUDA kernels. "
            "Install one with CUDA (pip install -r requirements.txt), or use backend='simt'."
        )
    if usable := [home for home, _, _, problem in _toolkits() if not problem]:
        return usable[0]
    seen = "".join(f"\n  {home} ({where}) {problem}" for home, where, _, problem in _toolkits())
    raise ToolchainError(
        f"there is no CUDA compiler for torch {torch.__version__} (CUDA {version}).{seen}\nInstall "
        f"one: {sys.executable} -m pip install 'cuda-toolkit[nvcc,cccl]=={version}.*'"
    )


def _variable(name: str) -> str:
    """Of the environment, not while a build in another thread has its own there."""
    with _one_at_a_time:
        return os.environ.get(name, "")


def _cxx() -> str:
    wanted = _variable("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return os.path.abspath(path)
    if wanted:
        raise ToolchainError(f"CXX={wanted} is no program on PATH; one name, without arguments")
    raise ToolchainError("there is no C++ compiler. Install one: apt-get install g++")


def _ninja() -> str:
    """pip puts ninja beside python, and that folder need not be on PATH in a Jupyter kernel."""
    places = [str(Path(sys.executable).parent), f"{sys.prefix}/bin", os.environ.get("PATH", "")]
    if found := shutil.which("ninja", path=os.pathsep.join(places)):
        return found
    raise ToolchainError(f"there is no ninja. Install it: {sys.executable} -m pip install ninja")


def arch_list() -> str:
    """What to compile for, in torch's spelling: TORCH_CUDA_ARCH_LIST, else the GPUs here."""
    gpus = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    archs = _variable("TORCH_CUDA_ARCH_LIST").replace(";", " ").split()
    if archs in ([], ["native"]):
        # From Hopper on, instructions of one chip alone (wgmma, setmaxnreg) need the "a".
        names = [f"{major}.{minor}{'a' * (major >= 9)}" for major, minor in sorted(gpus)]
        return ";".join(names) or DEFAULT_ARCH
    listed, missed = ";".join(archs), set(gpus)
    for arch in archs:
        if wrong := re.fullmatch(r"(?:sm_?|compute_)?(\d+)(\d)(a?(?:\+PTX)?)", arch):
            right = f"{wrong[1]}.{wrong[2]}{wrong[3]}"
            raise ToolchainError(f"TORCH_CUDA_ARCH_LIST={listed}: torch spells {arch} {right}")
        if not (parts := re.fullmatch(r"(\d+)\.(\d+)(a?)(\+PTX)?", arch)):
            if not re.match("[A-Z]", arch):
                raise ToolchainError(f"TORCH_CUDA_ARCH_LIST={listed}: {arch} is no architecture")
            return listed  # names like Hopper: torch knows them
        built, one_chip, ptx = (int(parts[1]), int(parts[2])), parts[3], parts[4]
        for gpu in gpus:  # code runs on its own major version, PTX on everything newer
            newer = built <= gpu and (ptx or built[0] == gpu[0])
            if built == gpu or (newer and not one_chip):
                missed.discard(gpu)
    if missed:
        add = ", ".join(f"{major}.{minor}" for major, minor in sorted(missed))
        raise ToolchainError(f"TORCH_CUDA_ARCH_LIST={listed} makes no code for the GPU here: every "
                             f"launch would fail. Unset it, or add {add}.")  # fmt: skip
    return listed


def cache_folder() -> Path:
    """The first of $TORCH_EXTENSIONS_DIR, ~/.cache and the temporary folder that can be used.

    Raises ToolchainError if none can.
    """
    folder = _choose_cache_folder()
    for name in ("objects", "libraries", "locks", "scratch", "logs"):  # if somebody deleted them
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@functools.cache
def _choose_cache_folder() -> Path:
    home, problems = os.environ.get("XDG_CACHE_HOME") or "~/.cache", ""
    places = os.environ.get("TORCH_EXTENSIONS_DIR"), home
    for place in filter(None, (*places, f"{tempfile.gettempdir()}/three_layers-{os.getuid()}")):
        folder = Path(os.path.abspath(os.path.expanduser(place))) / "three_layers"
        if re.search(r"[~$:|\n]", str(folder)):  # there is no home, or ninja would not take it
            continue
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError("it belongs to another user")
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            problems += f"\n  {folder}: {error}"
    raise ToolchainError(
        f"no folder can hold compiled kernels. Set TORCH_EXTENSIONS_DIR to one of yours.{problems}"
    )


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _write(path: Path, text: str) -> None:
    """Another process sees the old file or the new one, never half of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _object_name(path: Path, op: str, tools: types.SimpleNamespace) -> tuple[str, str]:
    """(hash of a source and how it is compiled, hash of that and the headers it had last time)."""
    how = [tools.kernel_compiler, tools.flags] if path.suffix == ".cu" else []
    if str(path) in tools.sources:  # the CPU machine's own serve all operators
        how, op = tools.own_flags, ""
    source = _hash(tools.key, op, how, path, path.read_bytes())
    known = cache_folder() / "objects" / f"{source}.headers"
    headers = known.read_text().splitlines() if known.exists() else []
    return source, _hash(source, *(os.path.isfile(h) and Path(h).read_bytes() for h in headers))


def _record(op: str, names: Iterable[str]) -> Path:
    """The file that holds the name of the library linked from the objects ``names``."""
    return cache_folder() / "libraries" / _hash(op, *names)


def _own_headers(deps: Path, path: Path, tools: types.SimpleNamespace) -> list[str]:
    """The headers that the compiler says it read, less those that a version number stands for."""
    listed = deps.read_text().replace("\\\n", " ").partition(": ")[2].replace("$$", "$")
    names = [re.sub(r"\\(.)", r"\1", name) for name in re.findall(r"(?:\\.|\S)+", listed)]
    known = [Path(torch.__file__).parent, Path("/usr"), Path(sys.base_prefix), ROOT / "simt"]
    known += [tools.home] if tools.home else [Path(folder) for folder in tools.include_paths]
    found = {os.path.abspath(deps.parent / name) for name in names} - {str(path)}
    own = [h for h in found if not any(Path(h).is_relative_to(k) for k in known)]
    return sorted(h for h in own if os.path.isfile(h) and Path(h).parent != deps.parent)  # no stubs


def _names(sources: Iterable[Path], tools: types.SimpleNamespace) -> tuple[str, ...]:
    """What to call files in front of people: those of simt/ are none of their business."""
    own = set(tools.sources)
    return tuple(dict.fromkeys("the CPU machine" if str(p) in own else p.name for p in sources))


@contextlib.contextmanager
def _heartbeat(doing: Callable[[], str]) -> Iterator[None]:
    """After 2, 6, 14, 30 … seconds, say on stderr that work goes on, and which."""
    done, start = threading.Event(), time.monotonic()

    def beat() -> None:
        delay = 2
        while not done.wait(delay):
            print(f"{doing()}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            delay *= 2

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _build(op: str, sources: Sequence[Path], tools, force: bool = False) -> set[Path]:
    """Compile the sources whose object is not in the cache, link all, store all.

    Returns the sources compiled. Nothing is stored of a source that was edited meanwhile.
    """
    store, start = cache_folder() / "objects", time.time()
    scratch = Path(tempfile.mkdtemp(prefix=f"{op}-", dir=cache_folder() / "scratch"))
    wrapper, kernel, *_ = sources
    stems = {wrapper: "binding", kernel: "kernel.cuda"}
    objects = {path: _object_name(path, op, tools) for path in sources}
    names = {  # of objects in the store: the log is stored last
        path: name
        for path, (_, name) in objects.items()
        if (store / f"{name}.log").exists() and not force
    }
    stored = [store / f"{name}.o" for name in names.values()]
    made = {p: scratch / f"{stems.get(p, p.stem)}.o" for p in sources if p not in names}

    def is_done(path: Path) -> bool:
        return Path(f"{made[path]}.deps").exists()

    def progress() -> str:
        busy = ", ".join(_names((path for path in made if not is_done(path)), tools))
        return f"building {op}/{kernel.stem}: {f'compiling {busy}' if busy else 'linking'}"

    def keep() -> None:
        for path in filter(is_done, made):
            headers = _own_headers(Path(f"{made[path]}.deps"), path, tools)
            _write(store / f"{objects[path][0]}.headers", "\n".join(headers))
            source, name = _object_name(path, op, tools)
            edited = any(start < os.stat(h).st_mtime <= time.time() for h in headers)
            if source == objects[path][0] and not edited:
                made[path].replace(store / f"{name}.o")
                Path(f"{made[path]}.log").replace(store / f"{name}.log")
                names[path] = name

    try:
        try:
            with _heartbeat(progress):
                linked = _torch_load(op, wrapper, kernel, made, stored, scratch, tools)
        finally:
            keep()  # the binding need not be compiled again when the kernel is mended
        if len(names) == len(sources):
            record = _record(op, (names[path] for path in sources))
            library = record.with_name(f"{scratch.name}.so")
            logs = [(store / f"{names[path]}.log").read_bytes() for path in sources]
            library.with_suffix(".log").write_bytes(b"".join(logs))
            linked.replace(library)
            _write(record, library.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _prune()
    return set(made)


def _prune() -> None:
    """Delete what was neither read nor written for long."""
    for path in cache_folder().glob("*/*"):
        days = 1 if path.parent.name == "scratch" else KEEP_DAYS  # left by a killed process
        with contextlib.suppress(OSError):
            stat = path.stat()
            if max(stat.st_atime, stat.st_mtime) < time.time() - days * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


logging.getLogger("torch.utils.cpp_extension").addFilter(  # CUDA_HOME is set below
    lambda record: "No CUDA runtime is found" not in record.getMessage()
)


def _torch_load(op: str, wrapper: Path, kernel: Path, made: dict[Path, Path], stored: list[Path],
                scratch: Path, tools: types.SimpleNamespace) -> Path:  # fmt: skip
    """Compile the sources of ``made``, link them with ``stored``, return the library."""
    compiler = scratch / "three-layers-compiler"
    compiler.write_text(WRAPPER.format(
        kernel_compiler=shlex.join([*tools.kernel_compiler, *tools.flags]),
        kernel=shlex.quote(str(kernel)), binding=shlex.quote(str(wrapper)),
        cxx=shlex.quote(tools.cxx), own_flags=shlex.join(tools.own_flags),
    ))  # fmt: skip
    compiler.chmod(0o755)
    # torch gets stubs: it would call op.cpp and op.cu both op.o on the CPU machine, and its ninja
    # file does not survive every character of a path.
    stubs = {wrapper: scratch / "binding.cpp", None: scratch / "nothing_to_compile.cpp"}
    stubs[kernel] = scratch / ("kernel.cu" if tools.arch else "kernel.cuda.cu")
    for stub in stubs.values():
        stub.touch()
    inputs = [stubs.get(path, path) for path in made] or [stubs[None]]
    if tools.arch:  # pip's toolkit has libcudart.so.13, and not the name the linker looks for
        for library in sorted(tools.home.glob("lib*/libcudart.so*"))[:1]:
            (scratch / "libcudart.so").symlink_to(library)
    places = [str(scratch), str(Path(_ninja()).parent), os.environ.get("PATH", "")]
    settings = {  # the compiler by name: torch would split a path at its spaces
        "PATH": os.pathsep.join(places), "CXX": compiler.name, "PYTORCH_NVCC": compiler.name,
        "TORCH_CUDA_ARCH_LIST": tools.arch, "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES": "0",
        "TORCH_DONT_CHECK_COMPILER_ABI": "1",  # it would run the stand-in
        "CC": None,  # torch would give nvcc a second -ccbin
    }  # fmt: skip
    from torch.utils import cpp_extension  # late: a cached load does without its 0.2 s

    home = cpp_extension.CUDA_HOME
    _replaced.update({name: os.environ.get(name) for name in settings})
    _set_environment(settings)
    cpp_extension.CUDA_HOME = tools.home and str(tools.home)
    try:
        # "Standalone" makes torch return the path of what it linked: the extension's name stays
        # out of the objects, and nothing is imported under a name that was used before. The
        # name is new each time, so that torch never believes there is nothing to do.
        library = cpp_extension.load(
            name=scratch.name, sources=[str(path) for path in inputs],
            extra_cflags=[f"-DTORCH_EXTENSION_NAME={op}", *tools.cflags],
            extra_cuda_cflags=tools.cuda_flags, extra_include_paths=tools.include_paths,
            extra_ldflags=[shlex.quote(str(path)) for path in stored] + tools.ldflags
            + [f"-L{shlex.quote(str(scratch))}"],
            build_directory=str(scratch), with_cuda=bool(tools.arch),
            is_python_module=False, is_standalone=True,
        )  # fmt: skip
        return Path(library)
    except ValueError as error:  # torch does not know the architecture
        raise ToolchainError(f"TORCH_CUDA_ARCH_LIST={tools.arch}: {error}") from None
    except RuntimeError as error:
        logs = {p: Path(f"{o}.log") for p, o in made.items() if not Path(f"{o}.deps").exists()}
        failed = [path for path, log in logs.items() if log.exists()]  # others did not begin
        said = [logs[path] for path in failed] or scratch.glob(f"{scratch.name}.log")
        output = "".join(log.read_text(errors="replace") for log in said) or str(error)
        log = cache_folder() / "logs" / f"{op}-{kernel.stem}.log"
        with contextlib.suppress(OSError):  # the disk may be full
            log.write_text(output)
        names = ", ".join(path.name for path in failed)
        what = f"{names} did not compile:" if failed else f"{op} did not link:"
        raise CompileError(what, output, log, failed) from None
    finally:
        _set_environment(_replaced)
        _replaced.clear()
        cpp_extension.CUDA_HOME = home


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@functools.cache
def _kernels(log: Path) -> tuple[Kernel, ...]:
    """What ``ptxas -v`` said, an entry for each kernel and architecture."""
    entry = re.compile(r"Compiling entry function '(.+?)' for '(\w+)'(.*?)(?=Compiling|\Z)", re.S)
    wanted = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads",
              r"(\d+) bytes smem", r"(\d+) bytes stack frame")  # fmt: skip
    found = entry.findall(log.read_text(errors="replace"))
    mangled = [name for name, *_ in found]
    names = _output("c++filt", "--no-params", *mangled).splitlines() if found else []
    return tuple(
        Kernel(name, arch, *(int((re.search(p, report) or [0, 0])[1]) for p in wanted))
        for name, (_, arch, report) in zip(names or mangled, found, strict=True)
    )


def _output(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


# torch takes its settings from the environment, which all threads share: one loads at a time.
_one_at_a_time = threading.RLock()
_replaced: dict[str, str | None] = {}  # what was in the environment before the build that runs


def _after_fork() -> None:
    """In a child: a thread of the parent, which is not here, may be building."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    _set_environment(_replaced)


os.register_at_fork(after_in_child=_after_fork)
_loaded: dict[Path, types.ModuleType] = {}
_registered: dict[str, Path] = {}  # TORCH_LIBRARY namespace → the library that registered it


def load(op: str, rung: str | int | os.PathLike | None = None, backend: str | None = None,
         force: bool = False, verbose: bool = False, *, check: bool = False,
         binding: str | os.PathLike | None = None, flags: Sequence[str] = (),
         ) -> types.ModuleType:  # fmt: skip
    """Build one rung, unless nothing that it depends on has changed, and return the module.

    Args:
        op: the operator: a folder of ``kernels/``.
        rung: its name, number or idea, or the path of a ``.cu`` file; the last rung for None.
        backend: ``"cuda"``, ``"simt"`` (the CPU machine), or None for the one that runs here.
        force, verbose: compile everything again; print the compilers' commands and messages.
        check: on the CPU machine: watch every memory access and every barrier.
        binding: another C++ file in place of ``bindings/<op>.cpp``.
        flags: more flags for the kernel's compiler. TORCH_CUDA_ARCH_LIST says what to build for.

    Returns the extension module; ``.build`` tells how it was built. Other rungs and earlier
    versions that are still held keep running their own code. Raises CompileError if a source does
    not compile, link or load, ToolchainError if this machine cannot build, LookupError if there is
    no such operator, rung or binding.
    """
    start = time.perf_counter()
    backend = backend or default_backend()
    if not str(op).isidentifier() or not str(op).isascii():
        raise ValueError(f"op must be a name that Python and C accept, got {op!r}")
    if isinstance(flags, str):
        raise ValueError(f"flags must be a list, got the string {flags!r}")
    arch = re.compile(r"--?(gpu-)?(arch(itecture)?|code|gencode|generate-code)\b")
    if any(map(arch.match, flags)):
        raise ValueError(f"set TORCH_CUDA_ARCH_LIST; flags cannot name an architecture: {flags}")
    if wrong := [flag for flag in flags if re.match(r"-I(?!/)", flag)]:
        raise ValueError(f"folders in flags must be absolute, got {wrong}")
    kernel = find_rung(op, rung)
    wrapper = Path(binding).resolve() if binding else find_binding(op)
    if not wrapper.is_file() or wrapper.suffix == ".cu":
        raise LookupError(f"there is no C++ file {wrapper} to bind {op} with")
    with _one_at_a_time:
        tools = _toolchain(backend, check, flags)
        sources = [wrapper, kernel, *map(Path, tools.sources)]

        def find() -> Path:
            record = _record(op, (_object_name(path, op, tools)[1] for path in sources))
            return record.with_name(record.read_text() if record.exists() else "none.so")

        path = cache_folder() / "locks" / _hash(tools.key, op, wrapper, kernel)
        with open(path, "w") as lock, contextlib.ExitStack() as stack:  # free if its process dies
            with _heartbeat(lambda: f"{op}/{kernel.stem} is being built by somebody else; waiting"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # also for a child forked meanwhile
            builds = [_build(op, sources, tools, force)] if force else []
            while not (library := find()).exists():  # again if a source is edited meanwhile
                builds.append(_build(op, sources, tools))
            compiled = set().union(*builds)
        log = library.with_suffix(".log")
        output = log.read_text(errors="replace") if builds else ""
        if verbose:
            print(output, end="")
        elif "warning" in NOISE.sub("", output):
            print(NOISE.sub("", output), end="", file=sys.stderr)
        if library not in _loaded:
            module = _import(op, library, wrapper, kernel)
            _loaded[library] = tools.attach(module, check) if tools.attach else module
        module = _loaded[library]
    names = [_names((p for p in sources if (p in compiled) == d), tools) for d in (True, False)]
    seconds = time.perf_counter() - start
    module.build = Build(op, kernel.stem, backend, seconds, *names, _kernels(log), log, library)
    return module


def _import(op: str, library: Path, binding: Path, kernel: Path) -> types.ModuleType:
    """Import under a name never used before: Python and pybind11 both remember names."""
    # torch aborts the process when a namespace is registered again. TORCH_LIBRARY(mine, m) leaves
    # the symbol TORCH_LIBRARY_static_init_mine, a fragment TORCH_LIBRARY_FRAGMENT_…_mine_0.
    registers = b"TORCH_LIBRARY_" in library.read_bytes()
    symbols = _output("nm", "-C", str(library)) if registers else ""
    symbol = re.compile(r"TORCH_LIBRARY_(FRAGMENT_)?static_init_(\w+?)(?(1)_\d+)$", re.MULTILINE)
    namespaces = [name for _, name in symbol.findall(symbols)]
    try:
        for namespace in namespaces:
            if _registered.get(namespace, library) != library:
                raise ImportError(f"TORCH_LIBRARY({namespace}) is registered in this process")
        name = f"{library.stem}.{op}"  # Python calls PyInit_<what follows the last dot>
        spec = importlib.util.spec_from_file_location(name, library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        _registered.update(dict.fromkeys(namespaces, library))
        return module
    except ImportError as error:
        why = f"{op} was built and cannot be loaded:"
        if missing := re.search(r"undefined symbol: (\S+)", str(error)):
            wanted = _output("c++filt", missing[1]) or missing[1]
            symbols = _output("nm", "-C", "--defined-only", str(library)).splitlines()
            symbols = {line.split(" ", 2)[2] for line in symbols if wanted.split("(")[0] in line}
            defined = sorted(name for name in symbols if "[clone" not in name)
            why = (
                f"{binding.name} calls `{wanted}`, which {kernel.name} does not define; "
                f"it defines: {', '.join(defined) or 'nothing of that name'}. "
                'Make declaration and definition the same, both with extern "C".'
            )
        log = library.with_suffix(".log")
        raise CompileError(why, str(error), log, [binding, kernel]) from None


def doctor() -> bool:
    """Print what this machine has for building kernels, and what to do about the rest.

    Returns True if kernels can be built here.
    """
    fine, backend = True, default_backend()

    def gpu() -> str:
        if not torch.cuda.is_available():
            raise ToolchainError("none that torch can use")
        return torch.cuda.get_device_name()

    for name, describe in (
        ("python", lambda: f"{sys.version.split()[0]} ({sys.executable})"),
        ("torch", lambda: f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        ("gpu", gpu),
        ("g++", lambda: _output(_cxx(), "--version").partition("\n")[0]),
        ("ninja", lambda: f"{_ninja()} {_output(_ninja(), '--version')}"),
        ("nvcc", lambda: f"{cuda_home()}/bin/nvcc, for {arch_list()}"),
        ("cache", lambda: f"{cache_folder()}"),
        ("backend", lambda: f"{backend}, toolchain {_toolchain(backend, False, ()).key}"),
    ):
        try:
            print(f"ok   {name:<8} {describe()}")
        except (ToolchainError, OSError) as error:
            needed = name != "gpu" and (name != "nvcc" or backend == "cuda")
            fine = fine and not needed
            print(f"{'FAIL' if needed else '-   '} {name:<8} {error}")
    for home, where, version, problem in _toolkits():
        print(f"     {home} ({where}): {problem or f'CUDA {version}, usable'}")
    return fine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the kernels of this project.")
    parser.add_argument("command", choices=["doctor", "list", "build", "clean"])
    parser.add_argument("op", nargs="?")
    parser.add_argument("rung", nargs="?")
    parser.add_argument("--backend", choices=["cuda", "simt"])
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.command == "doctor":
            return 0 if doctor() else 1
        if options.command == "clean":
            for path in cache_folder().glob("[ol]*/*"):  # not scratch/: others may be building
                path.unlink(missing_ok=True)
            return 0
        for op in [options.op] if options.op else ops():
            for rung in [options.rung] if options.rung else rungs(op):
                if options.command == "list":
                    print(f"{op}/{rung}")
                else:
                    print(load(op, rung, options.backend, options.force, options.verbose).build)
    except (CompileError, ToolchainError, LookupError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
