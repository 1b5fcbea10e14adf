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
NO_ERROR = "ERROR SUMMARY: 0 errors"
OPTIONS = {"memcheck": ("--padding", "4096"), "racecheck": ("--print-limit", "1000")}
"""Bytes between allocations: without, an access past the end of one may be in the next one."""
KERNELS = "gather_rows", "sum_rows", "layouts", "homes", "pull_folds", "pulls", "pushes"
"""racecheck speaks of these here, of all others in test_sanitizer.py, at small sizes. In long programs it also reports
products and SwiGLU's backward, which write shared memory again after a barrier at which one lane of each reading warp
arrives, after __syncwarp. The machine code has a NOP in the place of __syncwarp, which may be why. With --kernel-name
it ends with an error of its own."""
HAZARD = re.compile(r"Race reported between (.*)\n=+ +and (.*)")
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
    if tool == "memcheck":
        assert NO_ERROR in output, output[-6000:]
        return
    displayed = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", output)
    hazards = HAZARD.findall(output)
    assert displayed, output[-6000:]
    assert len(hazards) == int(displayed[1]), output[-6000:]
    ours = [hazard for hazard in hazards if re.search(rf"\b({'|'.join(KERNELS)})\b", " ".join(hazard))]
    assert not ours, ours


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
    assert NO_ERROR not in output, output[-6000:]
    assert re.search(rf"Invalid .*\n(.*\n){{0,2}}.*{FAULTS[fault]}", output), output[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", ["rows", "program"])
@pytest.mark.parametrize("tool", OPTIONS)
def test_jax(tool: str, part: str, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("two devices need two GPUs")
    require_no_error(tool, check(tool, "peers_of_jax", part, str(ranks)), f"{part} on {ranks}")
