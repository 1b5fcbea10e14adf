"""No launch whose CTAs wait for each other hangs, even if they cannot run concurrently.

The tests use streams of several priorities, a green context of few SMs, two processes under MPS, and a poll limit of
zero. Results are bitwise equal to the ops that quantize_both_fold, requantize_col_fold and permute_mx_col_fold combine.
Grouped GEMMs wait within a cluster, whose CTAs always run concurrently. A launch waits for the end of the previous one.
"""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.fold.both.plan import quantize_both_fold
from mxep.core_kernels.fold.gathered.plan_permute import permute_mx_col_fold
from mxep.core_kernels.fold.gathered.plan_requantize import requantize_col_fold
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.torch_frontend import force_implementation, ops
from torch import Tensor

from ..cases import DEVICE, floats, same_bytes

ROOT = Path(__file__).parents[3]
PROGRAM = [sys.executable, "-m", "tests.gpu.launch.progress"]
MPS = "nvidia-cuda-mps-control"
EXCHANGE = cpp_bindings.Exchange(Tensor)


@pytest.mark.parametrize("where", ["streams", "green"])
def test_it_finishes_with_the_right_bytes(where: str) -> None:
    """Takes seconds unless a launch hangs."""
    run = subprocess.run([*PROGRAM, where], cwd=ROOT, capture_output=True, text=True, timeout=180)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]


@pytest.fixture
def mps() -> Iterator[dict[str, str]]:
    """Environment of an MPS client. The fixture starts and stops the MPS daemon; its Unix sockets need short paths."""
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        client = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=client, check=True, timeout=30)
        try:
            # The daemon has taken its choice of GPUs: its clients count them anew.
            devices = {"CUDA_VISIBLE_DEVICES": "0"} if "CUDA_VISIBLE_DEVICES" in client else {}
            yield {**client, **devices, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
            servers = subprocess.run(
                [MPS], input="get_server_list\n", env=client, capture_output=True, text=True, timeout=30
            )
            assert servers.stdout.split(), "no process was a client of the service"
        finally:
            subprocess.run([MPS], input="quit\n", env=client, text=True, check=True, timeout=30)


@pytest.mark.skipif(shutil.which(MPS) is None, reason="the driver here has no nvidia-cuda-mps-control")
def test_two_processes_under_mps_finish_with_the_right_bytes(mps: dict[str, str]) -> None:
    """Their CTAs run concurrently; each process has at most half of the SMs."""
    options = {"cwd": ROOT, "env": mps, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    clients = [subprocess.Popen([*PROGRAM, "streams"], **options) for _ in range(2)]
    try:
        texts = [client.communicate(timeout=180)[0].decode() for client in clients]
    finally:
        for client in clients:
            client.kill()
    print(*texts)
    assert [client.returncode for client in clients] == [0, 0], texts


def launch_with(op: KernelOp, inputs: tuple[Tensor, ...], *last: int, **options: int) -> tuple[Tensor, ...]:
    """Runs the op with other values of the launch's last attrs."""
    types = [ArrayType(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in inputs]
    major, _ = torch.cuda.get_device_capability()
    launch = op.launch(*types, arch="sm_90" if major == 9 else "sm_100", **options)
    written = (*launch.out, *launch.scratch)
    outputs = tuple(torch.empty(out.shape, dtype=getattr(torch, out.dtype), device=DEVICE) for out in written)
    attrs = [*launch.cuda_attrs[: -len(last)], *last]
    start = cpp_bindings.CudaLaunch(EXCHANGE, inputs[0].device.index, op.name, types, written, attrs)
    start(inputs, outputs)
    return outputs[: len(op.outputs)]


ENDS = {
    "one group": lambda m: [m],
    "rows past the last group": lambda m: [0, m // 5, m // 5, m // 2, m - 96],
    "no group": lambda m: [],
    "unaligned": lambda m: [m // 5 + 7, m // 2, m],
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(16384, 96), (8192, 160), (8192, 128), (2080, 7168)])
def test_a_warp_that_stops_polling_computes_the_same_maxima(
    shape: tuple[int, int], dtype: torch.dtype, ends: str
) -> None:
    """Shapes: 64 spans of 256 rows that start together; a partial tile; 112 or 56 tiles per row. A warp stops after one
    poll without an answer, or after four.

    Magnitudes increase from span to span, so that a missed span changes the bytes."""
    m, k = shape
    x = floats(np.random.default_rng(k), m, k, dtype=torch.float32).to(DEVICE)
    x *= torch.exp2(torch.arange(m, device=DEVICE).div(300, rounding_mode="floor") % 40 - 20)[:, None]
    x = x.to(dtype)
    multiple = 1 if ends == "unaligned" else 32
    group_ends = torch.tensor([end // multiple * multiple for end in ENDS[ends](m)], dtype=torch.int32, device=DEVICE)
    for options in ({}, {"rounding": 1, "satfinite": True}):
        mx = ops.quantize_row(x)
        row_map = torch.arange(m, dtype=torch.int32, device=DEVICE)
        row_map[::37] = -1
        packed = ops.quantize_row_packed(x), row_map
        with force_implementation("triton"):
            want = ops.quantize_both_fold(x, group_ends, **options)
            requantized = ops.requantize_col_fold(*mx, group_ends, **options)
            mapped = ops.permute_mx_col_fold(*packed, group_ends, **options)
        runs = [(quantize_both_fold, (x, group_ends), want), (requantize_col_fold, (*mx, group_ends), requantized)]
        if packed[0].shape[1] % 4 == 0:  # the kernel takes no others
            runs.append((permute_mx_col_fold, (*packed, group_ends), mapped))
        for polls, (op, given, wanted) in itertools.product((0, 0, 3), runs):
            got = launch_with(op, given, polls, **options)
            same_bytes(op.specified(given, got), op.specified(given, wanted))
