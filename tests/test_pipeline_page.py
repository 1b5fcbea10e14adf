"""The code blocks of docs/pipeline.md run, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "pipeline.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(4))
def test_a_block_runs(number: int) -> None:
    assert len(BLOCKS) == 4
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]], capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert ran.returncode == 0, ran.stderr
