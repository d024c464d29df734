"""What compute-sanitizer prints, and what is left of it for a learner."""

import pytest

from lab import sanitizer

MEMCHECK = """\
========= COMPUTE-SANITIZER
a kernel's printf
========= Invalid __global__ read of size 4 bytes
=========     at void vector_add_kernel<float>(const T1 *, T1 *, long)+0x140 in mine.cu:22
=========     by thread (1,0,0) in block (0,0,0)
=========     Access to 0x7f4740800004 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f4740800000 of size 4 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in mine.cu:30 [0x1234] in mine.so
=========
========= Invalid __global__ write of size 4 bytes
=========     at void vector_add_kernel<float>(const T1 *, T1 *, long)+0x160 in mine.cu:22
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at k(float *)+0x90 in mine.cu:7
=========     and Read access at k(float *)+0xc0 in mine.cu:8 [124 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_each_fault_keeps_its_place_and_loses_the_host_frames():
    first, second = sanitizer.findings(MEMCHECK)
    assert first.splitlines() == [
        "Invalid __global__ read of size 4 bytes",
        "  at void vector_add_kernel<float>(const T1 *, T1 *, long)+0x140 in mine.cu:22",
        "  by thread (1,0,0) in block (0,0,0)",
        "  Access to 0x7f4740800004 is out of bounds",
        "  and is 1 bytes after the nearest allocation at 0x7f4740800000 of size 4 bytes",
    ]
    assert second.startswith("Invalid __global__ write") and "SUMMARY" not in second


def test_a_race_names_both_lines():
    (race,) = sanitizer.findings(RACECHECK)
    assert "mine.cu:7" in race and "mine.cu:8 [124 hazards]" in race


def test_nothing_found_is_nothing():
    assert (
        sanitizer.findings("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []
    )


def test_wrong_tool_and_missing_program_are_explained(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="sanitize must be one of memcheck, racecheck"):
        sanitizer.run("valgrind", "lab.checker:run", (), 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="comes with NVIDIA's CUDA toolkit. Without it"):
        sanitizer.run("memcheck", "lab.checker:run", (), 1)
