"""The programs of the pages of docs/ that have no test of their own run, on a CPU, with small sizes.

A program is a block of code in a tab or outside; the programs of a framework run one after the other in one process,
each with its own names. PyTorch: as the only rank of a group. JAX: with two devices.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FRONTENDS = ("torch_frontend", "jax_frontend")
PAGES = (
    "getting-started/quick_start.md",
    "getting-started/quick_start_ep.md",
    "concepts/mxfp8.md",
    "guides/choose_recipe.md",
    "guides/choose_exchange.md",
    "guides/memory.md",
    "guides/metrics.md",
    "api/scale_layouts.md",
    "migrate/megatron.md",
    "migrate/ragged_dot.md",
    "migrate/transformer_engine.md",
)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
RUN = """
import sys
for page, program in {programs!r}:
    print(page, file=sys.stderr)
    exec(compile(program, page, "exec"), {{"__name__": "__main__"}})
    if "torch" in sys.modules:
        sys.modules["torch"].set_default_device(None)
"""


def programs(page: str) -> list[str]:
    """The blocks of a page, for a CPU and with small sizes."""
    small = (DOCS / page).read_text().replace("16384, 2048, 768, 128", "64, 64, 32, 8").replace('"cuda"', '"cpu"')
    return [textwrap.dedent(code) for _, code in BLOCK.findall(small)]


def test_every_program_is_of_one_framework() -> None:
    found = {page: programs(page) for page in PAGES}
    assert all(sum(frontend in code for frontend in FRONTENDS) == 1 for codes in found.values() for code in codes)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_programs_run(frontend: str, tmp_path: Path) -> None:
    """In one process: to import a framework takes longer than all programs. They write to tmp_path."""
    found = [(page, program) for page in PAGES for program in programs(page) if frontend in program]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | ranks
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    run = [sys.executable, "-c", RUN.format(programs=found)]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
