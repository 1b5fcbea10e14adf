"""docs/conformance.md: its example prints what it shows, its tables are of the stored reports, and these still hold."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mxep.core_kernels.conformance.cases import CONFORMANCE
from mxep.core_kernels.conformance.table import DOCUMENTED

from ..conformance.libraries import store

PAGE = store.PAGE.read_text()


def test_the_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    assert len(program.partition("def ")[2].splitlines()) <= 10
    (tmp_path / "my_backend.py").write_text(program)
    environment = os.environ | {"PYTHONWARNINGS": "error::RuntimeWarning"}
    command = [sys.executable, "-m", "mxep.conformance", "my_backend"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert (ran.stdout, ran.stderr, ran.returncode) == (shown, "", 1)


def test_the_functions_of_the_page_are_the_documented_ones() -> None:
    functions = PAGE.partition("## Functions")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)\(", functions, re.MULTILINE)) == DOCUMENTED
    count, ops = map(int, re.search(r"about (\d+) cases of (\d+) ops", PAGE).groups())  # type: ignore[union-attr]
    assert abs(len(CONFORMANCE) - count) < 100
    assert len({case.op for case in CONFORMANCE.values()}) == ops


def test_the_tables_are_of_the_stored_reports() -> None:
    assert store.with_tables(PAGE) == PAGE
    assert {path.stem for path in store.STORED.iterdir()} == store.NAMES.keys()


@pytest.mark.parametrize(
    "name",
    [
        *(name for name, title in store.NAMES.items() if title.endswith("*")),
        "onnx",
        pytest.param("gfloat", marks=pytest.mark.slow),
    ],
)
def test_a_stored_report_holds(name: str) -> None:
    """Of formulas, and of libraries with one version in constraints.txt. Others are not installed or of any version."""
    stored = json.loads((store.STORED / f"{name}.json").read_text())
    assert store.run_library(name) == stored
    assert bool(stored["source"]) == store.NAMES[name].endswith("*")
