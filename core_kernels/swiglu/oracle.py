"""The definition of SwiGLU and of its gradient, in numpy.

    g = min(gate, limit)    u = up within [-limit, limit]    h = (g * sigmoid(alpha * g)) * (u + offset) * prob

    swiglu  swiglu_bwd                        exact bytes; dprob: a sum in fp64, rounded once
    swiglu_row / _col                         h in bf16, quantized
    swiglu_row_fold                           h in bf16, quantized, folded
    swiglu_blockwise                          h in bf16, quantized blockwise
    swiglu_bwd_row / _col / _both             dgate and dup in bf16, quantized; then dprob
    swiglu_blockwise_bwd                      dgate and dup in bf16, quantized blockwise
    swiglu_bwd_all                            the same of _both, h of swiglu_col; then dprob
    swiglu_bwd_fold                           the same of _all, folded; then dprob
    sigmoid64  swiglu64                       the exact functions in fp64, for comparison

gate, up, dh (M, F) bf16; prob (M,) fp32, or (0,) for probabilities of 1. A limit of 0 is none. dgate is zero where gate
is above the limit, dup where up is outside of it; a NaN is not outside. alpha 1, no limit and offset 0 leave out the
sum u + 0, which would turn -0 into 0. alpha, limit and offset are rounded to fp32. Each fp32 operation is a statement
of its own and rounds to nearest; only `fma` rounds a product and a sum together.
"""

from typing import NamedTuple

import numpy as np

from ..fold import oracle as fold_oracle
from ..formats import EXP2_COEFFICIENTS, GRADIENT_HEADROOM, LOG2E, Rounding
from ..oracle_math import round_to
from ..quantize import oracle as quantize_oracle
from ..quantize.oracle_blockwise import quantize_blockwise

Array = np.ndarray
F32 = np.float32
ONE = F32(1)
MAGIC = F32(12583039)
"""1.5 * 2^23 + 127. Adding it to a value in [-127, 0] leaves the nearest integer plus 127 in the low bits."""


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp32, rounded once.

    The product is exact in fp64. The sum is rounded to odd in fp64, which keeps ties apart from their neighbours, so
    that rounding it again to fp32 equals a single rounding (Boldo and Melquiond, "Emulation of FMA", 2008).
    """
    product, c = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    even = total.view(np.int64) & 1 == 0
    inexact = np.isfinite(total) & (error != 0)
    return np.where(inexact & even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(F32)


def exp_minus(a: Array) -> Array:
    """e^-a of a >= 0, fp32 -> fp32, as 2^(-a log2 e); below 2^-126 it is 0."""
    y = np.maximum(-(a * F32(LOG2E)), F32(-127))
    m = y + MAGIC
    f = y - (m - MAGIC)
    p = np.full_like(f, F32(EXP2_COEFFICIENTS[-1]))
    for coefficient in (*EXP2_COEFFICIENTS[-2::-1], 1):
        p = fma(p, f, np.full_like(f, F32(coefficient)))
    return p * (m.view(np.uint32) << np.uint32(23)).view(F32)


def _sigmoid(g: Array) -> Array:
    """fp32 -> fp32, through t = e^-|g|, which never overflows."""
    t = exp_minus(np.abs(g))
    r = ONE / (ONE + t)
    return np.where(g < 0, t * r, r)


class _Gated(NamedTuple):
    """The values that h and the gradients share, in fp32; alpha is a number.

    gate, up: after the limit and the offset. silu: gate * sig. free_gate, free_up: (M, F) bool, within the limit.
    """

    alpha: F32
    sig: Array
    silu: Array
    up: Array
    free_gate: Array
    free_up: Array


def _gated(gate: Array, up: Array, alpha: float, limit: float, offset: float) -> _Gated:
    slope, most, more = F32(alpha), F32(limit or np.inf), F32(offset)
    g, u = gate.astype(F32), up.astype(F32)
    above, outside = g > most, np.abs(u) > most
    g = np.where(above, most, g)
    sig = _sigmoid(g * slope)
    if (slope, most, more) != (1, np.inf, 0):
        u = np.where(outside, np.copysign(most, u), u) + more
    return _Gated(slope, sig, g * sig, u, ~above, ~outside)


def _bf16(x: Array) -> Array:
    return round_to(x.astype(np.float64), "bfloat16")


@np.errstate(all="ignore")
def swiglu(gate: Array, up: Array, prob: Array, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0) -> Array:
    """-> h (M, F) bf16.

    >>> one = round_to(np.ones((1, 1)), "bfloat16")
    >>> float(swiglu(one, one, np.zeros(0, np.float32))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    0.73046875
    >>> float(swiglu(one, one, np.zeros(0, np.float32), limit=0.5, offset=1.0)[0, 0])  # 1.5 * 0.5 * sigmoid(0.5)
    0.466796875
    """
    of = _gated(gate, up, alpha, limit, offset)
    h = of.silu * of.up
    return _bf16(h * prob[:, None] if len(prob) else h)


@np.errstate(all="ignore")
def dprob_terms(
    dh: Array, gate: Array, up: Array, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0
) -> Array:
    """The terms of dprob, which are summed over F: (M, F) fp32."""
    of = _gated(gate, up, alpha, limit, offset)
    return dh.astype(F32) * (of.silu * of.up)


@np.errstate(all="ignore")
def swiglu_bwd(
    dh: Array, gate: Array, up: Array, prob: Array, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0
) -> tuple[Array, Array, Array]:
    """-> dgate, dup (M, F) bf16, dprob (M,) fp32, or (0,) without prob."""
    of, d = _gated(gate, up, alpha, limit, offset), dh.astype(F32)
    if len(prob):
        d = d * prob[:, None]
    slope = of.sig + (of.silu * of.alpha) * (ONE - of.sig)
    dgate, dup = (d * of.up) * slope, d * of.silu
    dgate, dup = (_bf16(np.where(free, x, F32(0))) for free, x in ((of.free_gate, dgate), (of.free_up, dup)))
    terms = dprob_terms(dh, gate, up, alpha, limit, offset).astype(np.float64)
    return dgate, dup, round_to(terms.sum(-1), "float32") if len(prob) else prob


def swiglu_row(gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q (M, F), sf (M, F/32) of h."""
    return quantize_oracle.quantize_row(swiglu(gate, up, prob, alpha, limit, offset), rounding, satfinite)


def swiglu_col(gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q_t (F, M), sf_t (F, M/32) of h."""
    return quantize_oracle.quantize_col(swiglu(gate, up, prob, alpha, limit, offset), rounding, satfinite)


def swiglu_row_fold(gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> qf (M, F), row_sf (M,) of h."""
    return fold_oracle.fold_rows(*swiglu_row(gate, up, prob, rounding, satfinite, alpha, limit, offset))


def swiglu_blockwise(gate, up, prob, power_of_two=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q (M, F), sf (M, ceil(F/128)) of h."""
    return quantize_blockwise(swiglu(gate, up, prob, alpha, limit, offset), power_of_two)


def swiglu_blockwise_bwd(dh, gate, up, prob, power_of_two=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q, sf of dgate, q, sf of dup."""
    dgate, dup, _ = swiglu_bwd(dh, gate, up, prob, alpha, limit, offset)
    return *quantize_blockwise(dgate, power_of_two), *quantize_blockwise(dup, power_of_two)


def swiglu_bwd_row(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q, sf of dgate, q, sf of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob, alpha, limit, offset)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_row(x, rounding, satfinite)), dprob


def swiglu_bwd_col(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q_t, sf_t of dgate, q_t, sf_t of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob, alpha, limit, offset)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_col(x, rounding, satfinite)), dprob


def swiglu_bwd_both(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q, sf, q_t, sf_t of dgate, the same of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob, alpha, limit, offset)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_both(x, rounding, satfinite)), dprob


