"""FSDP2 with expert parallelism over gloo; the checks are in fsdp_ranks.py and, of quantized_gather, in
fsdp_gather_ranks.py."""

import pytest
import torch
from mxep.torch_frontend import clip_grad_norm_
from torch import nn

from ...ranks.fixture import Ranks, StartRanks, with_slow
from . import fsdp_gather_ranks, fsdp_ranks

RANKS = 4
OFTEN = "mixed", "held", "checkpointed", "by_hand", "fold", "blockwise"
SLOW = [f"same_bits_{name}" for name in fsdp_gather_ranks.VARIANTS if name not in OFTEN]
"""Of four ranks."""


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(fsdp_ranks, RANKS)


@pytest.mark.parametrize("check", fsdp_ranks.checks(RANKS))
def test_over_gloo(ranks: Ranks, check: str) -> None:
    ranks.run(check)


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(fsdp_gather_ranks, 2)


@pytest.fixture(scope="module")
def four(start_ranks: StartRanks) -> Ranks:
    return start_ranks(fsdp_gather_ranks, 4)


@pytest.mark.parametrize("check", fsdp_gather_ranks.checks(2))
def test_two_ranks_gather_bytes(two: Ranks, check: str) -> None:
    two.run(check)


@pytest.mark.parametrize("check", with_slow(fsdp_gather_ranks.checks(4), SLOW))
def test_four_ranks_gather_bytes(four: Ranks, check: str) -> None:
    four.run(check)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_clip_grad_norm_raises_for_a_norm_that_is_not_finite(bad: float) -> None:
    """Before it scales a gradient; without error_if_nonfinite it returns the norm, as torch's function."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    gradients = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([0.0, bad, 0.0])
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(clip_grad_norm_(weights, 1.0), torch.tensor(bad), equal_nan=True)
