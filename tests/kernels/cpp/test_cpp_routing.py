"""The C++ routing and gathers: errors, and large random maps. Conformance has the ordinary cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.permute import oracle as permute_oracle
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.routing import plan as routing


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def same(got, expected) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@given(rows=st.sampled_from([1, 7, 500]), k=st.sampled_from([0, 32, 96, 4096]), seed=st.integers(0, 99))
def test_gathers(cpp_op, rows, k, seed):
    rng = np.random.default_rng(seed)
    row_map = rng.integers(-1, rows, rng.integers(0, 900), np.int32)
    packed = rng.integers(0, 256, (rows, k + k // 32), np.uint8)
    same(cpp_op(permute.permute_mx, packed, row_map), permute_oracle.permute_mx(packed, row_map))
    for dtype in (np.uint8, np.float32):
        x = rng.integers(0, 256, (rows, k)).astype(dtype)
        same(cpp_op(permute.permute_rows, x, row_map), (permute_oracle.permute_rows(x, row_map),))


def test_gather_from_nothing(cpp_op):
    same(cpp_op(permute.permute_rows, np.zeros((0, 64), np.float32), i32(-1, -1)), (np.zeros((2, 64), np.float32),))


def test_slots_are_counted_in_int32():
    ids = ArrayType((routing.MOST_ROWS + 1,), "int32")
    with pytest.raises(ValueError, match=f"sort_by_expert: expert_ids: got {routing.MOST_ROWS + 1} slots; allowed"):
        routing.sort_by_expert.signature(ids, num_experts=2)


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31)])
def test_map_outside_the_rows(cpp_op, bad):
    message = rf"permute_{{}}: row_map: got {bad} at index 2; allowed: -1 \(padding\) or a row below 4"
    with pytest.raises(ValueError, match=message.format("rows")):
        cpp_op(permute.permute_rows, np.zeros((4, 32), np.float32), i32(0, -1, bad, 3))
    with pytest.raises(ValueError, match=message.format("mx")):
        cpp_op(permute.permute_mx, np.zeros((4, 33), np.uint8), i32(0, -1, bad, 3))


def test_map_into_nothing(cpp_op):
    with pytest.raises(ValueError, match="row_map: got 0 at index 0; allowed: -1"):
        cpp_op(permute.permute_rows, np.zeros((0, 64), np.float32), i32(0))


@pytest.mark.parametrize("bad", [-1, 3])
def test_expert_that_does_not_exist(cpp_op, bad):
    with pytest.raises(ValueError, match=f"sort_by_expert: expert_ids: got {bad} at index 1; allowed: 0 <= id < num_"):
        cpp_op(routing.sort_by_expert, i32(0, bad), num_experts=3)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        (i32(1, -1), {"num_rows": 9}, "got -1 at index 1; allowed: at least 0"),
        (i32(3, 4), {"num_rows": 6}, "got 4 at index 1; allowed: counts that sum to at most num_rows = 6"),
        (i32(2**31 - 1, 2**31 - 1), {"num_rows": 64}, "got 2147483647 at index 0; allowed: counts that sum"),
        (
            i32(1, 3, 2, 3),
            {"num_rows": 8, "rank_rows": 4},
            "got 3 at index 3; allowed: counts of rank 1 that sum to at most rank_rows = 4",
        ),
    ],
)
def test_counts_that_do_not_fit(cpp_op, counts, options, message):
    with pytest.raises(ValueError, match=f"row_map: counts: {message}"):
        cpp_op(routing.row_map, counts, num_local_experts=2, **options)


@given(
    ranks=st.integers(1, 5),
    experts=st.integers(1, 9),
    alignment=st.sampled_from([32, 96, 128]),
    slack=st.integers(0, 40),
    static=st.booleans(),
    seed=st.integers(0, 999),
)
def test_row_map(cpp_op, ranks, experts, alignment, slack, static, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 70, (ranks, experts), np.int32) * (rng.random((ranks, experts)) < 0.7)
    counts = counts.astype(np.int32)
    rank_rows = int(counts.sum(1).max()) + slack if static else 0
    options = {
        "num_rows": rank_rows * ranks or int(counts.sum()) + slack,
        "num_local_experts": experts,
        "alignment": alignment,
        "rank_rows": rank_rows,
    }
    same(cpp_op(routing.row_map, counts.reshape(-1), **options), routing_oracle.row_map(counts.reshape(-1), **options))


@given(tokens=st.integers(0, 300), experts=st.integers(1, 20), seed=st.integers(0, 999))
def test_sort(cpp_op, tokens, experts, seed):
    ids = np.random.default_rng(seed).integers(0, experts, tokens, np.int32)
    same(cpp_op(routing.sort_by_expert, ids, num_experts=experts), routing_oracle.sort_by_expert(ids, experts))


@given(tokens=st.integers(0, 60), experts=st.integers(1, 20), top_k=st.integers(1, 9), seed=st.integers(0, 999))
def test_slot_map(cpp_op, tokens, experts, top_k, seed):
    ids = np.random.default_rng(seed).integers(0, experts, tokens * top_k, np.int32)
    order, _, counts = routing_oracle.sort_by_expert(ids, experts)
    weights = np.arange(1, len(ids) + 1, dtype=np.float32)
    for arrays in ((counts, order, weights), (counts, order, weights[:0])):
        same(cpp_op(routing.slot_map, *arrays, top_k=top_k), routing_oracle.slot_map(*arrays, top_k))


@pytest.mark.parametrize(
    ("counts", "order", "message"),
    [
        (i32(3, -1), i32(0, 1), "counts: got 3 at index 0; allowed: counts that sum to the slots, 2"),
        (i32(2, -1), i32(0, 1), "counts: got -1 at index 1; allowed: at least 0"),
        (i32(1, 0), i32(0, 1), "counts: got 0 at index 1; allowed: counts that sum to the slots, 2"),
        (i32(1, 2), i32(0, 3, 1), "order: got 3 at index 1; allowed: every slot below 3 once"),
        (i32(1, 2), i32(0, -1, 1), "order: got -1 at index 1; allowed: every slot below 3 once"),
        (i32(1, 2), i32(1, 0, 1), "order: got 1 at index 2; allowed: every slot below 3 once"),
    ],
)
def test_slots_that_do_not_fit(cpp_op, counts, order, message):
    with pytest.raises(ValueError, match=f"slot_map: {message}"):
        cpp_op(routing.slot_map, counts, order, np.zeros(0, np.float32), top_k=1)
