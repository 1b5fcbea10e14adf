"""FSDP2 with expert parallelism over gloo, four processes at once; the checks themselves are in fsdp_ranks.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
RANKS = 4
CHECKS = [
    "trains_as_one_process[2]",
    "trains_as_one_process[4]",
    "optimizers",
    "accumulates",
    "overlaps",
    "recomputes",
    "mixed_precision",
    "experts_in_parts",
    "checkpoints_between_degrees",
    "metrics_of_ranks",
    "norms_over_meshes",
    "pipeline_of_two_stages",
    "page",
    "refused",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """The checks that each rank passed, and what the ranks wrote to stderr."""
    out = tmp_path_factory.mktemp("ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commands = [[sys.executable, str(SCRIPT), str(rank), str(store.port), str(out)] for rank in range(RANKS)]
    processes = [subprocess.Popen(c, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for c in commands]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = [out / f"rank{rank}" for rank in range(RANKS)]
    return [file.read_text().splitlines() if file.exists() else [] for file in files], "\n".join(errors)


@pytest.mark.parametrize("check", CHECKS)
def test_over_gloo(ranks: tuple[list[list[str]], str], check: str) -> None:
    passed, errors = ranks
    assert [check in names for names in passed] == [True] * RANKS, errors


def test_no_check_is_forgotten(ranks: tuple[list[list[str]], str]) -> None:
    passed, errors = ranks
    assert passed == [CHECKS] * RANKS, errors
