"""The example of backends/README.md runs as an adapter, and a wrong one fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (HERE / "backends" / "README.md").read_text(), re.S)
FILES = [
    *(str(HERE / name) for name in ("test_backends.py", "quantize/test_quantize.py", "quantize/test_cases.py")),
    str(HERE / "routing" / "test_cases_permute.py"),
]


def run(folder: Path, source: str) -> str:
    """The last line of pytest and its errors, with `source` as the adapter."""
    (folder / "adapter_of_mine.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", "adapter_of_mine", *FILES]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CI": "false"}
    ran = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False)
    return "".join(ran.stdout.strip().splitlines()[-1:]) + ran.stderr


@pytest.mark.parametrize(
    ("correct", "wrong"),
    [("", ""), ("return padded[row_map]", "return x[row_map]")],
    ids=["the example", "a wrong byte"],
)
def test_the_example(tmp_path: Path, correct: str, wrong: str) -> None:
    assert correct in EXAMPLE
    last = run(tmp_path, EXAMPLE.replace(correct, wrong) if correct else EXAMPLE)
    assert ("failed" in last) == bool(correct), last
    assert re.search(r"\d+ passed", last), last


def test_an_unknown_op_is_refused(tmp_path: Path) -> None:
    assert '"permute_rows": permute' in EXAMPLE
    said = run(tmp_path, EXAMPLE.replace('"permute_rows": permute', '"no_such_op": permute'))
    assert "ERROR: --backend adapter_of_mine: mxep.conformance: OPS: got 'no_such_op'; allowed: " in said
