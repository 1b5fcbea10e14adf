"""The definition of SwiGLU, h = silu(gate) * up * prob, and of its gradient, in numpy.

    swiglu  swiglu_bwd                        exact bytes; dprob: a sum in fp64, rounded once
    swiglu_row / _col                         h in bf16, quantized
    swiglu_bwd_row / _col / _both             dgate and dup in bf16, quantized; then dprob
    sigmoid64  swiglu64                       the exact functions in fp64, for comparison

gate, up, dh (M, F) bf16; prob (M,) fp32, or (0,) for probabilities of 1. Each fp32 operation is a statement of its own
and rounds to nearest; only `fma` rounds a product and a sum together.
"""

import numpy as np

from ..formats import EXP2_COEFFICIENTS, LOG2E, Rounding
from ..oracle_math import round_to
from ..quantize import oracle as quantize_oracle

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


def _single(x: Array) -> Array:
    return x.astype(F32)


def _bf16(x: Array) -> Array:
    return round_to(x.astype(np.float64), "bfloat16")


@np.errstate(all="ignore")
def swiglu(gate: Array, up: Array, prob: Array) -> Array:
    """-> h (M, F) bf16.

    >>> one = round_to(np.ones((1, 1)), "bfloat16")
    >>> float(swiglu(one, one, np.zeros(0, np.float32))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    0.73046875
    """
    g, u = _single(gate), _single(up)
    h = (g * _sigmoid(g)) * u
    return _bf16(h * prob[:, None] if len(prob) else h)


@np.errstate(all="ignore")
def dprob_terms(dh: Array, gate: Array, up: Array) -> Array:
    """The terms of dprob, which are summed over F: (M, F) fp32."""
    g = _single(gate)
    return _single(dh) * ((g * _sigmoid(g)) * _single(up))


@np.errstate(all="ignore")
def swiglu_bwd(dh: Array, gate: Array, up: Array, prob: Array) -> tuple[Array, Array, Array]:
    """-> dgate, dup (M, F) bf16, dprob (M,) fp32, or (0,) without prob."""
    g, u, d = _single(gate), _single(up), _single(dh)
    sig = _sigmoid(g)
    silu = g * sig
    if len(prob):
        d = d * prob[:, None]
    slope = sig + silu * (ONE - sig)
    dgate, dup = _bf16((d * u) * slope), _bf16(d * silu)
    terms = dprob_terms(dh, gate, up).astype(np.float64)
    return dgate, dup, round_to(terms.sum(-1), "float32") if len(prob) else prob


def swiglu_row(gate, up, prob, rounding=Rounding.RCEIL, satfinite=False):
    """-> q (M, F), sf (M, F/32) of h."""
    return quantize_oracle.quantize_row(swiglu(gate, up, prob), rounding, satfinite)


def swiglu_col(gate, up, prob, rounding=Rounding.RCEIL, satfinite=False):
    """-> q_t (F, M), sf_t (F, M/32) of h."""
    return quantize_oracle.quantize_col(swiglu(gate, up, prob), rounding, satfinite)


def swiglu_bwd_row(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False):
    """-> q, sf of dgate, q, sf of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_row(x, rounding, satfinite)), dprob


def swiglu_bwd_col(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False):
    """-> q_t, sf_t of dgate, q_t, sf_t of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_col(x, rounding, satfinite)), dprob


def swiglu_bwd_both(dh, gate, up, prob, rounding=Rounding.RCEIL, satfinite=False):
    """-> q, sf, q_t, sf_t of dgate, the same of dup, dprob."""
    dgate, dup, dprob = swiglu_bwd(dh, gate, up, prob)
    return *(part for x in (dgate, dup) for part in quantize_oracle.quantize_both(x, rounding, satfinite)), dprob


def sigmoid64(g: Array) -> Array:
    """fp64: 1 / (1 + e^-g) without overflow."""
    t = np.exp(-np.abs(g, dtype=np.float64))
    return np.where(g < 0, t, 1) / (1 + t)


def swiglu64(gate: Array, up: Array, prob: Array) -> Array:
    """fp64: silu(gate) * up * prob."""
    g = gate.astype(np.float64)
    h = g * sigmoid64(g) * up.astype(np.float64)
    return h * prob[:, None].astype(np.float64) if len(prob) else h
