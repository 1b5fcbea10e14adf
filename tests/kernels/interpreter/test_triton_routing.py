"""The routing kernels against the oracle in Triton's interpreter, on small and uneven sizes."""

import numpy as np
import pytest
from mxep.core_kernels.routing import oracle
from mxep.core_kernels.routing import plan as routing


def check_equal(op, got, want):
    for name, g, w in zip(op.outputs, got, want, strict=True):
        np.testing.assert_array_equal(g, w, err_msg=f"{op.name}: {name}")


@pytest.mark.parametrize("num_experts", [1, 3, 8])
@pytest.mark.parametrize("slots", [0, 1, 63, 64, 200])
def test_sort(triton_op, slots, num_experts):
    ids = np.random.default_rng(slots).integers(0, num_experts, slots, np.int32)
    got = triton_op(routing.sort_by_expert, ids, num_experts=num_experts)
    check_equal(routing.sort_by_expert, got, oracle.sort_by_expert(ids, num_experts))


COUNTS = {
    "one each": ([1, 1, 1, 1], 2),
    "uneven": ([2, 1, 1, 2], 2),
    "an empty expert": ([5, 0, 40, 3, 0, 33], 3),
    "an empty rank": ([0, 0, 0, 7, 65, 1], 3),
    "one hot expert": ([0, 150, 0, 0, 0, 0, 0, 0], 4),
    "one rank": ([31, 32, 33], 3),
    "one expert per rank": ([3, 0, 70], 1),
    "nothing": ([0, 0], 2),
    "no rank": ([], 2),
}


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("slack", [0, 5, 100])
@pytest.mark.parametrize(("counts", "experts"), COUNTS.values(), ids=COUNTS.keys())
def test_row_map(triton_op, counts, experts, slack, alignment):
    """The ranks' rows are contiguous; the last `slack` rows are unused."""
    counts = np.array(counts, np.int32)
    options = {"num_rows": int(counts.sum()) + slack, "num_local_experts": experts, "alignment": alignment}
    got = triton_op(routing.row_map, counts, **options)
    check_equal(routing.row_map, got, oracle.row_map(counts, **options))


BROKEN_COUNTS = [100, 200], [300, 200], [-100, 5], [5, -100], [2**29, 2**29, 5]


@pytest.mark.parametrize("counts", BROKEN_COUNTS, ids=str)
def test_any_counts_stay_inside(triton_op, counts):
    """Counts that break the contract cause no write outside: the guards around each output are intact."""
    order, weights = np.arange(40, dtype=np.int32), np.ones(40, np.float32)
    row_map, *_ = triton_op(routing.row_map, np.int32(counts), num_rows=40, num_local_experts=len(counts))
    assert -1 <= row_map.min() <= row_map.max() < 40
    triton_op(routing.slot_map, np.int32(counts), order, weights, top_k=2)


def test_counts_beyond_the_buffer_stay_inside(triton_op):
    """Counts that break the contract cause no write outside: the guards around each output are intact."""
    got = triton_op(routing.row_map, np.array([100, 200], np.int32), num_rows=40, num_local_experts=2)
    assert got[0].min() == -1
    assert got[0].max() == 39


@pytest.mark.parametrize("alignment", [32, 96])
@pytest.mark.parametrize(("slots", "num_experts"), [(0, 3), (2, 1), (200, 8), (2500, 2)])
def test_slot_map(triton_op, slots, num_experts, alignment):
    ids = np.random.default_rng(slots).integers(0, num_experts, slots, np.int32) // 2 * 2
    order, _, counts = oracle.sort_by_expert(ids, num_experts)
    weights = np.arange(1, slots + 1, dtype=np.float32)
    for given in (weights, weights[:0]):
        got = triton_op(routing.slot_map, counts, order, given, top_k=2, alignment=alignment)
        check_equal(routing.slot_map, got, oracle.slot_map(counts, order, given, 2, alignment))


def test_counts_beyond_the_slots_stay_inside(triton_op):
    """Counts and slots that break the contract cause no write outside: the guards around each output are intact."""
    order = np.array([-7, 40, *range(38)], np.int32)
    counts, weights = np.array([100, 200], np.int32), np.ones(40, np.float32)
    slots, _, inverse, *_, row_weights = triton_op(routing.slot_map, counts, order, weights, top_k=2)
    assert slots.max() == 40
    assert row_weights.sum() == 38
    assert sorted(inverse[:38]) == list(range(2, 40))
