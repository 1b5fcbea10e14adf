"""The notebooks of examples/quickstart: their code cells run on a CPU, and the repository has no outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "quickstart"
# As the kernel of a notebook: one namespace for all cells. A thread of Gloo outlives the last cell, and can abort
# Python's finalization: the process ends before it.
RUN = """
import json, os, sys
names = {"__name__": "__main__"}
for number, source in json.loads(sys.stdin.read()):
    exec(compile(source, f"cell {number}", "exec"), names)
sys.stdout.flush()
os._exit(0)
"""


def cells(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / name).read_text())["cells"]


@pytest.mark.parametrize("name", ["torch.ipynb", "jax.ipynb"])
def test_the_cells_run(name: str) -> None:
    """The cells have assertions of their own."""
    code = [(number, "".join(cell["source"])) for number, cell in enumerate(cells(name)) if cell["cell_type"] == "code"]
    assert sum("assert " in source for _, source in code) >= 5
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    command, text = [sys.executable, "-c", RUN], json.dumps(code)
    ran = subprocess.run(command, input=text, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    first, last = [
        float(x) for line in ran.stdout.splitlines() if line.startswith("first ") for x in line.split()[1::2]
    ]
    assert last < 0.5 * first


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_outputs_are_stripped(path: Path) -> None:
    code = [cell for cell in cells(path.name) if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}
