"""What is wrong on one rank raises on all: two processes over gloo, over NCCL from tests/gpu/exchange/test_ranks.py;
the checks themselves are in ep_errors.py."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ep_errors.py")
CHECKS = [
    "bad_arguments_of_overlapped_experts",
    "bad_arguments_of_dispatch",
    "ranks_of_a_layer_that_differ",
    "experts_that_nobody_agreed_on",
    "counts_of_two_dtypes",
    "bad_arguments_of_an_all_to_all",
    "groups_that_are_none",
    "bad_arguments_of_parallel_experts",
]


def test_two_ranks(tmp_path: Path) -> None:
    run_two_ranks(tmp_path, "gloo")


def run_two_ranks(tmp_path: Path, backend: str) -> None:
    paths = [str(tmp_path / "store"), str(tmp_path)]
    commands = [[sys.executable, str(SCRIPT), str(rank), *paths, backend] for rank in (0, 1)]
    ranks = [subprocess.Popen(c, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for c in commands]
    try:
        errors = "\n".join(rank.communicate(timeout=120)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    files = [tmp_path / f"rank{rank}" for rank in (0, 1)]
    assert [file.read_text().split() if file.exists() else [] for file in files] == [CHECKS] * 2, errors
    assert [rank.returncode for rank in ranks] == [0, 0], errors
