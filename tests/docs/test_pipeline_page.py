"""The code blocks of docs/concepts/pipeline.md and docs/guides/routing.md run, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


ROUTING = blocks("guides/routing.md")
BLOCKS = [*blocks("concepts/pipeline.md"), *("\n".join(ROUTING[i::2]) for i in range(2))]
"""PyTorch and JAX take turns. The blocks of routing.md are short: all blocks of a framework run in one process."""


@pytest.mark.parametrize("number", range(6))
def test_a_block_runs(number: int) -> None:
    assert len(ROUTING) == 4
    assert len(BLOCKS) == 6
    # Of a flag that is set twice the last value holds.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert ran.returncode == 0, ran.stderr
