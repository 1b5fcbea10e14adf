"""The definition of SwiGLU against the true sigmoid, fp64 derivatives and a real fma, which it approximates."""

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.swiglu import oracle
from mxep.core_kernels.swiglu.cases import GLUS, NUMBERS

GATES = np.arange(2**16, dtype=np.uint16).view(BF16).astype(np.float32)
FINITE = GATES[np.isfinite(GATES)]


def test_the_sigmoid_of_every_gate() -> None:
    """Within 2.4 * 2^-24 of the true one for g >= 0. Below, |g| log2 e is rounded in fp32 before it is an exponent,
    which costs 1.3 more for each unit of |g|. Where the true one is under 2^-125, zero is near enough."""
    with np.errstate(over="ignore"):
        got = oracle._sigmoid(FINITE).astype(np.float64)
    want = oracle.sigmoid64(FINITE)
    units = np.where(FINITE < 0, 3 + 1.3 * np.abs(FINITE, dtype=np.float64), 2.4)
    error = np.abs(got - want)
    assert (error <= np.where(want < 2.0**-125, 2.0**-126, units * 2.0**-24 * want)).all()
    assert ((got >= 0) & (got <= 1)).all()


def test_the_ends_of_the_sigmoid() -> None:
    with np.errstate(all="ignore"):
        got = oracle._sigmoid(np.float32([0, -0.0, np.inf, -np.inf, 3e38, -3e38, np.nan]))
    np.testing.assert_array_equal(got, np.float32([0.5, 0.5, 1, 0, 1, 0, np.nan]))


def test_fma_rounds_once() -> None:
    rng = seeded("fma")
    a, b = (rng.standard_normal(20000).astype(np.float32) for _ in range(2))
    with np.errstate(over="ignore"):
        scale = np.exp2(rng.integers(-60, 30, 20000)).astype(np.float32)
    c = np.where(rng.random(20000) < 0.5, -a * b, rng.standard_normal(20000).astype(np.float32)) * scale
    # halfway between two fp32 numbers but for a bit that an fp64 sum loses
    a[:2], b[:2], c[:2] = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), [2.0**-40, -(2.0**-40)]
    got = oracle.fma(a, b, c)
    for x, y, z, w in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(w, np.float32(-np.inf)), np.nextafter(w, np.float32(np.inf))
        own = abs(Fraction(float(w)) - exact)
        for other in (below, above):
            distance = abs(Fraction(float(other)) - exact)
            assert own < distance or (own == distance and w.view(np.uint32) % 2 == 0)


def test_no_gate_shows_that_an_fp64_sum_rounds_twice() -> None:
    """What Triton's interpreter computes in place of an fma."""

    def twice(a, b, c):
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)

    with np.errstate(over="ignore"):
        once = oracle._sigmoid(FINITE)
        with mock.patch.object(oracle, "fma", twice):
            np.testing.assert_array_equal(oracle._sigmoid(FINITE), once)


def close(got: np.ndarray, want: np.ndarray, flushed: float = 1e-37) -> None:
    """bf16's half ulp and a little; values fp32 cannot hold are left out. flushed: 2^-126, below which
    a sigmoid is zero, times its largest factor."""
    got = got.astype(np.float64)
    seen = np.isfinite(got) & (np.abs(want) < 3e38)
    assert (np.abs(got - want)[seen] <= (2.0**-8 * 1.01 * np.abs(want) + flushed)[seen]).all()
    assert seen.mean() > 0.9


def test_forward_against_fp64() -> None:
    for name in ("normal", "without_prob", "large", "lognormal_blocks"):
        case = GLUS[name]
        close(oracle.swiglu(*case.forward), oracle.swiglu64(*case.forward))

        for numbers in NUMBERS.values():
            close(oracle.swiglu(*case.forward, **numbers), oracle.swiglu64(*case.forward, **numbers), 1e-33)


@pytest.mark.parametrize("numbers", [{}, *NUMBERS.values()], ids=str)
def test_backward_against_differences_in_fp64(numbers: dict[str, float]) -> None:
    """The derivative of swiglu64 along each operand, by a central difference; h is linear in prob. Operands at the
    limit itself, where there is a difference on one side alone, are left out."""
    case = GLUS["large"]
    dh = case.dh.astype(np.float64)
    gate, up, prob = (x.astype(np.float64) for x in case.forward)
    ones = np.ones_like(up)
    dgate, dup, dprob = oracle.swiglu_bwd(*case.backward, **numbers)
    step = 1e-5

    def slope(along: np.ndarray, across: np.ndarray) -> np.ndarray:
        ends = (oracle.swiglu64(gate + s * along, up + s * across, prob, **numbers) for s in (step, -step))
        return np.subtract(*ends) / (2 * step)

    want = dh * slope(ones, 0 * ones)
    error = np.abs(dgate.astype(np.float64) - want)
    # the slope crosses zero at alpha g = -1.28, where sig and silu * (1 - sig) cancel
    offset_up = np.abs(dh * (np.abs(up) + 1) * prob[:, None])
    at_limit = np.abs(gate) == numbers.get("limit")
    assert ((error <= 2.0**-8 * 1.01 * np.abs(want) + 1e-6 * offset_up) | at_limit).all()
    want = dh * slope(0 * ones, ones)
    error, at_limit = np.abs(dup.astype(np.float64) - want), np.abs(up) == numbers.get("limit")
    assert ((error <= 2.0**-8 * 1.01 * np.abs(want) + 1e-6 * np.abs(dh * gate * prob[:, None])) | at_limit).all()
    terms = dh * oracle.swiglu64(gate, up, np.zeros(0), **numbers)
    assert (np.abs(dprob - terms.sum(-1)) <= 1e-5 * np.abs(terms).sum(-1)).all()


def test_a_limit_passes_its_own_value_and_nan_and_stops_the_gradient_beyond() -> None:
    """As torch.clamp does, and no NaN turns into a number."""
    x = np.array([[7, 7.03125, -7, -7.03125, np.nan, 0.5]], BF16)
    one, none = np.ones_like(x), np.float32([])
    dgate = oracle.swiglu_bwd(one, x, one, none, **NUMBERS["gpt_oss"])[0][0]
    dup = oracle.swiglu_bwd(one, one, x, none, **NUMBERS["gpt_oss"])[1][0]
    assert (dgate == 0).tolist() == [False, True, False, False, False, False]
    assert np.isnan(dgate[4])
    assert (dup == 0).tolist() == [False, True, False, True, False, False]
    assert np.isnan(oracle.swiglu(one, x, none, **NUMBERS["gpt_oss"])[0, 4])
