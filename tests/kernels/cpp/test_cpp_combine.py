"""The combine in C++, between guards: large random slots, the order of a dot product's sums, and errors before the
first write."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxep.core_kernels.combine import oracle
from mxep.core_kernels.combine import plan as combine

EMPTY = np.zeros(0, np.float32)


def i32(*values) -> np.ndarray:
    return np.array(values, np.int32)


@given(
    tokens=st.integers(0, 60),
    top_k=st.integers(1, 9),
    padding=st.integers(0, 90),
    d=st.sampled_from([1, 31, 96, 256, 544, 700]),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_combine(cpp_op, tokens, top_k, padding, d, weighted, seed):
    rng = np.random.default_rng(seed)
    filled = np.flatnonzero(rng.random(tokens * top_k) < 0.8)
    order = rng.permutation(np.concatenate([filled, np.full(padding, -1)])).astype(np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    slots = slots.reshape(tokens, top_k)
    # integers, whose sums are exact in any order
    rows, probs, dy = (
        rng.integers(-8, 9, shape).astype(np.float32) for shape in ((len(order), d), slots.shape, (tokens, d))
    )
    probs = probs if weighted else EMPTY
    (y,) = cpp_op(combine.combine, rows, slots, probs, out_dtype="float32")
    np.testing.assert_array_equal(y, oracle.combine(rows, slots, probs, "float32"))
    got = cpp_op(combine.combine_bwd, dy, rows, slots, order, probs)
    for g, w in zip(got, oracle.combine_bwd(dy, rows, slots, order, probs), strict=True):
        np.testing.assert_array_equal(g, w)
    if d % 32 == 0:
        got = cpp_op(combine.combine_bwd_row, dy, rows, slots, order, probs)
        for g, w in zip(got, oracle.combine_bwd_row(dy, rows, slots, order, probs), strict=True):
            np.testing.assert_array_equal(g, w)


def dot_in_16_lanes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The fp32 dot products of the last dim: column c counts to partial sum c % 16; then halves are added. Every
    product and every sum rounds."""
    products = a.astype(np.float32) * b.astype(np.float32)
    lanes = np.zeros((*products.shape[:-1], 16), np.float32)
    for c in range(products.shape[-1]):
        lanes[..., c % 16] += products[..., c]
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("d", [1, 15, 16, 17, 31, 64, 95, 263, 544])
def test_a_dot_product_has_16_partial_sums(cpp_op, d, dtype):
    """On every machine, whatever its vectors hold: widths with and without a rest."""
    rng = np.random.default_rng(d)
    dy, rows = (rng.standard_normal((64, d)).astype(dtype) for _ in range(2))
    every, probs = np.arange(64, dtype=np.int32), np.ones((64, 1), np.float32)
    want = dot_in_16_lanes(dy, rows)
    _, dprobs = cpp_op(combine.combine_bwd, dy, rows, every[:, None], every, probs)
    np.testing.assert_array_equal(dprobs[:, 0], want)
    if d % 32 == 0:
        *_, dprobs = cpp_op(combine.combine_bwd_row, dy, rows, every[:, None], every, probs)
        np.testing.assert_array_equal(dprobs[:, 0], want)
    # Of these values the order shows: a sum from the first column to the last one is another for some of the rows.
    in_turn = np.cumsum(dy.astype(np.float32) * rows.astype(np.float32), axis=1, dtype=np.float32)[:, -1]
    assert d <= 16 or (in_turn != want).any()


@pytest.mark.parametrize("bad", [-2, 3, 2**31 - 1, -(2**31)])
def test_slots_outside_the_rows(cpp_op, bad):
    rows, slots = np.zeros((3, 8), np.float32), i32([0, -1], [bad, 2])
    message = rf"slots: got {bad} at index 2; allowed: -1 \(no row\) or a row below 3"
    with pytest.raises(ValueError, match=f"combine: {message}"):
        cpp_op(combine.combine, rows, slots, EMPTY)
    with pytest.raises(ValueError, match=f"combine_bwd: {message}"):
        cpp_op(combine.combine_bwd, np.zeros((2, 8), np.float32), rows, slots, i32(0, -1, 3), EMPTY)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (i32(0, -2, 3), r"order: got -2 at index 1; allowed: -1 \(padding\) or a slot below 4"),
        (i32(0, 4, 3), r"order: got 4 at index 1; allowed: -1 \(padding\) or a slot below 4"),
        (i32(0, 1, 3), "order: got 1 at index 1; allowed: the slot that slots gives this row"),
        (i32(0, -1, -1), "slots: got 2 at index 3; allowed: the row that order gives this slot"),
    ],
)
def test_an_order_that_is_not_the_way_back(cpp_op, order, message):
    """Rows that no slot writes would keep their old contents."""
    dy, rows = np.zeros((2, 8), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(ValueError, match=f"combine_bwd: {message}"):
        cpp_op(combine.combine_bwd, dy, rows, i32([0, -1], [-1, 2]), order, EMPTY)
