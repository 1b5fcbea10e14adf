"""The benchmark of FSDP2's gathers on ranks of a CPU, at small sizes; by name, run by test_fsdp_benchmarks.py."""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.clocks import device_timing, ranks
from benchmarks.models import fsdp_steps


def measured(*only: str) -> list[dict[str, Any]]:
    in_a_row = partial(ranks.in_a_row, rounds=2, groups=1)
    with (
        mock.patch.multiple(device_timing, BATCH_US=1, SETTLE_S=0),
        mock.patch.object(ranks, "in_a_row", in_a_row),
    ):
        return [asdict(line) for line in fsdp_steps.lines(only)]


def other_bytes_are_an_error_on_all_ranks() -> None:
    """One bit of a gradient of one rank; and two sides that gather the same."""
    device = torch.device("cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "ep"))
    ours, theirs, again = (
        fsdp_steps.Side(fsdp_steps.TINY["mixtral-8x7b"], mesh, device, quantized) for quantized in (True, False, False)
    )
    assert fsdp_steps.check(ours, theirs) > (0, 0)
    with pytest.raises(AssertionError, match=r"^fsdp: got (\d+) gathered bytes; expected less than the \1 of values$"):
        fsdp_steps.check(again, theirs)
    found, nbytes = ours.results()
    found["1.moe.experts.w3"].view(torch.int32)[-1, -1, -1] ^= int(dist.get_rank() == 1)
    with (
        mock.patch.object(ours, "results", return_value=(found, nbytes)),
        pytest.raises(AssertionError, match=r"gathered as values: \{'1\.moe\.experts\.w3': 1\}$"),
    ):
        fsdp_steps.check(ours, theirs)


def unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^fsdp: only: got llama; allowed: mixtral-8x7b, qwen3-30b-a3b$"):
        measured("llama", "mixtral-8x7b")


def all_ranks_run_as_many_steps() -> None:
    """However fast each is, and the slowest counts."""
    rank, ran = dist.get_rank(), []

    def step() -> None:
        ran.append(rank)
        time.sleep(0.02 * rank)

    with mock.patch.multiple(device_timing, BATCH_US=60_000, SETTLE_S=0.04):
        found = ranks.in_a_row({"step": step}, torch.device("cpu"), rounds=2, groups=3)["step"]
    assert (found.n, found.us >= 20_000) == (3, True)
    of_ranks = torch.tensor([len(ran), -len(ran)])
    dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX)
    assert of_ranks.tolist() == [len(ran), -len(ran)]


def checks(count: int) -> dict[str, Callable[[], object]]:
    if count == 4:
        return {"mixtral": partial(measured, "mixtral-8x7b")}
    return {
        "all": measured,
        "all_ranks_run_as_many_steps": all_ranks_run_as_many_steps,
        "other_bytes_are_an_error_on_all_ranks": other_bytes_are_an_error_on_all_ranks,
        "unknown_models_are_refused": unknown_models_are_refused,
    }
