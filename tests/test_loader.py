"""The loader against what goes wrong when extensions are built at run time.

Real compilers, no GPU: the "kernels" here are host functions in .cu files (see conftest.Project).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT


def value(loader, **kwargs) -> int:
    return loader.load("scale", backend="cuda", **kwargs).value()


def run(project, code: str, **kwargs) -> subprocess.Popen:
    """Python in a process of its own, with ``loader`` imported."""
    code = "import loader, os, sys\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=project.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


LOAD = "print(loader.load('scale', backend='cuda').value())"


# ---- editing and caching -----------------------------------------------------------------------


def test_builds_a_folder_of_one_cu_one_cpp_and_the_loader(project):
    loader = project.loader()
    module = loader.load("scale", backend="cuda")
    assert module.value() == 1
    assert sorted(module.build.compiled) == ["scale.cpp", "scale.cu"]
    assert [k.name for k in module.build.kernels] == ["kernel"]
    assert module.build.kernels[0].arch == "sm_90a" or torch.cuda.is_available()
    again = loader.load("scale", backend="cuda")
    assert again is module
    assert again.build.compiled == ()
    fresh = project.loader().load("scale", backend="cuda")
    assert fresh.build.compiled == () and fresh.value() == 1


def test_each_of_five_edits_runs_and_costs_one_nvcc_call(project):
    loader = project.loader()
    held = [loader.load("scale", backend="cuda")]
    for number in range(2, 7):
        project.kernel(number)
        held.append(loader.load("scale", backend="cuda"))
        assert held[-1].build.compiled == ("scale.cu",)
    assert [module.value() for module in held] == [1, 2, 3, 4, 5, 6]  # old versions live on
    project.kernel(3)
    assert value(loader) == 3
    assert loader.load("scale", backend="cuda").build.compiled == ()


def test_edit_of_the_binding_keeps_the_kernel(project):
    loader = project.loader()
    assert value(loader) == 1
    binding = project.folder / "scale.cpp"
    binding.write_text(project.CPP.replace("scale_launch())", "10 * scale_launch())"))
    module = loader.load("scale", backend="cuda")
    assert (module.value(), module.build.compiled) == (10, ("scale.cpp",))


def test_an_edit_with_an_older_date_is_seen(project):
    loader = project.loader()
    assert value(loader) == 1
    os.utime(project.kernel(2), (1, 1))
    assert value(loader) == 2


def test_rungs_stand_side_by_side(project):
    for number, name in enumerate(("1_one", "2_two", "10_ten")):
        project.kernel(number, f"kernels/scale/{name}.cu")
    (project.folder / "bindings").mkdir()
    (project.folder / "scale.cpp").rename(project.folder / "bindings" / "scale.cpp")
    loader = project.loader()
    assert loader.rungs("scale") == ["1_one", "2_two", "10_ten"]
    modules = [loader.load("scale", name, "cuda") for name in (1, "two", "10_ten", None)]
    assert [m.value() for m in modules] == [0, 1, 2, 2]
    assert modules[1].build.compiled == ("2_two.cu",)
    assert modules[3] is modules[2]
    elsewhere = project.kernel(7, "scratch/mine.cu")
    assert loader.load("scale", elsewhere, "cuda").value() == 7
    for wrong, words in (("tow", "two"), (5, "1_one, 2_two, 10_ten")):
        with pytest.raises(LookupError, match=words):
            loader.load("scale", wrong, "cuda")
    with pytest.raises(LookupError, match="Did you mean 'scale'"):
        loader.load("scal", backend="cuda")


def test_rung_from_a_relative_path_and_another_folder(project, monkeypatch):
    project.kernel(5, "elsewhere/five.cu")
    monkeypatch.chdir(project.folder / "elsewhere")
    assert value(project.loader(), rung="five.cu") == 5
    assert value(project.loader(), rung="../scale.cu") == 1


def test_header_edits_are_seen(project):
    (project.folder / "include").mkdir()
    inner, outer = project.folder / "include" / "inner.h", project.folder / "outer.cuh"
    outer.write_text('#include "include/inner.h"\n')
    inner.write_text("#define NUMBER 1\n")
    project.kernel("NUMBER", before='#include "outer.cuh"')
    loader = project.loader()
    assert value(loader) == 1
    inner.write_text("#define NUMBER 2\n")
    assert value(loader) == 2
    assert value(project.loader()) == 2
    inner.write_text("#define NUMBER 1\n")
    module = loader.load("scale", backend="cuda")
    assert (module.value(), module.build.compiled) == (1, ())
    inner.unlink()
    with pytest.raises(loader.CompileError, match="inner.h"):
        value(loader)


@pytest.mark.parametrize(
    ("before", "flags"),
    [
        ('#include "h.cuh"', []),
        ('/* x */ #include "h.cuh"', []),
        ('#include \\\n "h.cuh"', []),
        ("#define S(x) #x\n#include S(h.cuh)", []),
        ("#include <h.cuh>", ["-I{}"]),
        ("#include H", ['-DH="h.cuh"', "-I{}"]),
        ('#include "link.cuh"', []),
    ],
)
def test_headers_however_they_are_named(project, before, flags):
    header = project.folder / "h.cuh"
    (project.folder / "elsewhere").mkdir()
    (project.folder / "elsewhere" / "link.cuh").write_text('#include "h.cuh"\n')
    (project.folder / "link.cuh").symlink_to(project.folder / "elsewhere" / "link.cuh")
    flags = [flag.format(project.folder) for flag in flags]
    project.kernel("NUMBER", before=before)
    loader = project.loader()
    for number in (1, 2, 1):
        header.write_text(f"#define NUMBER {number}\n")
        os.utime(header, (number, number))
        assert value(loader, flags=flags) == number


def test_variables_that_change_the_compiler_count(project, monkeypatch):
    project.kernel("NUMBER")
    loader = project.loader()
    for number in (1, 2):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", f"-DNUMBER={number}")
        assert value(loader) == number


def test_a_source_edited_while_it_compiles_is_compiled_again(project, monkeypatch):
    loader = project.loader()
    build = loader._build

    def build_then_edit(*arguments):
        result = build(*arguments)
        monkeypatch.setattr(loader, "_build", build)
        project.kernel(2)
        return result

    monkeypatch.setattr(loader, "_build", build_then_edit)
    assert value(loader) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(torch, "__version__", "9.9.9"),
        lambda m: m.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX"),
        lambda m: m.setattr(sys.implementation, "cache_tag", "cpython-399"),
    ],
    ids=["torch", "architecture", "python"],
)
def test_what_the_cache_is_keyed_by(project, monkeypatch, change):
    loader = project.loader()
    before = loader._toolchain("cuda", False, ()).key
    assert loader._toolchain("cuda", False, ()).key == before
    change(monkeypatch)
    assert loader._toolchain("cuda", False, ()).key != before


def test_the_cache_is_keyed_by_the_compiler(project, tmp_path, monkeypatch):
    loader = project.loader()
    assert value(loader) == 1
    other = tmp_path / "g++-other"
    other.write_text('#!/bin/sh\nexec g++ "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert len(loader.load("scale", backend="cuda").build.compiled) == 2


def test_two_checkouts_share_a_cache(project, tmp_path):
    other = type(project)(tmp_path / "other")
    other.kernel(2)
    assert (value(project.loader()), value(other.loader())) == (1, 2)
    assert (value(project.loader()), value(other.loader())) == (1, 2)


def test_force_compiles_everything_again(project):
    loader = project.loader()
    first = loader.load("scale", backend="cuda")
    forced = loader.load("scale", backend="cuda", force=True)
    assert len(forced.build.compiled) == 2 and forced.value() == 1
    assert forced.build.library != first.build.library


def test_what_was_not_used_for_a_month_goes(project, cache):
    loader = project.loader()
    old = loader.load("scale", backend="cuda").build.library
    for path in cache.glob("*/*"):
        os.utime(path, (1, 1))
    project.kernel(2)
    kept = loader.load("scale", backend="cuda").build.library
    assert not old.exists() and kept.exists()
    assert value(project.loader()) == 2


def test_a_cached_load_does_not_import_cpp_extension(project):
    assert finished(run(project, LOAD)) == "1"
    code = LOAD + "\nprint('torch.utils.cpp_extension' in sys.modules)"
    assert finished(run(project, code)) == "1\nFalse"


# ---- failures ----------------------------------------------------------------------------------


def test_broken_source_fails_each_time_and_never_runs_old_code(project):
    loader = project.loader()
    assert value(loader) == 1
    project.kernel("nonsense")
    for fresh in (loader, loader, project.loader()):
        with pytest.raises(fresh.CompileError) as caught:
            value(fresh)
        assert re.search(r"scale\.cu\(3\): error: identifier \"nonsense\"", str(caught.value))
        assert str(caught.value).startswith("scale.cu did not compile")
        assert caught.value.log.read_text() == caught.value.output
        assert caught.value.sources == [project.folder / "scale.cu"]
    assert run(project, LOAD).wait(timeout=120) != 0
    project.kernel(2)
    assert value(loader) == 2


def test_a_broken_kernel_does_not_cost_the_binding(project):
    project.kernel("nonsense")
    loader = project.loader()
    with pytest.raises(loader.CompileError):
        value(loader)
    project.kernel(2)
    module = loader.load("scale", backend="cuda")
    assert (module.value(), module.build.compiled) == (2, ("scale.cu",))


def test_one_libstdcxx_whatever_the_compiler_does(project, tmp_path, monkeypatch):
    script = tmp_path / "static-g++"
    script.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    numbers = "#include <sstream>\nstatic int text() { std::ostringstream s; s << 12; "
    numbers += "return s.str()[1]; }\n"
    binding = numbers + project.CPP.replace("scale_launch())", "scale_launch() + text() - '2')")
    (project.folder / "scale.cpp").write_text(binding)
    module = project.loader().load("scale", backend="cuda")
    assert module.value() == 1
    command = ["readelf", "--dynamic", str(module.build.library)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libstdc++.so.6" in needed


def test_linking_reads_the_symbols_of_one_library_of_torch(project):
    """It needs the others, and reading those took most of each link."""
    library = project.loader().load("scale", backend="cuda").build.library
    command = ["readelf", "--dynamic", str(library)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"lib(?:torch|c10)\w*", needed) == ["libtorch_python"]


def test_errors_of_the_binding_name_its_line(project):
    (project.folder / "scale.cpp").write_text("int f() {\n  return missing;\n}\n")
    loader = project.loader()
    with pytest.raises(loader.CompileError, match=r"scale\.cpp:2:10: error: .missing."):
        value(loader)


def test_warnings_are_shown_and_kept(project, capsys):
    project.kernel("1; int unused")
    loader = project.loader()
    assert "unused" in loader.load("scale", backend="cuda").build.log.read_text()
    assert "was declared but never referenced" in capsys.readouterr().err
    assert "never referenced" in loader.load("scale", backend="cuda").build.log.read_text()


def test_verbose_prints_commands_through_sys_stdout(project, capsys):
    value(project.loader(), verbose=True)
    printed = capsys.readouterr().out
    assert "nvcc" in printed and "Used" in printed
    for command in [line for line in printed.splitlines() if " -c " in line]:
        assert command.count("-std=") == 1  # torch's, which knows the standard its headers want
        assert command.count("-gencode") <= 1


def test_declaration_and_definition_that_differ(project):
    kernel = project.folder / "scale.cu"
    kernel.write_text("int scale_launch(int) { return 1; }\n")
    loader = project.loader()
    with pytest.raises(loader.CompileError) as caught:
        value(loader)
    assert "scale.cpp calls `scale_launch`, which scale.cu does not define" in str(caught.value)
    assert "it defines: scale_launch(int)" in str(caught.value)
    assert 'extern "C"' in str(caught.value)


def test_module_name_written_by_hand(project):
    binding = project.folder / "scale.cpp"
    binding.write_text(project.CPP.replace("JOIN(PyInit_, TORCH_EXTENSION_NAME)", "PyInit_my_own"))
    loader = project.loader()
    with pytest.raises(loader.CompileError, match="PYBIND11_MODULE.TORCH_EXTENSION_NAME, m"):
        value(loader)
    binding.write_text(project.CPP.replace("JOIN(PyInit_, TORCH_EXTENSION_NAME)", "PyInit_scale"))
    project.kernel(4)
    assert value(loader) == 4  # the right name works, edit after edit
    project.kernel(5)
    assert value(loader) == 5


def test_a_torch_library_is_not_registered_twice(project):
    registers = "#include <torch/library.h>\nnamespace { TORCH_LIBRARY(mine, m) { (void)m; } }\n"
    (project.folder / "scale.cpp").write_text(registers + project.CPP)
    loader = project.loader()
    assert value(loader) == 1
    project.kernel(2)
    with pytest.raises(loader.CompileError, match="Restart Python"):
        value(loader)
    assert finished(run(project, LOAD)) == "2"


def test_a_torch_library_in_a_header_and_by_other_names(project):
    symbol = "int TORCH_LIBRARY_FRAGMENT_static_init_mine_0;\n"  # what that macro leaves
    (project.folder / "ops.h").write_text(symbol)
    (project.folder / "scale.cpp").write_text('#include "ops.h"\n' + project.CPP)
    project.kernel(1).write_text("int wrong_name() { return 1; }\n")
    loader = project.loader()
    with pytest.raises(loader.CompileError, match="does not define"):
        value(loader)  # nothing was registered
    project.kernel(1)
    assert value(loader) == 1
    project.kernel(2)
    with pytest.raises(loader.CompileError, match=r"TORCH_LIBRARY\(mine\) is registered"):
        value(loader)


def test_an_object_that_a_compiler_left_half_written_is_not_kept(project, tmp_path, monkeypatch):
    script = tmp_path / "dying-g++"
    script.write_text('#!/bin/sh\nfor a; do last=$a; done\necho half > "$last"\nexit 1\n')
    script.chmod(0o755)
    loader = project.loader()
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_cxx", lambda: str(script))
        with pytest.raises(loader.CompileError, match="did not compile"):
            value(loader)
    assert value(loader) == 1


def test_errors_reach_other_processes(project):
    error = project.loader().CompileError("what", "output", project.folder / "log", [Path("x.cu")])
    copied = type(error)(*error.__reduce__()[1])
    assert (str(copied), copied.output, copied.sources) == (str(error), "output", [Path("x.cu")])


def test_a_cleaned_cache_is_filled_again(project, cache):
    loader = project.loader()
    assert value(loader) == 1
    assert loader.main(["clean"]) == 0
    assert not list(cache.glob("objects/*")) and not list(cache.glob("libraries/*"))
    assert value(loader) == 1
    shutil.rmtree(cache)
    project.kernel(2)
    assert value(loader) == 2


def test_a_damaged_library_says_so_and_force_mends_it(project, cache):
    assert finished(run(project, LOAD)) == "1"
    (library,) = cache.glob("libraries/*.so")
    library.write_bytes(b"not a library")
    loader = project.loader()
    with pytest.raises(loader.CompileError, match=r"load\(…, force=True\)"):
        value(loader)
    assert value(loader, force=True) == 1
    assert finished(run(project, LOAD)) == "1"


# ---- interrupted, killed, and at the same time -------------------------------------------------


@pytest.fixture
def slow(project, tmp_path, monkeypatch):
    """A compiler that takes a while, so that a build can be disturbed."""
    script = tmp_path / "slow-g++"
    script.write_text('#!/bin/sh\ncase "$*" in *scale.cpp*) sleep 4;; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return project


def started_compiling(cache: Path) -> None:
    deadline = time.time() + 60
    while not list(cache.glob("scratch/*/binding.o.log")):
        assert time.time() < deadline, "the build did not start"
        time.sleep(0.05)


def test_a_killed_build_costs_the_next_one_nothing(slow, cache):
    process = run(slow, LOAD)
    started_compiling(cache)
    process.kill()
    process.wait()
    start = time.time()
    assert finished(run(slow, LOAD)) == "1"
    assert time.time() - start < 40


def test_ctrl_c_stops_a_build_and_the_process_lives(slow, cache):
    code = f"""
        try:
            {LOAD}
        except KeyboardInterrupt:
            print("stopped")
        {LOAD}
    """
    process = run(slow, code)
    started_compiling(cache)
    process.send_signal(signal.SIGINT)
    assert finished(process) == "stopped\n1"


def test_a_lock_file_left_by_somebody_stops_nothing(project, cache):
    for folder in ("", "scratch", "locks", "objects", "libraries"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
        (cache / folder / "lock").touch()
    assert value(project.loader()) == 1


def test_what_a_build_sets_is_for_its_own_thread(project, monkeypatch):
    """torch takes a build's compiler and architectures from the environment of the process."""
    from torch.utils import cpp_extension

    loader, seen = project.loader(), []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    build = cpp_extension.load

    def look():
        seen.append((Path(loader._cxx()).name, loader.arch_list(), os.environ.get("CXX")))

    def load(*arguments, **more):
        thread.start()
        return build(*arguments, **more)

    thread = threading.Thread(target=look)

    monkeypatch.setattr(cpp_extension, "load", load)
    before = dict(os.environ)
    assert value(loader) == 1
    thread.join()
    look()
    during, after = seen
    assert during == after and dict(os.environ) == before


