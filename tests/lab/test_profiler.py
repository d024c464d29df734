"""Nsight Compute's output, as it prints it, and what is said when it cannot measure."""

import pytest
import torch

from lab import child, profiler

PRINTED = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "vector_add_kernel" - 0: 0%....50%....100% - 2 passes
a kernel's printf
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","python3.12","127.0.0.1","void vector_add_kernel<float>(const T1 *, long)","1","7",\
"(256, 1, 1)","(1048576, 1, 1)","0","9.0","Command line profiler metrics",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","%","91.25"
"0","4711","python3.12","127.0.0.1","void vector_add_kernel<float>(const T1 *, long)","1","7",\
"(256, 1, 1)","(1048576, 1, 1)","0","9.0","Command line profiler metrics",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","","1,024"
"1","4711","python3.12","127.0.0.1","second(int)","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","launch__registers_per_thread","register/thread","32"
"""


def test_the_counters_of_each_kernel_are_read():
    first, second = profiler.parse(PRINTED)
    assert first[0] == "vector_add_kernel<float>"
    assert first[1]["dram__throughput.avg.pct_of_peak_sustained_elapsed"] == ("91.25", "%")
    assert first[1]["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"] == ("1,024", "")
    assert second == ("second", {"launch__registers_per_thread": ("32", "register/thread")})


def test_the_table_has_a_sentence_for_each_and_leaves_out_what_was_not_measured():
    text = str(profiler.Profile("vector_add", "1_naive", "float32", profiler.parse(PRINTED)))
    assert "memory throughput  91.25 %  near 90 %" in text
    assert "Tensor Cores" not in text and "n/a" not in text


def test_nothing_measured_is_explained(monkeypatch):
    assert profiler.parse("==PROF== Connected\n") == []
    monkeypatch.setattr(profiler, "_ncu", lambda: "/usr/bin/ncu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("loader.load", lambda *args, **options: None)
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    monkeypatch.setattr(child, "once", lambda *args: (None, said))
    with pytest.raises(profiler.ProfileError, match="An administrator can allow it"):
        profiler.profile("vector_add", "1_naive")
    with pytest.raises(ValueError, match="has no case 'no such'; there is: float32"):
        profiler.profile("vector_add", "1_naive", "no such")
