"""Expert parallelism over NCCL trains as one process does. Every GPU of the machine (up to eight) runs one process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ...torch_frontend.exchange.test_ep_errors import run_two_ranks

SCRIPT = ("-m", "tests.gpu.exchange.ranks")


def test_ranks_on_gpus_train_as_one_process() -> None:
    ranks = min(torch.cuda.device_count(), 8)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run([*launcher, *SCRIPT], capture_output=True, text=True, timeout=600)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-8000:]
    assert f"{ranks} ranks: {11 if ranks > 1 else 8} checks passed" in run.stdout
    if ranks > 1:
        assert "Poisoned: 20 checks passed" in run.stdout
        assert "CopyEngines: 20 checks passed" in run.stdout
        assert "PeerMemory: 31 checks passed" in run.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank that waits for another needs two GPUs")
@pytest.mark.parametrize("transport", ["CopyEngines", "PeerMemory", "Collectives"])
def test_a_rank_with_an_error_ends_the_others(transport: str) -> None:
    ranks = min(torch.cuda.device_count(), 8)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = subprocess.run([*launcher, *SCRIPT, "alone", transport], capture_output=True, text=True, timeout=300)
    assert "rank 0 ended as it should" in run.stdout, run.stdout + run.stderr[-8000:]
    if transport == "Collectives":
        assert run.returncode, "the others went on"
        assert "rank 1" not in run.stdout, run.stdout
        assert "watchdog" in run.stderr.lower(), run.stderr[-8000:]
    else:
        assert run.stdout.count("ended as it should") == ranks, run.stdout + run.stderr[-8000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need two GPUs")
def test_an_error_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    run_two_ranks(tmp_path, "nccl")
