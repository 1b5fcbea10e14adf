"""Expert parallelism over NCCL trains as one process does. Every GPU of the machine (up to eight) runs one process."""

import subprocess
import sys

import pytest
import torch

from ...ranks.fixture import Ranks, StartRanks
from ...torch_frontend.exchange import ep_errors
from . import ranks

SCRIPT = ("-m", "tests.gpu.exchange.ranks")
RANKS = min(torch.cuda.device_count(), 8)
pytestmark = [pytest.mark.several_gpus] if RANKS > 1 else []
two_gpus = pytest.mark.skipif(RANKS < 2, reason="a rank that waits for another needs two GPUs")


@pytest.fixture(scope="module")
def on_gpus(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ranks, RANKS, backend="nccl", limit=ranks.LIMIT.total_seconds())


@pytest.mark.parametrize("check", ranks.checks(RANKS))
def test_ranks_on_gpus_train_as_one_process(on_gpus: Ranks, check: str) -> None:
    on_gpus.run(check)


@two_gpus
def test_a_rank_with_an_error_ends_the_others() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    run = subprocess.run([*launcher, *SCRIPT, "alone"], capture_output=True, text=True, timeout=300)
    assert "rank 0 ended as it should" in run.stdout, run.stdout + run.stderr[-8000:]
    assert run.stdout.count("ended as it should") == RANKS, run.stdout + run.stderr[-8000:]


@pytest.fixture(scope="module")
def two_ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ep_errors, ep_errors.RANKS, backend="nccl", limit=30)


@two_gpus
@pytest.mark.parametrize("check", ep_errors.checks(ep_errors.RANKS))
def test_an_error_on_one_rank_raises_on_all(two_ranks: Ranks, check: str) -> None:
    two_ranks.run(check)
