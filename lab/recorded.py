"""The figures in ``results/``, shown as ``bench`` shows its own: for a machine without a GPU."""

import loader
from lab.benchmark import BenchReport, Row
from lab.collect import RESULTS, read


def recorded(op: str, chip: str | None = None) -> BenchReport:
    """What ``make bench`` measured for an operator, on the GPU that ``machine`` names.

    Args:
        op: the operator.
        chip: a file in ``results/``, without its ``.json``; the one measured last for None.

    Raises:
        ValueError: there are no figures of that operator or chip.
    """
    files = {path.stem: read(path) for path in RESULTS.glob("*.json")}
    if chip is None and files:
        chip = max(files, key=lambda name: files[name]["machine"]["date"])
    if chip not in files:
        raise ValueError(f"no figures of {chip!r}; there are those of: {', '.join(files) or '–'}")
    results = files[chip]
    rows = [row for row in results["rows"] if row["op"] == op]
    if not rows:
        known = "never measured" if op in loader.ops() else "unknown"
        raise ValueError(f"{op} is {known} on {chip}: make bench measures it")
    rows = [Row(**{key: value for key, value in row.items() if key != "op"}) for row in rows]
    return BenchReport(op, results["machine"], results["ceilings"], rows)
