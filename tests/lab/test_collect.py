"""Quoted figures come from measurements, and from nowhere else."""

import importlib

import pytest

from lab import child, collect
from tests.lab.test_benchmark import CEILINGS, MACHINE, report

README = "# Title\n\n<!-- ladder:begin -->\nold\n<!-- ladder:end -->\n\nthe rest\n"
KERNEL = (
    "// 1_naive.cu: title\n// Cost   : n\n// Result : not measured yet\n// Try    : x\n\nint x;\n"
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with measurements of vector_add."""
    for name, value in (("ROOT", tmp_path), ("RESULTS", tmp_path / "results"),
                        ("README", tmp_path / "README.md")):  # fmt: skip
        monkeypatch.setattr(collect, name, value)
    (tmp_path / "README.md").write_text(README)
    for rung in ("1_naive", "3_vectorized", "4_new"):
        path = tmp_path / "kernels" / "vector_add" / f"{rung}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(KERNEL)
    found = report()
    results = {"machine": MACHINE, "ceilings": CEILINGS, "rows": collect._rows(found)}
    collect.write(tmp_path / "results" / "h200.json", results)
    return tmp_path


def test_quoting_fills_the_readme_and_the_kernels(project):
    assert collect.main(["--quote"]) == 0
    readme = (project / "README.md").read_text()
    assert readme.startswith("# Title\n\n<!-- ladder:begin -->\nNVIDIA H200, torch 2.11, CUDA 13.0")
    assert readme.endswith("|\n<!-- ladder:end -->\n\nthe rest\n") and "old" not in readme
    assert (
        "| vector_add, float32 (268435456,) | 1_naive | 800.0 | 4027 GB/s | 0.96 | 0.92 |  |"
    ) in readme
    assert "| 3_vectorized | 745.0 | 4324 GB/s | 1.03 | 0.99 |" in readme and "eager |" in readme

    def kernel(rung):
        return (project / f"kernels/vector_add/{rung}.cu").read_text()

    line = "// Result : 1.03 of copy, 1.07x rung 1, 0.99x eager  "
    line += "(H200, float32 (268435456,), CUDA 13.0)"
    assert kernel("3_vectorized") == KERNEL.replace("// Result : not measured yet", line)
    assert "0.96 of copy, 0.92x eager  (H200" in kernel("1_naive")
    assert kernel("4_new") == KERNEL
    assert collect.unfounded() == []


@pytest.mark.parametrize("file", ["README.md", "kernels/vector_add/3_vectorized.cu"])
def test_a_figure_without_a_measurement_is_found(project, file):
    collect.main(["--quote"])
    path = project / file
    path.write_text(path.read_text().replace("1.03", "1.09"))
    (found,) = collect.unfounded()
    assert found.startswith(file)


def test_a_kernel_that_lost_its_result_line_is_found(project):
    collect.main(["--quote"])
    path = project / "kernels/vector_add/4_new.cu"
    path.write_text("int x;\n")
    assert collect.unfounded() == ["kernels/vector_add/4_new.cu: no Result line"]


def test_rows_that_cannot_be_believed_are_not_kept():
    found = report()
    found.rows[0].problem = "130% of the copy ceiling"
    assert [row["arm"] for row in collect._rows(found)][:2] == ["2_grid_stride", "3_vectorized"]


def test_results_are_a_row_a_line_and_read_back(project):
    path = project / "results/h200.json"
    results = collect.read(path)
    assert len(results["rows"]) == 7 and results["machine"] == MACHINE
    assert sum(line.startswith('  {"op"') for line in path.read_text().splitlines()) == 7


def test_measuring_keeps_what_it_does_not_measure_and_names_what_failed(monkeypatch):
    calls = []

    def bench(op, against, cases):
        calls.append((op, against, cases))
        if len(cases) > 1:
            raise child.Died("the kernel hangs")
        return report()

    monkeypatch.setattr(collect, "bench", bench)
    first = report().rows[0].case
    other = importlib.import_module("ops.vector_add").bench_cases()[1].name
    results = {"rows": [{"op": "softmax"}, {"op": "vector_add", "case": first, "arm": "old"},
                        {"op": "vector_add", "case": other, "arm": "measured before"},
                        {"op": "vector_add", "case": "of yore", "arm": "no case now"}]}  # fmt: skip
    assert collect.measure("vector_add", results, False) == ["vector_add: the kernel hangs"]
    assert collect.measure("no_such", results, True) == ["no_such: there is no ops/no_such.py"]
    assert calls[0][1] == ["eager", "compile"] and len(calls[0][2]) > 1 and calls[0][2][0] != first
    assert collect.measure("vector_add", results, True) == []
    assert calls[1] == ("vector_add", ["eager", "compile"], [first])
    assert [row["op"] for row in results["rows"]] == ["softmax"] + ["vector_add"] * 7
    results["rows"].append({"op": "vector_add", "case": other, "arm": "kept"})
    assert collect.measure("vector_add", results, True) == []
    assert results["rows"][-1]["arm"] == "kept"


def test_nothing_to_quote_is_said(project, capsys):
    (project / "results/h200.json").unlink()
    assert collect.main(["--quote"]) == 1
    assert "results/ is empty" in capsys.readouterr().err


def test_every_figure_this_project_quotes_has_a_measurement_behind_it():
    assert collect.unfounded() == []
