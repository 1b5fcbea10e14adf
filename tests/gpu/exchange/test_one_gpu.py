"""compute-sanitizer finds no error in the kernels of the exchange, and finds seeded ones: one_gpu.py, peers_of_jax.py.

A test takes minutes, and one at a time fits in any limit:

    python -m pytest tests/gpu/exchange/test_one_gpu.py -k "torch and memcheck and driven"
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mxep import cpp_bindings

from .one_gpu import FAULTS, PARTS, WITHOUT_OVERLAP

ROOT = Path(__file__).parents[3]
NO_ERROR = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed"}
KERNELS = "gather_rows", "sum_rows", "layouts", "homes", "pull_folds", "pulls", "pushes"
OPTIONS = {"memcheck": ("--padding", "4096"), "racecheck": ("--kernel-name", f"regex={'|'.join(KERNELS)}")}
"""Bytes between allocations: without, an access past the end of one may be in the next one. And the kernels of the
exchange. Products and SwiGLU's backward write shared memory again after a barrier at which one lane of each reading
warp arrives, after __syncwarp. The tool reports such writes, also with --racecheck-indirect-barrier-dependency. The
products have a NOP in the place of __syncwarp, which may be why. test_sanitizer.py checks these kernels at small sizes.
"""
LIMIT = 480


def check(tool: str, program: str, *arguments: str) -> str:
    """The output of a program under compute-sanitizer, with one allocation per tensor."""
    assert cpp_bindings.CUDA_OPS, "this build has no CUDA kernels: make install-gpu"
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ["--tool", tool, *OPTIONS[tool]]
    command = [sanitizer, *options, sys.executable, "-m", f"tests.gpu.exchange.{program}", *arguments]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT)
    return run.stdout + run.stderr


def require_no_error(tool: str, output: str, ran: str) -> None:
    assert re.search(f"^ran {ran}$", output, re.MULTILINE), output[-6000:]
    assert NO_ERROR[tool] in output, output[-6000:]


@pytest.mark.parametrize("part", PARTS)
def test_memcheck_of_torch(part: str) -> None:
    require_no_error("memcheck", check("memcheck", "one_gpu", part), part)


@pytest.mark.parametrize("part", ["driven", "overflow", "kernels"])
def test_racecheck_of_torch(part: str) -> None:
    require_no_error("racecheck", check("racecheck", "one_gpu", part), part)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_memcheck_of_torch_finds_a_seeded_fault(fault: str) -> None:
    output = check("memcheck", "one_gpu", "kernels" if fault in WITHOUT_OVERLAP else "driven", fault)
    assert NO_ERROR["memcheck"] not in output, output[-6000:]
    assert re.search(rf"Invalid .*\n(.*\n){{0,2}}.*{FAULTS[fault]}", output), output[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", ["rows", "program"])
@pytest.mark.parametrize("tool", NO_ERROR)
def test_jax(tool: str, part: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("two devices need two GPUs")
    require_no_error(tool, check(tool, "peers_of_jax", part, str(ranks)), f"{part} on {ranks}")
