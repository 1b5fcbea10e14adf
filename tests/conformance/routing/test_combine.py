"""combine and its gradients: sums in order, and a bilinear form."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.combine.cases import COMBINES
from mxep.core_kernels.permute import oracle as permute_oracle

from .. import check

Ops = Mapping[str, Callable]


def test_the_sum_rounds_every_product_and_runs_in_order(ops: Ops) -> None:
    """(1 + 2^-12)^2 rounds to 1 + 2^-11, a tie: an fma adds 2^-24; another order loses 2^-30."""
    rows, probs = np.float32([[2.0**-30], [-1], [1 + 2.0**-12]]), np.float32([[1, 1 + 2.0**-12, 1]])
    got = ops["combine"](rows, np.int32([[1, 2, 0]]), probs, out_dtype="float32")
    assert got.item() == 2.0**-11 + 2.0**-30


def test_an_unweighted_sum_is_one_with_probabilities_of_one(ops: Ops) -> None:
    case = COMBINES["padding"]
    ones = np.where(case.slots < 0, np.nan, 1).astype(np.float32)
    plain = ops["combine"](case.rows, case.slots, np.zeros(0, np.float32))
    check.same_bytes(ops["combine"](case.rows, case.slots, ones), plain)
    (weighted, _), (unweighted, _) = (
        ops["combine_bwd"](*replace(case, probs=probs).bwd_inputs) for probs in (ones, np.zeros(0, np.float32))
    )
    check.same_bytes(weighted, unweighted)


def test_top_1_without_probabilities_is_a_gather(ops: Ops) -> None:
    """permute_rows with the same map. The case has no NaN, since combine canonicalises NaN."""
    rng = seeded("gather")
    x, row_map = rng.standard_normal((20, 96)).astype(BF16), rng.integers(-1, 20, 50).astype(np.int32)
    got = ops["combine"](x, row_map[:, None], np.zeros(0, np.float32))
    check.same_bytes(got, permute_oracle.permute_rows(x, row_map))


@given(data=st.data())
def test_the_gradients_are_those_of_a_bilinear_form(ops: Ops, data: st.DataObject) -> None:
    """<dy, combine(rows, probs)> = <drows, rows> = <dprobs, probs>; small integers, so that every sum is exact."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    order = rng.permutation(np.r_[0:24, np.full(8, -1)]).astype(np.int32)
    order[rng.random(32) < 0.2] = -1
    slots = np.full(24, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    slots = slots.reshape(8, 3)
    rows, probs, dy = (rng.integers(-8, 9, s).astype(np.float32) for s in ((32, 16), (8, 3), (8, 16)))
    y = ops["combine"](rows, slots, probs, out_dtype="float32")
    drows, dprobs = ops["combine_bwd"](dy, rows, slots, order, probs)
    assert (dy * y).sum() == (drows * rows).sum() == (dprobs * probs).sum()
