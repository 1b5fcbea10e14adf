"""PeerMemory without GPUs: two processes with kernels in Triton's interpreter (peer_ranks.py), and its errors."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from mxep.torch_frontend import PeerMemory

RANKS = 2
ROOT = Path(__file__).parents[3]
SCRIPT = ("-m", "tests.torch_frontend.overlap.peer_ranks")
CHECKS = [
    "routings",
    "all transfers",
    "no transfer",
    "bf16",
    "folded",
    "rows",
    "rows in all transfers",
    "layers",
    "layers of all rows",
    "overflow",
    "refused",
    "more rows",
    "skips forward 0",
    "skips backward 0",
]


def test_two_ranks_have_the_bytes_of_no_transport(tmp_path: Path) -> None:
    commands = [[sys.executable, *SCRIPT, str(rank), str(RANKS), str(tmp_path)] for rank in range(RANKS)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(c, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for c in commands
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = [tmp_path / f"rank{rank}" for rank in range(RANKS)]
    passed = [file.read_text().splitlines() if file.exists() else [] for file in files]
    assert passed == [CHECKS] * RANKS, "\n".join(errors)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="PeerMemory: rows: got 0"):
        PeerMemory(rows=0)
    with pytest.raises(TypeError, match="PeerMemory: width: got"):
        PeerMemory(width=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout: got 3"):
        PeerMemory(timeout=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout"):
        PeerMemory(timeout=timedelta(0))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="PeerMemory: group: got no CUDA; allowed: GPUs of one host"):
        PeerMemory()
