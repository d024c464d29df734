"""Turns CUDA C++ into C++ that any compiler reads, changing as little text as possible.

What changes: ``kernel<<<...>>>(...)`` becomes a call of the launcher, ``__shared__`` declarations
become references into the block's shared memory, and what the CPU machine cannot do becomes an
error at its own line. Every line keeps its number, so compiler errors and the debugger point into
the learner's file. Works on tokens: comments, strings and the preprocessor are left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""
    (?P<comment> //(?:[^\n\\]|\\.|\\\n)*  |  /\*.*?\*/ )
  | (?P<string>  (?:u8|[uUL])?R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"
               | "(?:[^"\\\n]|\\.)*"  |  '(?:[^'\\\n]|\\.)+' )
  | (?P<space>   (?:\s|\\\r?\n)+ )
  | (?P<number>  \.?\d(?:[eEpP][+-]|'?[\w.])* )
  | (?P<name>    [A-Za-z_]\w* )
  | (?P<op>      <<<|>>>|::|->|. )
    """,
    re.S | re.X,
)

CLOSING = {"(": ")", "[": "]", "{": "}"}
OPENING = {close: open_ for open_, close in CLOSING.items()}

# What the CPU machine cannot do, and what to do instead.
PTX = (
    "inline PTX cannot run on the CPU machine; "
    "put it under #ifndef __SIMT_CPU__ and give plain C++ otherwise"
)
GRID = (
    "grid-wide synchronisation is not there on the CPU machine; "
    "end the kernel and launch a second one"
)
TEXTURE = "textures and surfaces are not there on the CPU machine; read the array through a pointer"
TMA = (
    "TMA descriptors are not there on the CPU machine; "
    "copy with plain loads under #ifdef __SIMT_CPU__"
)
GRAPH = "CUDA graphs are not there on the CPU machine; launch the kernels one after the other"
UNTYPED = "the CPU machine needs the kernel's types; write kernel<<<grid, block>>>(...)"
WITHOUT_SYNC = ["__shfl", "__shfl_up", "__shfl_down", "__shfl_xor", "__ballot", "__any", "__all"]
REFUSED = {
    **{name: f"CUDA no longer has it; write {name}_sync, whose first argument is the mask of the "
             "lanes that take part (0xffffffff for all)" for name in WITHOUT_SYNC},
    **dict.fromkeys(["asm", "__asm__", "__asm"], PTX),
    **dict.fromkeys(["this_grid", "grid_group", "cudaLaunchCooperativeKernel"], GRID),
    **dict.fromkeys(
        ["tex1D", "tex1Dfetch", "tex2D", "tex2DLod", "tex3D", "surf1Dread", "surf2Dread",
         "surf2Dwrite", "cudaTextureObject_t", "cudaSurfaceObject_t", "cudaCreateTextureObject"],
        TEXTURE,
    ),
    **dict.fromkeys(["CUtensorMap", "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"], TMA),
    **dict.fromkeys(["cudaGraph_t", "cudaGraphLaunch", "cudaStreamBeginCapture"], GRAPH),
    **dict.fromkeys(["cudaLaunchKernel", "cudaLaunchKernelExC"], UNTYPED),
}  # fmt: skip
REFUSAL = '_Pragma("GCC error'


class RewriteError(Exception):
    """The text cannot be understood; the message begins with file:line."""


@dataclass
class Token:
    kind: str
    text: str
    line: int


@dataclass
class Kernel:
    """What a file says about one of its __global__ functions."""

    parameters: list[str]
    cluster: str = ""
    typed: bool = True  # neither a template nor overloaded: its name alone says what it takes


