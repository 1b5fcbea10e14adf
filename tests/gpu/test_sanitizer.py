"""compute-sanitizer finds no error in small runs: memcheck of every op, racecheck of the CUDA C++ ops."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mxep import cpp_bindings

from .cases import CASES

ROOT = Path(__file__).parents[2]
IN_CUDA = [name for name, case in CASES.items() if case.op in cpp_bindings.CUDA_OPS]


@pytest.mark.parametrize(
    ("tool", "implementations", "names", "summary"),
    [
        ("memcheck", ["cuda", "triton"], list(CASES), "ERROR SUMMARY: 0 errors"),
        ("racecheck", ["cuda"], IN_CUDA, "RACECHECK SUMMARY: 0 hazards displayed"),
    ],
)
def test_no_error(tool: str, implementations: list[str], names: list[str], summary: str) -> None:
    assert names, "this build has no CUDA kernels: make install-gpu"
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [sanitizer, "--tool", tool, sys.executable, "-m", "tests.gpu.sanitize", *implementations]
    # One allocation per tensor: inside a block of torch's allocator the tool cannot detect an access out of bounds.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    output = run.stdout + run.stderr
    assert run.returncode == 0, output[-4000:]
    assert re.findall(r"^ran (\w+) in", output, re.MULTILINE) == names, output[-4000:]
    assert summary in output, output[-4000:]
