"""Is a rung right? Run it on every case of its operator and compare with float64.

For each case:
- the result is within the operator's tolerance of the reference (``compare.py`` says how judged);
- every element is written: new memory is filled with NaN first;
- no input has changed, nor the memory around a slice;
- nothing is written just past the end of a result;
- it works on a stream of its own, behind work that produces the inputs late (GPU only);
- it gives the same bits twice, where the operator promises that;
- the gradients are those of the reference, also for a gradient that arrives expanded, and
  ``torch.autograd.gradcheck`` agrees with them on small float64 cases.

On the CPU machine small cases run with every memory access watched; that finds every write that is
not the kernel's to make, and every read. From then on a rung that was caught is not run unwatched:
it could end the process, and take with it the line that was found.
"""

import contextlib
import importlib
import os
import re
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import loader
from lab import child, sanitizer
from lab.compare import Wrong, differences
from lab.hints import RUNTIME, hint
from lab.overlay import find, relabel
from lab.table import Table
from ops.common import Case

WATCHED = 1 << 12  # elements: the CPU machine watches every access up to here
CPU_ELEMENTS, CPU_FLOPS = 300_000, 1 << 28  # beyond, the CPU machine would take minutes
UNCACHED = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"  # nothing past a result's end
SANITIZED = 5000  # elements: compute-sanitizer slows a kernel down a hundredfold
GRADIENTS = 1 << 20  # elements
GRADCHECK = 128  # elements: it calls the operator twice for each
BYTES_AN_ELEMENT = 64  # a case, its float64 reference, and what comparing them takes
BLOCK, MARK = 512, 0xA5  # PyTorch's allocator rounds up to BLOCK bytes; see _mark_ends()
OUTSIDE = "not supported by this rung"  # what bindings say of a case that a rung refuses
STRAY = re.compile(r"illegal memory access|outside of|does not exist")  # what the CPU machine says


class CheckError(AssertionError):
    """A rung failed its check. ``report`` holds every case."""

    def __init__(self, report: "Report"):
        super().__init__(report.failure())
        self.report = report


@dataclass
class Result:
    """One case: ``status`` is passed, failed, outside (this rung's domain) or skipped."""

    case: str
    status: str
    error: float = 0.0
    tolerance: float = 0.0
    message: str = ""
    wrong: Wrong | None = None


@dataclass
class Report:
    """What a check found."""

    op: str
    rung: str
    backend: str
    results: list[Result] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)  # beside the values, what was looked at
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return bool(self.having("passed")) and not self.having("failed")

    def having(self, status: str) -> list[Result]:
        return [result for result in self.results if result.status == status]

    def table(self) -> Table:
        """A row for each dtype."""
        dtypes = dict.fromkeys(result.case.split()[0] for result in self.results)
        rows = []
        for dtype in dtypes:
            of = [result for result in self.results if result.case.split()[0] == dtype]
            run = [result for result in of if result.status in ("passed", "failed")]
            worst = max(run, key=lambda result: result.error, default=None)
            errors = [f"{worst.error:.1e}", f"{worst.tolerance:.1e}"] if worst else ["", ""]
            counts = [
                sum(result.status == status for result in of)
                for status in ("passed", "failed", "outside", "skipped")
            ]
            rows.append([dtype, *map(str, counts), *errors])
        where = "GPU" if self.backend == "cuda" else "CPU machine"
        verdict = "passed" if self.ok else "FAILED"
        notes = [f"also: {', '.join(self.tried)}"] * bool(self.tried)
        if outside := len(self.having("outside")):
            notes.append(f"{outside} cases lie outside this rung's domain: it refused them.")
        skipped = dict.fromkeys(result.message for result in self.having("skipped"))
        notes += [f"skipped: {message}" for message in skipped]
        return Table(
            f"{self.op}/{self.rung} {verdict} on the {where}, {self.seconds:.1f} s",
            ["dtype", "passed", "failed", "outside", "skipped", "worst error", "allowed"],
            rows,
            notes,
        )

    def failure(self) -> str:
        """What went wrong, in words: the first failing case in full, the others by name."""
        failed = self.having("failed")
        if not failed:
            return (
                f"{self.op}/{self.rung} refused every one of its {len(self.results)} cases, so "
                f"nothing was checked.\n{self.table()}"
            )
        first = failed[0]
        lines = [f"{self.op}/{self.rung} is wrong for {first.case}: {first.message}"]
        if first.wrong:
            lines.append(first.wrong.text_picture())
        if others := failed[1:]:
            names = "; ".join(result.case for result in others[:6])
            more = f"; … {len(others) - 6} more" if len(others) > 6 else ""
            lines.append(f"Wrong too: {names}{more}.")
        return "\n".join([*filter(None, lines), "", str(self.table())])

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def check(
    op: str,
    rung: str | int | os.PathLike | None = None,
    *,
    backend: str | None = None,
    sanitize: str | None = None,
    largest: int | None = None,
    limit: float = 60,
    isolate: bool = True,
) -> Report:
    """Check a rung on every case of ``ops/<op>.py``; ``Report`` on success, ``CheckError`` if not.

    Args:
        op, rung: as for ``loader.load()``, or the name of a ``%%kernel`` cell.
        backend: ``"cuda"``, ``"simt"``, or None for the one that runs here.
        sanitize: a tool of compute-sanitizer (``"memcheck"``, ``"racecheck"``, ``"initcheck"``,
            ``"synccheck"``) to run the small cases under. The CPU machine always watches those.
        largest: leave out cases with more elements, for an answer within seconds.
        limit: seconds that one case may take.
        isolate: run in a second process. False is for rungs that are trusted, as in a test suite.

    Raises:
        CheckError: a case is wrong, or all were refused.
        child.Died: the kernel faulted, hung, or corrupted memory. This process is unharmed.
        loader.CompileError: a source does not compile.
    """
    backend = backend or loader.default_backend()
    files = find(op, rung)
    for watched in (False, True) if backend == "simt" else (False,):  # does it compile?
        loader.load(op, files.kernel, backend, binding=files.binding, check=watched)
    call = (op, files.name, str(files.kernel), files.binding and str(files.binding), backend)
    if sanitize and backend == "cuda":
        most = min(largest or SANITIZED, SANITIZED)
        report = sanitizer.run(sanitize, "lab.checker:run", (*call, most), limit)
    elif isolate:
        report = child.call("lab.checker:run", (*call, largest), limit)
    else:
        report = run(*call, largest)
    if not report.ok:
        error = CheckError(report)
        error.args = (relabel(str(error)),)
        raise error
    return report