def test_threads_and_processes_at_once_build_once(slow, cache):
    loader = slow.loader()
    found, code = [], "print(loader.load('scale', backend='cuda').build.compiled)\n" + LOAD
    processes = [run(slow, code) for _ in range(3)]
    threads = [threading.Thread(target=lambda: found.append(value(loader))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = [finished(process).splitlines() for process in processes]
    assert found == [1, 1, 1] and [last for *_, last in outputs] == ["1", "1", "1"]
    assert len(list(cache.glob("libraries/*.so"))) == 1
    assert sum("scale.cpp" in first for first, *_ in outputs) <= 1


def test_a_child_forked_during_a_build_holds_nothing_up(slow, cache):
    code = f"""
        import threading, time
        thread = threading.Thread(target=lambda: loader.load('scale', backend='cuda'))
        thread.start()
        while not list(loader.cache_folder().glob('scratch/*/binding.o.log')): time.sleep(0.05)
        inside = os.environ['CXX']
        if os.fork() == 0:
            print(inside, os.path.basename(os.environ['CXX']), loader._cxx() == os.environ['CXX'])
            sys.stdout.flush()
            time.sleep(60)
            os._exit(0)
        thread.join()
        start = time.time()
        {LOAD}
        print(time.time() - start < 20, os.environ.get('CXX', '').endswith('slow-g++'))
        sys.stdout.flush()
        os.kill(0, 9)
    """
    out, err = run(slow, code, start_new_session=True).communicate(timeout=120)
    stand_in = "three-layers-compiler"  # of the build, in the parent
    assert out.split() == [stand_in, "slow-g++", "True", "1", "True", "True"], err


def test_the_environment_is_left_as_it_was(project, monkeypatch):
    from torch.utils import cpp_extension

    loader = project.loader()
    before, home = dict(os.environ), cpp_extension.CUDA_HOME
    load = cpp_extension.load

    def load_meanwhile(**kwargs):
        os.environ["SET_MEANWHILE"] = "1"  # by another thread, say
        return load(**kwargs)

    monkeypatch.setattr(cpp_extension, "load", load_meanwhile)
    assert value(loader) == 1
    assert os.environ.pop("SET_MEANWHILE") == "1"
    assert (dict(os.environ), cpp_extension.CUDA_HOME) == (before, home)


def test_long_builds_say_that_they_are_alive(slow):
    process = run(slow, LOAD)
    out, err = process.communicate(timeout=120)
    assert out.strip() == "1"
    assert re.search(r"building scale/scale: compiling .*scale\.cpp.*, [23] s", err)


# ---- the toolchain -----------------------------------------------------------------------------


def test_ninja_beside_python_is_found_without_path(project):
    plain = {**os.environ, "PATH": "/usr/bin:/bin"}
    assert finished(run(project, LOAD, env=plain)) == "1"


def test_a_compiler_that_is_not_there(project, monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    loader = project.loader()
    with pytest.raises(loader.ToolchainError, match=r"CXX=ccache g\+\+ is no program"):
        value(loader)


def test_files_that_editors_leave_are_no_rungs(project):
    project.kernel(1, "kernels/scale/1_one.cu")
    (project.folder / "kernels/scale/.#2_two.cu").symlink_to("nowhere")
    (project.folder / "kernels/scale/.~3_three.cu").write_text("")
    assert project.loader().rungs("scale") == ["1_one"]


def test_binding_by_path(project):
    binding = project.folder / "my own $binding.cc"
    binding.write_text("// caf\u00e9\n" + project.CPP, encoding="latin-1")
    loader = project.loader()
    assert value(loader, binding=binding) == 1
    for wrong in ("nowhere.cpp", project.folder / "scale.cu"):
        with pytest.raises(LookupError, match="no C.. file .* to bind scale with"):
            value(loader, binding=wrong)


@pytest.mark.parametrize("flags", ["-DX=1", ["-Iinclude"], ["--gpu-architecture=sm_80"]])
def test_flags_that_cannot_work(project, flags):
    with pytest.raises(ValueError, match="flags"):
        value(project.loader(), flags=flags)


def test_no_ninja_at_all(project, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    loader = project.loader()
    monkeypatch.setattr(loader.shutil, "which", lambda *a, **k: None)
    with pytest.raises(loader.ToolchainError, match="-m pip install ninja"):
        loader._ninja()
    with pytest.raises(loader.ToolchainError, match="apt-get install g"):
        loader._cxx()


def test_cpu_build_of_torch(project, monkeypatch):
    loader = project.loader()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(loader.ToolchainError, match="is a CPU build"):
        value(loader)


def fake_toolkit(folder: Path, version: int) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "bin" / "nvcc").touch(0o755)
    (folder / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return folder


def test_a_toolkit_of_another_version_is_passed_over(project, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "cuda-11.8", 11080)))
    loader = project.loader()
    assert value(loader) == 1
    problems = {where: problem for _, where, _, problem in loader._toolkits()}
    wanted = f"is CUDA 11.8, and this torch is built for CUDA {torch.version.cuda}"
    assert problems["CUDA_HOME"] == wanted


def test_no_usable_toolkit(project, tmp_path, monkeypatch):
    loader = project.loader()
    found = [(tmp_path, "CUDA_HOME", "0.0", "is old")]
    monkeypatch.setattr(loader, "_toolkits", lambda: found)
    with pytest.raises(loader.ToolchainError) as caught:
        value(loader)
    assert f"{tmp_path} (CUDA_HOME) is old" in str(caught.value)
    assert "pip install 'cuda-toolkit[nvcc" in str(caught.value)


def test_nonsense_for_an_architecture(project, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0;banana")
    loader = project.loader()
    with pytest.raises(loader.ToolchainError, match="banana is no architecture"):
        value(loader)


@pytest.mark.parametrize("wrong", ["sm_90a", "90a", "sm_90a+PTX"])
def test_misspelled_architecture(project, monkeypatch, wrong):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wrong)
    loader = project.loader()
    right = wrong.replace("sm_", "").replace("90", "9.0")
    with pytest.raises(loader.ToolchainError, match=re.escape(f"spells {wrong} {right}")):
        value(loader)


@pytest.mark.parametrize(
    ("listed", "gpu", "covered"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("7.5 9.0", (9, 0), True),
        ("Hopper", (9, 0), True),
        ("", (9, 0), True),
    ],
)
def test_architectures_that_miss_the_gpu(project, monkeypatch, listed, gpu, covered):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: gpu)
    loader = project.loader()
    if covered:
        assert loader.arch_list() == (listed.replace(" ", ";") or "9.0a")
    else:
        with pytest.raises(loader.ToolchainError, match="every launch would fail"):
            loader.arch_list()


def test_architecture_flags_are_refused(project):
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST"):
        value(project.loader(), flags=["-arch=sm_80"])


@pytest.mark.parametrize("backend", ["cuda", "simt"])
def test_flags_reach_the_kernel_and_only_the_kernel(project, backend):
    if backend == "simt":
        (project.folder / "simt").symlink_to(ROOT / "simt")
    project.kernel("NUMBER")
    loader = project.loader()
    assert loader.load("scale", backend=backend, flags=["-DNUMBER=8"]).value() == 8
    other = loader.load("scale", backend=backend, flags=("-DNUMBER=9",))
    assert (other.value(), other.build.compiled) == (9, ("scale.cu",))
    refused = ValueError if backend == "simt" else loader.CompileError
    with pytest.raises(refused, match="--nonsense"):
        loader.load("scale", backend=backend, flags=["-DNUMBER=9", "--nonsense"])


def test_half_operators_work_as_in_plain_cuda(project):
    code = "#include <cuda_fp16.h>\n__global__ void add(__half* x) { x[0] = x[0] + x[1] * x[2]; }"
    project.kernel(1, before=code)
    assert value(project.loader()) == 1


def test_cache_folder_that_cannot_be_used(project, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert project.loader().cache_folder() == tmp_path / "home" / "three_layers"
    if os.getuid() == 0:
        os.chown(tmp_path / "home" / "three_layers", 12345, 12345)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert project.loader().cache_folder().parent.name == f"three_layers-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    loader = project.loader()
    with pytest.raises(loader.ToolchainError, match="Set TORCH_EXTENSIONS_DIR"):
        loader.cache_folder()


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("error: #error -- unsupported GNU version! gcc versions later than 15", "CXX=g++-13"),
        ("fatal error: cusparse.h: No such file or directory", "c10/cuda/CUDAStream.h"),
        ("error: 'AT_CHECK' was not declared in this scope", "TORCH_CHECK"),
        ("undefined symbol: _ZNK2at10TensorBase8data_ptrIlEEPT_v", "data_ptr<int64_t>"),
        ("fatal error: error writing to /tmp/x.s: No space left on device", "disk is full"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "MAX_JOBS=1"),
    ],
)
def test_hints(project, tmp_path, said, hint):
    loader = project.loader()
    assert hint in str(loader.CompileError("scale.cu did not compile", said, tmp_path, []))


