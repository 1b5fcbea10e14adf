"""Training steps of a model on ranks of a CPU, sharded by FSDP2; by name, run by test_step_ranks.py."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.cases.models import sizes
from benchmarks.cases.models.training import Batches, Training
from benchmarks.clocks import device_timing, training_steps
from benchmarks.models import torch_steps

BATCHES = Batches(sequences=2, length=32, micro_batches=2, steps=2)
MODEL = sizes.small(sizes.MODELS["mixtral-8x7b"])
LR = 1e-2


def measured() -> list[dict[str, Any]]:
    in_a_row = partial(device_timing.in_a_row, rounds=2, groups=1)
    steps = partial(training_steps.training_steps, rounds=2, steps=1)
    with (
        mock.patch.multiple(device_timing, BATCH_US=1, SETTLE_S=0, in_a_row=in_a_row),
        mock.patch.object(torch_steps, "training_steps", steps),
    ):
        return [asdict(line) for line in torch_steps.lines([], {"mixtral-8x7b": MODEL}, BATCHES, "cpu")]


def trains_as_one_process() -> tuple[list[float], list[float]]:
    """The losses of steps with sharded weights, and of one process with the tokens of all ranks."""
    torch_steps.register_experts("mxfp8")
    ranks, one = dist.get_world_size(), BATCHES._replace(sequences=BATCHES.sequences * dist.get_world_size())
    found, sharded, whole = [], Training(MODEL, 2, BATCHES, "cpu", LR), Training(MODEL, 2, one, "cpu", LR, whole=True)
    of_ranks = [torch.empty_like(sharded.ids) for _ in range(ranks)]
    dist.all_gather(of_ranks, sharded.ids)
    whole.ids = torch.cat(of_ranks, 2)
    for training in (sharded, whole):
        training.use("mxfp8")
        losses = [float(training.step()) for _ in range(4)]
        training.restart(LR)
        assert [float(training.step()) for _ in range(2)] == losses[:2]
        found.append(losses)
    return found[0], found[1]


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    torch.compile = lambda f, **_: f  # type: ignore[assignment]
    torch.set_num_threads(1)
    return {"measured": measured, "trains_as_one_process": trains_as_one_process}