def run(
    op: str,
    name: str,
    kernel: str,
    binding: str | None,
    backend: str,
    largest: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Report:
    """All cases of one rung, in this process. ``largest``: leave out cases with more elements."""
    start = time.perf_counter()
    report = Report(op, name, backend)
    runner = _Runner(op, name, Path(kernel), binding, backend)
    for case in runner.module.cases():
        if largest and case.elements > largest:
            continue
        progress(case.name)
        result = _skip(case, backend) or runner.case(case)
        report.results.append(result)
        if result.status == "failed" and child.poisoned():
            report.results[-1].message += "\nThe GPU takes no more work from this process."
            break
    if backend == "cuda" and not child.poisoned():
        torch.cuda.empty_cache()  # the notebook needs it too
    report.tried = list(runner.tried)
    report.seconds = time.perf_counter() - start
    return report


def _skip(case: Case, backend: str) -> Result | None:
    if backend == "cuda":
        room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        if case.elements * BYTES_AN_ELEMENT > room:
            return Result(case.name, "skipped", message="needs more memory than this GPU has free")
    elif case.elements > CPU_ELEMENTS:
        return Result(case.name, "skipped", message=f"over {CPU_ELEMENTS:,} elements, for a GPU")
    return None


class _Runner:
    """One rung and its operator module, ready to run cases."""

    def __init__(self, op: str, name: str, kernel: Path, binding: str | None, backend: str):
        # A gradient may be PyTorch's own kernel: it must be exact, and the same twice.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        self.module = importlib.import_module(f"ops.{op}")
        self.function = getattr(self.module, op)
        promised = getattr(self.module, "DETERMINISTIC", False)
        self.deterministic = promised is True or (promised and name in promised)
        self.device = "cuda" if backend == "cuda" else "cpu"
        self.backend = backend
        self.tried: dict[str, None] = {}  # in order
        self.gradchecks = 0
        self.strays = False  # has it been caught outside of its memory?

        def build(watched: bool) -> types.ModuleType:
            return loader.load(op, kernel, backend, binding=binding, check=watched)

        self.kernel = build(False)
        self.watched = build(True) if backend == "simt" else self.kernel

    def case(self, case: Case) -> Result:
        try:
            inputs = case.inputs(self.device)
            if self.backend == "simt" and self.module.cost(*inputs).flops > CPU_FLOPS:
                message = f"over {CPU_FLOPS:,} operations, for a GPU"
                return Result(case.name, "skipped", message=message)
            watched = self.backend == "simt" and case.elements <= WATCHED
            if self.strays and not watched:
                message = f"over {WATCHED:,} elements, unwatched, after a bad memory access"
                return Result(case.name, "skipped", message=message)
            if not watched:
                return self._try(case, inputs, self.kernel)
            self._did("every memory access")
            return self._try(case, inputs, self.watched)
        except Exception as error:  # whatever a learner's kernel or operator raises
            # What follows is where in PyTorch it was raised, and advice that isolation replaces.
            text = re.split(r"\nException raised from|\nSearch for `cuda", str(error))[0]
            if OUTSIDE in text:
                return Result(case.name, "outside", message=text)
            self.strays |= self.backend == "simt" and bool(STRAY.search(text))
            help = f"\n  Help: {hint(text, RUNTIME)}" if hint(text, RUNTIME) else ""
            return Result(case.name, "failed", message=f"{type(error).__name__}: {text}{help}")

    def _call(self, inputs: Sequence, kernel: types.ModuleType) -> tuple:
        return as_tuple(self.function(*inputs, kernel=kernel))

    def _try(self, case: Case, inputs: tuple, kernel: types.ModuleType) -> Result:
        dtype = next(x.dtype for x in inputs if torch.is_tensor(x))
        tolerance = case.slack * self.module.tolerance(dtype)
        before = [_memory(x).clone() for x in inputs if torch.is_tensor(x)]
        with torch.no_grad(), _filled_with_nan():
            outs = self._call(inputs, kernel)

        def failed(message: str, error: float = 0.0, wrong: Wrong | None = None) -> Result:
            return Result(case.name, "failed", error, tolerance, message, wrong)

        self._did("inputs unchanged")
        after = [_memory(x) for x in inputs if torch.is_tensor(x)]
        for i, (x, y) in enumerate(zip(before, after, strict=True)):
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                return failed(f"it changed input {i}, or memory beside it")
        with torch.no_grad():
            expected = as_tuple(self.module.reference(*inputs))
        self._did("every element written")
        error, problem = self._compare(outs, expected, tolerance, "output")
        if problem:
            return failed(*problem)
        if self.device == "cuda" and case.elements <= CPU_ELEMENTS:
            self._did("a side stream")
            for out, late in zip(outs, self._late(inputs, kernel), strict=True):
                _, wrong = differences(late, out.double(), 2 * tolerance)
                if wrong:
                    return failed(f"on a side stream it did not wait for its inputs: {wrong}")
        if problem := self._again(inputs, outs, kernel):
            return failed(problem)
        if problem := self._gradients(case, inputs, outs, kernel):
            return failed(*problem)
        return Result(case.name, "passed", error, tolerance)

    def _did(self, what: str) -> None:
        self.tried[what] = None

    def _compare(
        self, outs: tuple, expected: tuple, tolerance: float, what: str, least: float = 0.0
    ) -> tuple:
        """The worst error; (message, error, Wrong) of the first tensor that differs, or None.

        The error of a tensor whose norm is below ``least`` is allowed to be a share of that.
        """
        if len(outs) != len(expected):
            return 0.0, (f"{len(outs)} {what}s, and the reference has {len(expected)}",)
        worst = 0.0
        for i, (out, ref) in enumerate(zip(outs, expected, strict=True)):
            name = what if len(outs) == 1 else f"{what} {i}"
            if out is None or out.shape != ref.shape:
                got = "None" if out is None else list(out.shape)
                return worst, (f"{name} has shape {got}, expected {list(ref.shape)}",)
            norm = ref.norm().item() if least else 0.0
            allowed = tolerance * least / norm if 0 < norm < least else tolerance
            error, wrong = differences(out, ref, allowed)
            worst = max(worst, error)
            if wrong:
                message = f"{name} is off by {error:.1e} of its norm, {allowed:.1e} is allowed"
                return worst, (f"{message}\n  {wrong}", error, wrong)
        return worst, None

    def _again(self, inputs: tuple, outs: tuple, kernel: types.ModuleType) -> str:
        """What a second call shows; "" if nothing."""
        if self.device == "cpu" and not self.deterministic:
            return ""
        ends = _mark_ends(outs) if self.device == "cuda" and not UNCACHED else set()
        with torch.no_grad():
            again = self._call(inputs, kernel)
        for out in (out for out in again if out.data_ptr() in ends):
            self._did("nothing past the end")
            if (_end(out) != MARK).any():
                return "it wrote past the end of its result: compare the index with the size"
        if self.deterministic:
            self._did("the same bits twice")
            pairs = zip(outs, again, strict=True)
            if not all(torch.equal(_bits(out), _bits(other)) for out, other in pairs):
                return "two calls on the same inputs gave different bits"
        return ""

    def _late(self, inputs: tuple, kernel: types.ModuleType) -> tuple:
        """The result on a stream of its own, where the inputs become right only after a while."""
        tensors = [x for x in inputs if torch.is_tensor(x)]
        right = [_memory(x).clone() for x in tensors]
        for x in tensors:
            _memory(x).view(torch.uint8).fill_(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(2_000_000)  # cycles: about a millisecond
            for x, y in zip(tensors, right, strict=True):
                _memory(x).copy_(y)
            outs = self._call(inputs, kernel)
        stream.synchronize()
        return outs

    def _gradients(self, case: Case, inputs: tuple, outs: tuple, kernel) -> tuple | None:
        """(message, …) if the gradients are not those of the reference; None if fine or none."""
        finite = all(x.isfinite().all() for x in inputs if _floats(x))
        largest = GRADIENTS if self.device == "cuda" else WATCHED
        if not finite or not 0 < case.elements <= largest:
            return None
        leaves = [x.detach().requires_grad_() if _floats(x) else x for x in inputs]
        results = self._call(leaves, kernel)
        if not any(out.requires_grad for out in results):
            return None
        self._did("gradients")
        wanted = [x for x in leaves if _floats(x)]
        doubles = [x.detach().double().requires_grad_() if _floats(x) else x for x in inputs]
        references = as_tuple(self.module.reference(*doubles))
        limit = getattr(self.module, "grad_tolerance", self.module.tolerance)(wanted[0].dtype)
        for expand in (False, True):
            used = [out.requires_grad for out in results]
            grads = [_like(out, expand) for out, use in zip(results, used, strict=True) if use]
            got = torch.autograd.grad(
                [out for out, use in zip(results, used, strict=True) if use],
                wanted, grads, allow_unused=True, retain_graph=True,
            )  # fmt: skip
            expected = torch.autograd.grad(
                [ref for ref, use in zip(references, used, strict=True) if use],
                [x for x in doubles if _floats(x)], [g.double() for g in grads],
                materialize_grads=True, retain_graph=True,
            )  # fmt: skip
            sent = sum(g.double().norm() for g in grads)
            if all(e.norm() < 1e-6 * sent for e in expected):
                continue  # softmax of one gradient for all: the true answer is 0, all else rounding
            # Where terms cancel, as near the minimum of SiLU, rounding is a share of the terms.
            if problem := self._compare(got, expected, limit, "gradient", 0.01 * float(sent))[1]:
                return problem
        overlapping = any(_floats(x) and 0 in x.stride() for x in inputs)
        small = case.elements <= GRADCHECK and self.gradchecks < 2
        # Uncached, each of its hundreds of calls allocates anew: minutes under a sanitizer.
        if wanted[0].dtype == torch.float64 and small and not overlapping and not UNCACHED:
            self._did("gradcheck")
            self.gradchecks += 1

            def function(*xs):
                return self.function(*xs, kernel=kernel)

            slack = 0.0 if self.deterministic else 1e-9
            torch.autograd.gradcheck(function, leaves, nondet_tol=slack)
        return None


def as_tuple(result: torch.Tensor | tuple) -> tuple:
    return (result,) if torch.is_tensor(result) else tuple(result)


def _floats(x: object) -> bool:
    return torch.is_tensor(x) and x.is_floating_point()


def _like(out: torch.Tensor, expand: bool) -> torch.Tensor:
    """A gradient to send back: random, or one number expanded, as ``out.sum()`` sends."""
    one = torch.randn((), dtype=torch.float64, device=out.device).to(out.dtype)
    return one.expand(out.shape) if expand else torch.randn_like(out)


def _memory(x: torch.Tensor) -> torch.Tensor:
    """All the memory that ``x`` is a view of, flat."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _mark_ends(outs: tuple) -> set[int]:
    """Fill memory of the size of each result with a mark, and free it: the addresses.

    PyTorch gives such a block to the next result of that size, rounded up to ``BLOCK`` bytes, so
    behind its last element the mark stays, unless somebody writes there.
    """
    sizes = [out.nbytes for out in outs if out.nbytes % BLOCK]
    blocks = [
        torch.full((-(-size // BLOCK) * BLOCK,), MARK, dtype=torch.uint8, device="cuda")
        for size in sizes
    ]
    return {block.data_ptr() for block in blocks}


def _end(out: torch.Tensor) -> torch.Tensor:
    """The bytes between the end of ``out`` and the end of its block."""
    interface = {
        "shape": (-out.nbytes % BLOCK,), "typestr": "|u1", "version": 3,
        "data": (out.data_ptr() + out.nbytes, False),
    }  # fmt: skip
    memory = types.SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(memory, device=out.device)


@contextlib.contextmanager
def _filled_with_nan() -> Iterator[None]:
    """Make new memory NaN (or the largest integer), so that an element nobody writes is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms() imports Inductor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
