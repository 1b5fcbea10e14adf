"""FSDP2 with expert parallelism over gloo, four processes at once; the checks themselves are in fsdp_ranks.py."""

from pathlib import Path

import pytest
import torch
from mxep.torch_frontend import clip_grad_norm_
from torch import nn

from ..forked import run_ranks

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
    "one_data_rank",
    "one_data_rank_offloaded",
    "dims_by_name",
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
    return run_ranks(SCRIPT, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS)
def test_over_gloo(ranks: tuple[list[list[str]], str], check: str) -> None:
    passed, errors = ranks
    assert [check in names for names in passed] == [True] * RANKS, errors


def test_no_check_is_forgotten(ranks: tuple[list[list[str]], str]) -> None:
    passed, errors = ranks
    assert passed == [CHECKS] * RANKS, errors


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