def swiglu_bwd_all(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0):
    """-> q, sf, q_t, sf_t of dgate, the same of dup, q_t, sf_t of h, dprob."""
    *gradients, dprob = swiglu_bwd_both(dh, gate, up, prob, rounding, satfinite, alpha, limit, offset)
    return *gradients, *swiglu_col(gate, up, prob, rounding, satfinite, alpha, limit, offset), dprob


def swiglu_bwd_fold(
    dh, gate, up, prob, group_ends, rounding=Rounding.RCEIL, satfinite=False, alpha=1.0, limit=0.0, offset=0.0
):
    """-> qf, row_sf, qf_t, span_sf of dgate, the same of dup, qf_t, span_sf of h, dprob."""
    q, sf, q_t, sf_t, *others, dprob = swiglu_bwd_all(dh, gate, up, prob, rounding, satfinite, alpha, limit, offset)
    up_q, up_sf, up_q_t, up_sf_t, h_q_t, h_sf_t = others
    gate_rows, up_rows = (fold_oracle.fold_rows(*rows, GRADIENT_HEADROOM) for rows in ((q, sf), (up_q, up_sf)))
    gate_tokens, up_tokens, h_tokens = (
        fold_oracle.fold_groups(*columns, group_ends) for columns in ((q_t, sf_t), (up_q_t, up_sf_t), (h_q_t, h_sf_t))
    )
    return *gate_rows, *gate_tokens, *up_rows, *up_tokens, *h_tokens, dprob


def sigmoid64(g: Array) -> Array:
    """fp64: 1 / (1 + e^-g) without overflow."""
    t = np.exp(-np.abs(g, dtype=np.float64))
    return np.where(g < 0, t, 1) / (1 + t)


def swiglu64(gate: Array, up: Array, prob: Array, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0) -> Array:
    """fp64: g sigmoid(alpha g) (u + offset) prob of the clamped g and u."""
    limit = limit or np.inf
    g, u = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    h = g * sigmoid64(alpha * g) * (u + offset)
    return h * prob[:, None].astype(np.float64) if len(prob) else h
