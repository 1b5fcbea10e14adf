"""The gradient of the router in two terms, the order of equal scores, and logits_bwd."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.router import oracle
from mxep.core_kernels.router.cases import ROUTES, routed_gradients

from .. import check

Ops = Mapping[str, Callable]


@pytest.mark.parametrize("shared", [False, True], ids=["weights", "shares"])
@pytest.mark.parametrize("name", [name for name, case in ROUTES.items() if case.logits.dtype == np.float32])
def test_route_bwd_in_two_terms(ops: Ops, name: str, shared: bool) -> None:
    case = ROUTES[name]
    dweights, dshares, *others = routed_gradients(name, shared)
    dweights[:1], dweights[-1:] = 3e38, 3.3961e38  # which bf16 holds and does not hold
    inputs = (dweights, dshares, *others)
    got = ops["route_bwd"](*inputs, **case.score_options, split=True)
    terms = oracle.route_bwd(*inputs, **case.score_options, split=True)
    check.same_bytes(got, terms)
    whole = oracle.route_bwd(*inputs, **case.score_options)
    high, low = np.split(terms.astype(np.float32), 2, axis=1)
    assert np.all(np.isfinite(low))
    finite = np.isfinite(high)
    assert np.all(np.abs(high + low - whole)[finite] <= np.abs(whole)[finite] * 2.0**-16 + 2.0**-133)


@pytest.mark.parametrize("name", ["sigmoid_special", "bf16_special"])
def test_equal_scores_and_nan_are_in_order(ops: Ops, name: str) -> None:
    """Rows 2, 6 and 7 are all NaN, all 1.5, and zeros of both signs, which sigmoids hide; the second case chooses by
    the logits."""
    case = ROUTES[name]
    ids, weights, _ = ops["route"](case.logits, np.zeros(0, np.float32), **case.options)
    for row in (2, 6, 7):
        assert ids[row].tolist() == [0, 1, 2, 3]
    assert ids[1, 0] == 2
    assert np.isnan(weights[[1, 2]]).all()
    assert set(weights[np.isnan(weights)].view(np.uint32).tolist()) == {0x7FC00000}


@pytest.mark.needs("logits_bwd")
@pytest.mark.parametrize("experts", [1, 8, 40, 130])
@pytest.mark.parametrize("adds", [True, False], ids=["added", "alone"])
def test_logits_bwd(ops: Ops, experts: int, adds: bool) -> None:
    """Both terms of an expert times its row of weight, and dx as a term of its own."""
    rng = seeded(f"logits_bwd {experts} {adds}")
    dlogits, weight = (rng.standard_normal(shape).astype(BF16) for shape in ((70, 2 * experts), (experts, 200)))
    dlogits[:, experts:] *= BF16.type(2.0**-9)
    dx = rng.standard_normal((70, 200) if adds else 0).astype(BF16)
    got = ops["logits_bwd"](dlogits, weight, dx)
    assert got.dtype == BF16
    a, b, c = (x.astype(np.float64) for x in (dlogits, np.concatenate([weight, weight]), dx if adds else np.zeros(1)))
    magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
    check.gemm_bound(got, a @ b + c, magnitude, 2 * experts + 1)
    check.gemm_bound(oracle.logits_bwd(dlogits, weight, dx), a @ b + c, 0 * magnitude, 0)


@pytest.mark.needs("logits_bwd")
def test_no_token_reads_another_one(ops: Ops) -> None:
    """Infinity and NaN of a token's gradient change its row alone; in an expert's weight they change every token."""
    dlogits, weight, dx = np.ones((67, 10), BF16), np.ones((5, 40), BF16), np.ones((67, 40), BF16)
    dlogits[3, 2], dx[64, 1], weight[4, 39] = np.inf, np.nan, np.nan
    want = np.full((67, 40), 11.0)
    want[3], want[64, 1], want[:, 39] = np.inf, np.nan, np.nan
    np.testing.assert_array_equal(ops["logits_bwd"](dlogits, weight, dx).astype(np.float64), want)
