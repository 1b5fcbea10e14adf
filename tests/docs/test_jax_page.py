"""The code blocks of docs/guides/jax.md run, one after the other, in one process; they make four devices of one CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "jax.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    # With the other flags of `make test` programs compile in half of the time.
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(blocks)],
        capture_output=True, text=True, check=False, timeout=300, env=env,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