# ---- doctor and shell --------------------------------------------------------------------------


def test_doctor_names_what_it_found(project, capsys):
    loader = project.loader()
    assert loader.doctor()
    printed = capsys.readouterr().out
    for word in (sys.version.split()[0], torch.__version__, "nvcc", "ninja", "g++", "cache"):
        assert word in printed
    if not torch.cuda.is_available():  # which is no failure
        assert "-    gpu      none" in printed


def test_doctor_fails_with_the_remedy(project, capsys, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    loader = project.loader()
    monkeypatch.setattr(loader.shutil, "which", lambda *a, **k: None)
    assert not loader.doctor()
    assert "apt-get install g++" in capsys.readouterr().out


def test_command_line(project, capsys):
    main = project.loader().main
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "scale/scale\n"
    assert main(["build", "scale", "--backend", "cuda"]) == 0
    assert "compiled scale.cpp, scale.cu" in capsys.readouterr().out
    project.kernel("nonsense")
    assert main(["build", "--backend", "cuda"]) == 1
    assert "CompileError: scale.cu did not compile" in capsys.readouterr().err
    assert main(["build", "scale", "other", "--backend", "cuda"]) == 1
    assert "has no rung" in capsys.readouterr().err
    assert main(["clean"]) == 0
    assert not list(project.loader().cache_folder().glob("objects/*"))
