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
    "guides/multi_node.md",
    "api/scale_layouts.md",
    "migrate/megatron.md",
    "migrate/ragged_dot.md",
    "migrate/transformer_engine.md",
)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
RUN = """
import sys
for number, program in enumerate({programs!r}):
    print("program", number, file=sys.stderr)
    exec(compile(program, {page!r}, "exec"), {{"__name__": "__main__"}})
"""


def programs(page: str) -> list[str]:
    """The blocks of a page, for a CPU and with small sizes."""
    small = (DOCS / page).read_text().replace("16384, 2048, 768, 128", "64, 64, 32, 8").replace('"cuda"', '"cpu"')
    return [textwrap.dedent(code) for _, code in BLOCK.findall(small)]


CASES = [(page, frontend) for page in PAGES for frontend in FRONTENDS if any(frontend in p for p in programs(page))]


def test_every_program_is_of_one_framework() -> None:
    found = {page: programs(page) for page in PAGES}
    assert all(sum(frontend in code for frontend in FRONTENDS) == 1 for codes in found.values() for code in codes)


@pytest.mark.parametrize(("page", "frontend"), CASES)
def test_the_programs_run(page: str, frontend: str) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | ranks
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    code = RUN.format(programs=[program for program in programs(page) if frontend in program], page=page)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert ran.returncode == 0, ran.stderr
