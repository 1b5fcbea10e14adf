"""The rows of the table on ranks over Gloo, by name; test_torch_ranks.py runs them."""

from collections.abc import Callable
from functools import cache, partial

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .table import TORCH, Row, all_rows, allowed, name_of, pairwise
from .torch_layers import contracts_alone, contracts_of_ranks


@cache
def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def contracts(row: Row) -> None:
    if row["exchange"] == "one process":
        contracts_alone(row, "cpu")
    else:
        contracts_of_ranks(row, world())


def part_of(row: Row) -> str:
    return f"product-{row['exchange']}-{row['recipe']}"


def product_of(part: str) -> None:
    for row in all_rows(TORCH, allowed):
        if part_of(row) == part:
            try:
                contracts(row)
            except AssertionError as error:
                raise AssertionError(name_of(row)) from error


PRODUCT = tuple(dict.fromkeys(map(part_of, all_rows(TORCH, allowed))))


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        **{name_of(row): partial(contracts, row) for row in pairwise(TORCH, allowed)},
        **{part: partial(product_of, part) for part in PRODUCT},
    }