@dataclass
class File:
    """The tokens of one file, and the edits to make: (first token, one past the last, new text)."""

    path: str
    tokens: list[Token]
    kernels: dict[str, Kernel] = field(default_factory=dict)
    edits: list[tuple[int, int, str]] = field(default_factory=list)

    def fail(self, at: int, message: str) -> RewriteError:
        return RewriteError(f"{self.path}:{self.tokens[at].line}: error: {message}")

    def text(self, begin: int, end: int) -> str:
        return "".join(token.text for token in self.tokens[begin:end])

    def code(self, begin: int, end: int) -> str:
        """The text on one line, without comments."""
        kept = (" " if t.kind in ("comment", "space") else t.text for t in self.tokens[begin:end])
        return " ".join("".join(kept).split())

    def is_op(self, at: int, *texts: str) -> bool:
        return (
            0 <= at < len(self.tokens)
            and self.tokens[at].kind == "op"
            and (self.tokens[at].text in texts)
        )

    def is_name(self, at: int, *texts: str) -> bool:
        return (
            0 <= at < len(self.tokens)
            and self.tokens[at].kind == "name"
            and (not texts or self.tokens[at].text in texts)
        )

    def step(self, at: int, by: int) -> int:
        """The nearest token in direction `by` that is neither blank nor comment."""
        at += by
        while 0 <= at < len(self.tokens) and self.tokens[at].kind in ("space", "comment"):
            at += by
        return at

    def closing(self, at: int) -> int:
        """The bracket that closes the one at `at`."""
        expected: list[str] = []
        for i in range(at, len(self.tokens)):
            if self.tokens[i].kind != "op":
                continue
            text = self.tokens[i].text
            if text in CLOSING:
                expected.append(CLOSING[text])
            elif expected and text == expected[-1]:
                expected.pop()
                if not expected:
                    return i
        raise self.fail(at, f"this {self.tokens[at].text} is never closed")

    def opening(self, at: int) -> int:
        """The bracket that is closed by the one at `at`."""
        expected: list[str] = []
        for i in range(at, -1, -1):
            if self.tokens[i].kind != "op":
                continue
            text = self.tokens[i].text
            if text in OPENING:
                expected.append(OPENING[text])
            elif expected and text == expected[-1]:
                expected.pop()
                if not expected:
                    return i
        raise self.fail(at, f"this {self.tokens[at].text} was never opened")

    def find_op(self, at: int, *texts: str) -> int:
        """The next operator out of `texts` that is not inside brackets."""
        while at < len(self.tokens):
            if self.is_op(at, *texts):
                return at
            at = self.closing(at) + 1 if self.is_op(at, *CLOSING) else at + 1
        return len(self.tokens)


def tokenize(source: str) -> list[Token]:
    tokens = []
    line = 1
    for match in TOKEN.finditer(source):
        kind = match.lastgroup if match.lastgroup != "tag" else "string"
        tokens.append(Token(kind or "op", match.group(), line))
        line += match.group().count("\n")
    return tokens


def rewrite(source: str, path: str) -> str:
    """The C++ text for a .cu file (or a header of it) that lies at `path`."""
    file = File(path, tokenize(source.removeprefix("\ufeff")))
    find_kernels(file)
    attribute_kernels = kernels_with_attributes(file)
    scopes: list[bool] = []  # for every open brace: does a function's body lie in it?
    at = 0
    while at < len(file.tokens):
        end = at + 1
        if file.is_op(at, "{"):
            scopes.append(any(scopes) or not opens_namespace(file, at))
        elif file.is_op(at, "}"):
            if scopes:
                scopes.pop()
        elif file.is_op(at, "<<<"):
            end = rewrite_launch(file, at, attribute_kernels)
        elif file.is_name(at, "__shared__"):
            end = rewrite_shared(file, at, in_function=any(scopes))
        elif file.is_name(at, "cudaLaunchKernelEx"):
            rewrite_launch_ex(file, at)
        elif file.is_name(at, "printf") and file.is_op(file.step(at, 1), "("):
            if not file.is_op(file.step(at, -1), ".", "->", "::"):
                file.edits.append((at, at + 1, "simt_printf"))
        elif file.is_name(at, "__noinline__") and not file.is_op(file.step(at, -1), "(", ","):
            file.edits.append((at, at + 1, "SIMT_NOINLINE"))
        elif file.is_name(at, *REFUSED) and not file.is_op(file.step(at, -1), ".", "->"):
            message = f"{file.tokens[at].text}: {REFUSED[file.tokens[at].text]}"
            refusal = f'{REFUSAL} \\"{message}\\"") {file.tokens[at].text}'
            file.edits.append((at, at + 1, refusal))
        at = end
    return apply_edits(file)


def apply_edits(file: File) -> str:
    parts = [f'#line 1 "{file.path}"\n']
    at = 0
    for begin, end, text in file.edits:
        parts += [file.text(at, begin), text]
        at = end
    body = file.text(at, len(file.tokens))
    return "".join([*parts, body])


def opens_namespace(file: File, at: int) -> bool:
    """Is this { the start of a namespace or of extern "C"?"""
    for _ in range(8):
        at = file.step(at, -1)
        if at < 0 or file.is_op(at, ";", "{", "}", ")"):
            return False
        if file.is_name(at, "namespace") or file.tokens[at].text == '"C"':
            return True
    return False


def newlines(text: str) -> str:
    """The line ends in a text that is left out, so that what follows keeps its line."""
    return "".join(re.findall(r"\\?\r?\n", text))


# ---- kernels ----


