"""What the machine costs, fast and checked, best of seven: run it with python."""

from __future__ import annotations

import tempfile
from pathlib import Path

from simt_build import Builder, run

with tempfile.TemporaryDirectory() as folder:
    for check in (False, True):
        program = Builder(Path(folder) / str(check), check).program(
            Path(__file__).with_name("costs.cu")
        )
        print("checked" if check else "fast", run(str(program)), sep="\n", end="")
