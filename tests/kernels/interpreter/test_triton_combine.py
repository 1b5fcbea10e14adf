"""The combine between guards, in Triton's interpreter: no byte outside is read or written. Rows have 64-bit offsets."""

import numpy as np
import pytest
import torch
from mxep.core_kernels.combine import oracle
from mxep.core_kernels.combine import plan as combine
from mxep.core_kernels.launch import ArrayType


def combine_case(tokens: int, top_k: int, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """slots (T, K) and order (R,), one in five slots empty."""
    rng = np.random.default_rng(tokens)
    filled = np.flatnonzero(rng.random(tokens * top_k) < 0.8)
    order = rng.permutation(np.concatenate([filled, np.full(padding, -1)])).astype(np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    return slots.reshape(tokens, top_k), order


@pytest.mark.parametrize(
    ("tokens", "top_k", "padding", "d"), [(1, 1, 0, 1), (5, 3, 70, 33), (65, 8, 5, 200), (5, 3, 70, 96)]
)
def test_combine(triton_op, tokens, top_k, padding, d):
    slots, order = combine_case(tokens, top_k, padding)
    rng = np.random.default_rng(d)
    # integers, whose sums are exact in any order
    rows, probs, dy = (
        rng.integers(-8, 9, shape).astype(np.float32) for shape in ((len(order), d), slots.shape, (tokens, d))
    )
    (y,) = triton_op(combine.combine, rows, slots, probs)
    np.testing.assert_array_equal(y, oracle.combine(rows, slots, probs))
    for p in (probs, np.zeros(0, np.float32)):
        got = triton_op(combine.combine_bwd, dy, rows, slots, order, p)
        for g, w in zip(got, oracle.combine_bwd(dy, rows, slots, order, p), strict=True):
            np.testing.assert_array_equal(g, w)
        if d % 32 == 0:
            got = triton_op(combine.combine_bwd_row, dy, rows, slots, order, p)
            for g, w in zip(got, oracle.combine_bwd_row(dy, rows, slots, order, p), strict=True):
                np.testing.assert_array_equal(g, w)


def test_past_2_31_elements():
    """Rows whose first element has an index above 2^31; the other rows are not accessed."""
    r, d = (1 << 24) + 2, 128
    rows = torch.from_numpy(np.zeros((r, d), np.uint16)).view(torch.bfloat16)  # memory that is not accessed is not used
    rows[-1] = 3
    slots, probs = torch.tensor([[r - 1, 0]], dtype=torch.int32), torch.tensor([[2.0, 1.0]])
    types = [ArrayType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in (rows, slots, probs)]
    launch = combine.combine.launch(*types, arch="interpreter", out_dtype="float32")
    y = torch.full((1, d), torch.nan)
    combine.combine.triton_kernel()[launch.grid](rows, slots, probs, *launch.scalars.values(), y, **launch.meta)
    assert (y == 6).all()