def find_kernels(file: File) -> None:
    """Notes the parameter names of every __global__ function, and its cluster size."""
    for start in range(len(file.tokens)):
        if not file.is_name(start, "__global__"):
            continue
        cluster = ""
        at = start
        while True:
            at = file.find_op(at, "(", ";", "{")
            if not file.is_op(at, "("):
                break
            end = file.closing(at)
            name = file.step(at, -1)
            if file.is_name(name, "__cluster_dims__"):
                cluster = file.code(at + 1, end)
            elif file.is_name(name, "__launch_bounds__", "__maxnreg__", "__attribute__"):
                pass
            else:
                note_kernel(file, start, name, Kernel(parameter_names(file, at, end), cluster))
                break
            at = end + 1


def note_kernel(file: File, start: int, name: int, kernel: Kernel) -> None:
    before = start
    while file.is_name(file.step(before, -1), "static", "inline", "extern"):
        before = file.step(before, -1)
    kernel.typed = not file.is_op(file.step(before, -1), ">")  # template <...> __global__
    known = file.kernels.setdefault(file.tokens[name].text, kernel)
    if known is not kernel:
        known.cluster = known.cluster or kernel.cluster
        # A declaration and its definition have as many parameters; overloads may differ in types.
        known.typed = False


def parameter_names(file: File, open_: int, close: int) -> list[str]:
    names = []
    at = open_ + 1
    while at < close:
        last_name = ""
        depth = 0  # of template brackets, whose commas do not separate parameters
        default = False
        while at < close and not (file.is_op(at, ",") and depth == 0):
            if file.is_op(at, *CLOSING):
                at = file.closing(at)
            elif file.is_op(at, "<"):
                depth += 1
            elif file.is_op(at, ">"):
                depth -= 1
            elif file.is_op(at, "="):
                default = True
            elif file.is_name(at) and depth == 0 and not default:
                last_name = file.tokens[at].text
            at += 1
        names.append(last_name)
        at += 1
    return names


def kernel_key(code: str) -> str:
    """How a kernel is spelled, without what differs between its mentions."""
    return re.sub(r"\s|\((const)?void\*\)|&", "", code)


def kernels_with_attributes(file: File) -> set[str]:
    """The kernels that cudaFuncSetAttribute mentions. A launch of these must know the function's
    address; of other templates it need not, and may leave their arguments to be deduced."""
    keys = set()
    for at in range(len(file.tokens)):
        if file.is_name(at, "cudaFuncSetAttribute") and file.is_op(file.step(at, 1), "("):
            open_ = file.step(at, 1)
            attribute = next(
                (i for i in range(open_, file.closing(open_))
                 if file.tokens[i].text.startswith("cudaFuncAttribute")),
                None,
            )  # fmt: skip
            if attribute is not None:
                keys.add(kernel_key(file.code(open_ + 1, file.step(attribute, -1))))
    return keys


def launched_expression(file: File, launch: int) -> int:
    """The first token of what stands before <<<: name, ns::name<T>, (pointer), table[i]."""
    at = file.step(launch, -1)
    while True:
        if file.is_op(at, ">", ">>>"):
            depth = 0
            while at >= 0:
                if file.is_op(at, *OPENING):
                    at = file.opening(at)
                elif file.is_op(at, ">", ">>>"):
                    depth += len(file.tokens[at].text)
                elif file.is_op(at, "<"):
                    depth -= 1
                if depth == 0:
                    break
                at = file.step(at, -1)
            at = file.step(at, -1)
        while file.is_op(at, "]"):
            at = file.step(file.opening(at), -1)
        if file.is_op(at, ")"):
            at = file.opening(at)
        elif not file.is_name(at):
            raise file.fail(launch, "what is launched here? Write name<<<grid, block>>>(...)")
        before = file.step(at, -1)
        if not file.is_op(before, "::", ".", "->"):
            return at
        left = file.step(before, -1)
        if file.is_op(before, "::") and not (file.is_name(left) or file.is_op(left, ">")):
            return before  # ::name
        at = left


