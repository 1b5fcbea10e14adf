"""sort_by_expert, row_map, slot_map, permute_rows, permute_mx: exact bytes."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.permute import oracle as permute_oracle
from mxep.core_kernels.routing import oracle as routing_oracle

from .. import check
from ..cases import BF16, MAPS, SORTS

Ops = Mapping[str, Callable]


@pytest.mark.parametrize("name", SORTS)
def test_sort_by_expert(ops: Ops, name: str) -> None:
    expert_ids, num_experts = SORTS[name]
    got = ops["sort_by_expert"](expert_ids, num_experts=num_experts)
    check.same_bytes(got, routing_oracle.sort_by_expert(expert_ids, num_experts))


@pytest.mark.parametrize("name", MAPS)
def test_row_map(ops: Ops, name: str) -> None:
    case = MAPS[name]
    check.same_bytes(ops["row_map"](case.flat, **case.options), routing_oracle.row_map(case.flat, **case.options))


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 3, "alignment": 96}], ids=["rows", "tokens"])
@pytest.mark.parametrize("name", SORTS)
def test_slot_map(ops: Ops, name: str, options: Mapping[str, int]) -> None:
    expert_ids, num_experts = SORTS[name]
    order, _, counts = routing_oracle.sort_by_expert(np.repeat(expert_ids, options["top_k"]), num_experts)
    weights = np.arange(1, len(order) + 1, dtype=np.float32)
    for given in (weights, weights[:0]):
        arrays = counts, order, given
        check.same_bytes(ops["slot_map"](*arrays, **options), routing_oracle.slot_map(*arrays, **options))


def random_rows(name: str, rows: int, dtype: np.dtype, width: int) -> np.ndarray:
    """Rows of raw bytes, NaN patterns among them: a gather copies bits."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 256, (rows, width * np.dtype(dtype).itemsize), np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32), np.dtype(np.uint8)], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_permute_rows_there_and_back(ops: Ops, name: str, dtype: np.dtype) -> None:
    case = MAPS[name]
    row_map, inverse, *_ = routing_oracle.row_map(case.flat, **case.options)
    x = random_rows(name, case.num_rows, dtype, 33 if dtype.itemsize == 1 else 40)
    padded = ops["permute_rows"](x, row_map)
    bits = np.dtype(f"u{dtype.itemsize}")
    check.same_bytes(padded.view(bits), permute_oracle.permute_rows(x, row_map).view(bits))
    check.same_bytes(
        ops["permute_rows"](padded, inverse).view(bits), permute_oracle.permute_rows(padded, inverse).view(bits)
    )


@pytest.mark.parametrize("k", [32, 160])
@pytest.mark.parametrize("name", MAPS)
def test_permute_mx(ops: Ops, name: str, k: int) -> None:
    case = MAPS[name]
    row_map = routing_oracle.row_map(case.flat, **case.options)[0]
    packed = random_rows(name, case.num_rows, np.dtype(np.uint8), k + k // 32)
    check.same_bytes(ops["permute_mx"](packed, row_map), permute_oracle.permute_mx(packed, row_map))
