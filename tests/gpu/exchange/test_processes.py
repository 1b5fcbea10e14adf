"""Several processes of JAX have the bytes of one, and end when one of them dies: processes_of_jax.py."""

import time

import jax
import pytest
import torch

from .processes_of_jax import WITHOUT_LAST, start

pytestmark = [pytest.mark.several_gpus] if torch.cuda.device_count() > 1 else []


@pytest.mark.parametrize("part", ["rows", "program"])
@pytest.mark.parametrize("count", [2, 4])
def test_bytes(part: str, count: int) -> None:
    """On one GPU for both processes, or on one each."""
    if count > 2 and len(jax.devices("gpu")) < count:
        pytest.skip("four processes need four GPUs")
    failed, text = start(part, count)
    assert not failed, text[-6000:]
    assert text.count(f"ran {part} as rank") == count


@pytest.mark.parametrize("part", WITHOUT_LAST)
def test_a_rank_that_does_not_come_ends_the_others(part: str) -> None:
    begin = time.monotonic()
    failed, text = start(part, 2)
    assert failed == 1, text[-6000:]
    assert "PeerMemory: rank 0 waited 5.0 s for rank 1 of 2, which did not come" in text, text[-6000:]
    assert "rank 0 ended" in text
    assert time.monotonic() - begin < 120