def rewrite_launch(file: File, launch: int, attribute_kernels: set[str]) -> int:
    begin = launched_expression(file, launch)
    configured = file.find_op(launch + 1, ">>>", ";")
    if not file.is_op(configured, ">>>"):
        raise file.fail(launch, "this <<< has no >>>")
    open_ = file.step(configured, 1)
    if not file.is_op(open_, "("):
        raise file.fail(configured, "a launch needs its arguments in (...) behind the >>>")
    close = file.closing(open_)
    name = file.code(begin, launch)
    base = re.split(r"<", name)[0].split("::")[-1].strip()
    kernel = file.kernels.get(base, Kernel([]))
    known = base in file.kernels and kernel.typed
    typed = f"::simt::typed({name}), " if known or kernel_key(name) in attribute_kernels else ""
    cluster = f".cluster({kernel.cluster})" if kernel.cluster else ""
    arguments = re.sub(r"\bNULL\b", "nullptr", file.text(open_ + 1, close))
    comma = ", " if file.code(open_ + 1, close) else ""
    text = (
        f"::simt::Launcher({{{quoted(name)}, {quoted(','.join(kernel.parameters))}, "
        f"{{__FILE__, __LINE__}}}}){cluster}.on({file.text(launch + 1, configured)})"
        f".run({typed}[=](auto... simt_a) {{ {name}(simt_a...); }}{comma}{arguments})"
    )
    left_out = file.text(begin, launch) + file.text(configured, open_)
    file.edits.append((begin, close + 1, text + newlines(left_out)))
    return close + 1


def rewrite_launch_ex(file: File, at: int) -> None:
    open_ = file.step(at, 1)
    if not file.is_op(open_, "("):
        return
    end = file.closing(open_)
    first_comma = file.find_op(open_ + 1, ",")
    name_end = min(end, file.find_op(first_comma + 1, ",", ")"))
    name = file.code(first_comma + 1, name_end)
    kernel = file.kernels.get(re.split(r"<", name)[0].split("::")[-1].strip(), Kernel([]))
    site = f"{{{quoted(name)}, {quoted(','.join(kernel.parameters))}, {{__FILE__, __LINE__}}}}"
    file.edits.append((at, at + 1, f"::simt::LaunchKernelEx({site})"))


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- shared memory ----


def rewrite_shared(file: File, at: int, in_function: bool) -> int:
    """`__shared__ float a[8], b;` has the syntax of a typedef: one with other names gives the
    variables' types, and SIMT_SHARED gives each its storage."""
    begin = at
    while file.is_name(file.step(begin, -1), "extern", "static", "volatile", "const"):
        begin = file.step(begin, -1)
    end = file.find_op(at, ";")
    declared = declared_names(file, begin, at, end)
    if end == len(file.tokens) or not declared:
        raise file.fail(at, "this __shared__ declaration is not understood")
    dynamic = any(file.is_name(i, "extern") for i in range(begin, end))
    parts = []
    i = begin
    while i < end:
        token = file.tokens[i]
        if file.is_name(i, "__shared__"):
            parts.append("typedef")
        elif file.is_name(i, "extern", "static"):
            pass
        elif dynamic and file.is_name(i, "__align__", "alignas"):
            i = file.closing(file.step(i, 1))  # dynamic shared memory is aligned enough as it is
        elif file.is_name(i, "alignas"):
            parts.append("__align__")  # which a typedef accepts
        elif i in declared:
            parts.append(f"{token.text}__T")
            if dynamic and file.is_op(file.step(i, 1), "["):
                i = file.closing(file.step(i, 1))  # the first [] makes it a pointer
        else:
            parts.append(token.text)
        i += 1
    typedef = "".join(parts)
    lost = newlines(file.text(begin, end)).count("\n") - typedef.count("\n")
    names = [file.tokens[i].text for i in declared]
    if not dynamic:
        macro = "SIMT_SHARED" if in_function else "SIMT_FILE_SHARED"
        uses = "".join(f" {macro}({name})" for name in names)
    elif in_function:
        uses = "".join(
            f" {name}__T* const {name} = ::simt::dynamic_shared<{name}__T>();" for name in names
        )
    else:
        uses = "".join(f" SIMT_FILE_DYNAMIC_SHARED({name}__T, {name});" for name in names)
    file.edits.append((begin, end + 1, f"{typedef};{uses}" + "\n" * lost))
    return end + 1


def declared_names(file: File, begin: int, keyword: int, end: int) -> list[int]:
    """The tokens that name the variables in a declaration: what stands before [ , = or the end."""
    found = []
    depth = 0  # of template brackets
    in_declarator = False
    at = begin
    while at < end:
        if file.is_op(at, *CLOSING):
            at = file.closing(at)
        elif file.is_op(at, "<"):
            depth += 1
        elif file.is_op(at, ">"):
            depth -= 1
        elif depth == 0 and file.is_op(at, ","):
            in_declarator = False
        elif depth == 0 and file.is_name(at) and at != keyword and not in_declarator:
            after = file.step(at, 1)
            if after == end or file.is_op(after, "[", ",", "="):
                found.append(at)
                in_declarator = True
        at += 1
    return found
