"""The CPU machine's compiler: called like g++ with a .cu file, it rewrites the file and calls g++.

    python cc.py [--check] [--cxx=g++] -MMD -MF out.d <flags> -c kernel.cu -o out.o

Without --check the kernel runs as fast as it can. With it every load and store calls the checker:
the compiler puts in the calls as it does for ThreadSanitizer, but the functions that they reach
are the machine's own (runtime/hooks.cpp); ThreadSanitizer's library is never linked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rewrite import REFUSAL, RewriteError, rewrite

INCLUDE = Path(__file__).resolve().parent / "include"

BASE_FLAGS = [
    "-fPIC",
    "-g1",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",  # nvcc does not optimise on it, so kernels cast pointers freely
    "-fno-delete-null-pointer-checks",  # so that using a null pointer is found, not optimised away
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-Wno-unused-parameter",  # nvcc does not mention a kernel's either
    "-ftemplate-backtrace-limit=1",  # what is between the kernel and its launch is the machine's
]
FAST_FLAGS = ["-O2"]
CHECK_FLAGS = [
    "-O1",
    "-DSIMT_CHECK",
    "-fsanitize=thread",
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",  # the checker goes by return addresses
]
MAX_FRAME = 64 << 10  # kMaxFrame in runtime/fiber.h


def clang_version(cxx: str) -> int:
    """0 for g++."""
    said = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"clang version (\d+)", said)
    return int(version[1]) if version else 0


def compiler_flags(cxx: str, check: bool) -> list[str]:
    flags = [*BASE_FLAGS, *(CHECK_FLAGS if check else FAST_FLAGS)]
    # An array that ends a struct has the size that it is declared with: "strict".
    if version := clang_version(cxx):
        if check:
            flags += ["-fsanitize=bounds"]
            flags += ["-fstrict-flex-arrays=3"] if version >= 16 else []
            flags += ["-mllvm", "-tsan-distinguish-volatile=1"]
            flags += ["-mllvm", "-tsan-instrument-func-entry-exit=0"]
            # Functions of the toolkit's headers too: an access belongs to the kernel's line.
            flags += ["-finline-functions", "-mllvm", "-inline-threshold=10000"]
            flags += ["-fno-vectorize", "-fno-slp-vectorize"]
    else:
        flags += ["-fno-gnu-unique", f"-Werror=frame-larger-than={MAX_FRAME}"]
        if check:
            flags += ["-fsanitize=bounds-strict"]
            flags += ["--param=tsan-distinguish-volatile=1"]
            flags += ["--param=tsan-instrument-func-entry-exit=0"]
            flags += ["-fno-tree-vectorize", "-fno-tree-sra"]  # a float4 stays one access
    return flags


def rewrite_file(path: Path, folder: Path, copies: dict[Path, Path]) -> Path:
    """Rewrites a file, and the learner's own headers that it includes, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / (re.sub(r"\W", "_", str(path)) + ".cpp")
    if out in copies:
        return out
    copies[out] = path
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as f:
        source = f.read()

    def include(match: re.Match[str]) -> str:
        header = path.parent / match["name"]
        if not header.is_file():
            return match[0]
        return f'{match["before"]}"{rewrite_file(header.resolve(), folder, copies)}"'

    text = rewrite(source, str(path))
    text = re.sub(
        r'^(?P<before>[ \t]*#[ \t]*include[ \t]*)"(?P<name>[^"\n]+)"', include, text, flags=re.M
    )
    with open(out, "w", encoding="utf-8", errors="surrogateescape", newline="") as f:
        f.write(text)
    return out


def copy_pairs_whole(flags: list[str], folder: Path, copies: dict[Path, Path]) -> None:
    """Puts headers of the toolkit into `folder` that copy a pair of 16-bit numbers, on the host
    too, as one word: as a GPU does it, so that the checker sees the same access."""
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp"):
        headers = (Path(flag.removeprefix("-I"), name) for flag in flags)
        if header := next((h for h in headers if h.is_file()), None):
            text = re.sub(
                r"this->x = src\.x;\s*this->y = src\.y;",
                "*(unsigned*)this = *(const unsigned*)&src;",
                header.read_text(),
            )
            copies[folder / name] = header
            (folder / name).write_text(f'#pragma GCC system_header\n#line 1 "{header}"\n{text}')


def restore_dependencies(dep_file: Path, copies: dict[Path, Path]) -> None:
    """The list of what the object depends on must name the learner's files, not our copies."""
    text = dep_file.read_text()
    for copy, original in copies.items():
        text = text.replace(str(copy), str(original))
    dep_file.write_text(text)


def main(arguments: list[str]) -> int:
    check = False
    cxx = "g++"
    source = output = dep_file = None
    passed_on = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--check":
            check = True
        elif argument.startswith("--cxx="):
            cxx = argument.removeprefix("--cxx=")
        elif argument.endswith(".cu"):
            source = Path(os.path.abspath(argument))
        elif argument == "-o":
            output = Path(next(rest))
        elif argument == "-MF":
            dep_file = Path(next(rest))
        elif argument != "-c":
            passed_on.append(argument)
    if source is None or output is None:
        print("usage: cc.py [--check] [flags] -c kernel.cu -o kernel.o", file=sys.stderr)
        return 2
    copies: dict[Path, Path] = {}
    try:
        rewritten = rewrite_file(source, Path(f"{output}.rewritten").absolute(), copies)
    except RewriteError as error:
        print(error, file=sys.stderr)
        return 1
    refused = any(REFUSAL in copy.read_text(errors="surrogateescape") for copy in copies)
    with tempfile.TemporaryDirectory() as headers:
        if check:
            copy_pairs_whole(passed_on, Path(headers), copies)
        command = [
            cxx, "-std=c++17", f"-I{INCLUDE}", f"-I{headers}", "-iquote", str(source.parent),
            *passed_on, *compiler_flags(cxx, check), "-include", str(INCLUDE / "cuda_runtime.h"),
            *(f"-ffile-prefix-map={copy}={original}" for copy, original in copies.items()),
            "-c", str(rewritten), "-o", str(output),
        ]  # fmt: skip
        if dep_file is not None:
            command += ["-MF", str(dep_file)]
        if refused:
            command += ["-Wfatal-errors"]  # what follows from a refusal need not be said
        result = subprocess.call(command)
    if result == 0 and dep_file is not None:
        restore_dependencies(dep_file, copies)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
