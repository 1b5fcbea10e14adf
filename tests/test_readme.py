"""The README's figures are the recorded ones, and its two programs run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_figures_come_from_the_recorded_lines() -> None:
    """If this fails: `python -m benchmarks.readme`."""
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import readme
    finally:
        sys.path.remove(str(ROOT))
    text = readme.README.read_text()
    assert readme.with_figures(text) == text


@pytest.mark.parametrize(
    ("block", "launcher"),
    [(0, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]), (1, [])],
    ids=["torch", "jax"],
)
def test_the_programs_run(block: int, launcher: list[str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[block])
    run = subprocess.run([sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
