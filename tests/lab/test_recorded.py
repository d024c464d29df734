"""The figures of results/, shown again where there is no GPU."""

import pytest

import lab
from lab import collect
from lab.benchmark import BenchReport


def test_what_was_measured_is_shown_as_it_was():
    (path,) = collect.RESULTS.glob("*.json")
    results = collect.read(path)
    row = next(r for r in results["rows"] if r["op"] == "softmax" and r["arm"] == "eager")
    report = lab.recorded("softmax")
    assert isinstance(report, BenchReport)
    assert f"{row['median'] * 1e6:.2f}" in str(report) and results["machine"]["gpu"] in str(report)
    assert "Bars of GB/s for softmax" in report.ladder().alt


def test_what_was_never_measured_is_said():
    with pytest.raises(ValueError, match="softmx is unknown on h200"):
        lab.recorded("softmx")
    with pytest.raises(ValueError, match="no figures of 'b200'; there are those of: h200"):
        lab.recorded("softmax", chip="b200")
