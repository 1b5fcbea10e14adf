"""The definition of the router against fp64 scores, sums and derivatives, which it approximates."""

import numpy as np
import pytest
from mxep.core_kernels.cases import seeded
from mxep.core_kernels.reference import choice as definition
from mxep.core_kernels.router import oracle
from mxep.core_kernels.router.cases import ROUTES

PLAIN = ["softmax", "softmax_as_it_is", "sigmoid", "sigmoid_as_it_is", "of_chosen", "groups", "groups_by_max", "bf16"]


def choice_of(name: str) -> definition.Choice:
    case = ROUTES[name]
    return definition.Choice(**case.options, bias=case.bias)


@pytest.mark.parametrize("name", PLAIN)
def test_ids_weights_and_shares_against_fp64(name: str) -> None:
    """Measured: weights within 11.5 * 2^-24 of themselves, where logits differ by up to 20 and their rounding counts,
    and sums of shares within 1.2e-7; twice that."""
    case = ROUTES[name]
    ids, weights, share_sums = oracle.route(case.logits, case.bias, **case.options)
    logits = case.logits.astype(np.float64)
    want_ids, want = definition.route(logits, choice_of(name))
    np.testing.assert_array_equal(ids, want_ids)
    assert (np.abs(weights - want) <= 23 * 2.0**-24 * np.abs(want)).all()
    shares = definition.scores(logits, choice_of(name).score_func)
    shares /= shares.sum(-1, keepdims=True)
    sums = np.stack([shares[i : i + oracle.CHUNK].sum(0) for i in range(0, len(shares), oracle.CHUNK)])
    assert (np.abs(share_sums - sums) <= 2.4e-7 * np.maximum(sums, 1)).all()


@pytest.mark.parametrize("name", PLAIN[:-1])
def test_the_gradient_against_fp64(name: str) -> None:
    """Measured: within 4.4e-7 of the largest; twice that."""
    case, rng = ROUTES[name], seeded(f"fp64 {name}")
    ids, *_ = oracle.route(case.logits, case.bias, **case.options)
    dweights, dshares = rng.standard_normal(ids.shape), rng.standard_normal(case.logits.shape[1])
    arguments = dweights.astype(np.float32), dshares.astype(np.float32)
    got = oracle.route_bwd(*arguments, case.logits, ids, **case.score_options)
    want = definition.route_vjp(
        *(a.astype(np.float64) for a in arguments), case.logits.astype(np.float64), choice_of(name)
    )
    assert np.abs(got - want).max() <= 9e-7 * np.abs(want).max()


def test_row_sum() -> None:
    """Exact where fp32 has the terms, in any order; a term below 2^-40 of the largest is cut."""
    rng = seeded("row_sum")
    x = rng.standard_normal((200, 96)).astype(np.float32) * np.exp2(rng.integers(-100, 100, (200, 1))).astype(
        np.float32
    )
    exact = x.astype(np.float64).sum(-1)
    got = oracle.row_sum(x)[:, 0]
    bound = 2.0**-24 * np.abs(exact) + 96 * 2.0**-40 * np.abs(x).max(-1)
    assert (np.abs(got - exact) <= bound).all()
    np.testing.assert_array_equal(oracle.row_sum(rng.permuted(x, axis=-1))[:, 0], got)
    edges = np.float32([[3e38, 3e38], [np.nan, 1], [np.inf, -np.inf], [-0.0, 0], [2.0**-149, 2.0**-149]])
    with np.errstate(all="ignore"):
        sums = oracle.row_sum(edges)[:, 0]
    np.testing.assert_array_equal(sums, np.float32([np.inf, np.nan, np.nan, 0, 2.0**-148]))
