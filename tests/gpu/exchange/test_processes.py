"""Several processes of JAX have the bytes of one, and end when one of them dies: processes_of_jax.py."""

import os
import signal
import subprocess
import sys
import time

import jax
import pytest
import torch

from .processes_of_jax import HANG, WITHOUT_LAST

pytestmark = [pytest.mark.several_gpus] if torch.cuda.device_count() > 1 else []


def run(part: str, count: int) -> tuple[int, str]:
    """The number of processes that failed, and the output of all. None is left."""
    command = [sys.executable, "-m", "tests.gpu.exchange.processes_of_jax", part, str(count)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=HANG + 20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        pytest.fail(f"no end within {HANG + 20} s: {text[-6000:]}")
    return process.returncode, text


@pytest.mark.parametrize("part", ["rows", "program"])
@pytest.mark.parametrize("count", [2, 4])
def test_bytes(part: str, count: int) -> None:
    """On one GPU for both processes, or on one each."""
    if count > 2 and len(jax.devices("gpu")) < count:
        pytest.skip("four processes need four GPUs")
    failed, text = run(part, count)
    assert not failed, text[-6000:]
    assert text.count(f"ran {part} as rank") == count


@pytest.mark.parametrize("part", WITHOUT_LAST)
def test_a_rank_that_does_not_come_ends_the_others(part: str) -> None:
    begin = time.monotonic()
    failed, text = run(part, 2)
    assert failed == 1, text[-6000:]
    assert "PeerMemory: rank 0 waited 5.0 s for rank 1 of 2, which did not come" in text, text[-6000:]
    assert "rank 0 ended" in text
    assert time.monotonic() - begin < 120
