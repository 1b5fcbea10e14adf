"""Many steps of a layer on two ranks over gloo, by each exchange; run by test_ep_long_run.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...frontends.long_run import Held, measure
from .ep_world import D, mesh_of, parallel_layer

RANKS = 2
EXCHANGES: dict[str, dict[str, Any]] = {
    "AllToAll": {},
    "AllToAll dispatch": {"deduplicate": "dispatch"},
    "AllToAll both": {"deduplicate": "both"},
}
LENGTHS = {"100": (100, 50), "2000": (2_000, 1_000)}
"""Of runs: all steps, and the steps after which growth counts."""


def run(exchange: str, length: str) -> tuple[Held, Held]:
    moe, _ = parallel_layer(RANKS, **EXCHANGES[exchange])
    optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)

    def step(number: int) -> None:
        y = moe(torch.randn(16 + number % 7, D))[0]
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure(step, *LENGTHS[length])


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS == mesh_of(RANKS).size() == dist.get_world_size()
    return {f"{exchange}, {length}": partial(run, exchange, length) for exchange in EXCHANGES for length in LENGTHS}
