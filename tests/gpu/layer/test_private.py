"""On a GPU too, a layer has the same bytes without the private names of torch."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "torch_frontend" / "ops" / "without_private.py"


def test_a_layer_has_the_same_bytes_without_private_names() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT), "cuda"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found[""]) == len(found["in triton"]) == 64, found
    assert found["all but the table"] == found[""]
    assert found["all"] == found["in triton"]
