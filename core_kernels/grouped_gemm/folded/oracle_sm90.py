"""The results of FP8 GEMMs on Hopper, to the bit: sums of its tensor cores, in the order of cuda_fp8_sm90.cu.

oracle.py and blockwise/oracle.py define the ops, with exact sums. Hopper's tensor cores cut theirs:

    32 products and the sum so far --aligned to the largest exponent e--> multiples of 2^(e - 13), cut toward zero
                                   --added exactly--> 14 significant bits, cut toward zero

                                                    terms of K, or tokens of a group
    | 32 | 32 | 32 | 32 | 32 ...
    '--- cut, from zero -'                          a stage of 128
             '---------------- fp32 ------> sum     rounded to nearest even
                                             x 2^-n where the scale of a span rises by n; + bias; x scales --> out

The exponent of a product is the sum of its factors' exponents. A factor that is subnormal in E4M3 has the exponent -6,
and a product that is zero has none. The functions have the names and arguments of the ops; a pair of GEMMs is bitwise
equal to two calls. Scales so far from one that a value before or after the scaling is no normal number are left to the
definitions.

Measured: tests/conformance/grouped_gemm/test_fp8_sums.py compares every bit with the device. Models of this kind, of
other tensor cores too: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores" (arXiv 2511.10909).
"""

from collections.abc import Callable

import numpy as np

from ...fold.oracle import span_slices
from ...formats import E4M3_NAN, SQUARE
from ...oracle_math import Array, e8m0_value, group_slices, round_to

STAGE = 128  # terms between two additions in fp32: those that the tensor cores sum alone
TERMS = 32  # products that a tensor core adds at a time
FRACTION = 13  # bits below the largest exponent
SIGNIFICANT = 14  # bits of a sum
_NO_EXPONENT = -(10**4)
Parts = tuple[Array, Array]
_ROWS_AT_ONCE = 64


def _factors(codes: Array) -> Parts:
    """E4M3 bytes -> signed significands, eighths of 2^exponent, and exponents."""
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.int32)
    significand = np.where(exponent > 0, 8 + mantissa, mantissa)
    return np.where(codes & 0x80, -significand, significand), np.maximum(exponent, 1).astype(np.int32) - 7


def _add_products(total: Array, a: Parts, b: Parts) -> Array:
    """total (M, N) fp64 plus the products of a (M, terms) and b (N, terms), as a tensor core adds them."""
    product = a[0][:, None].astype(np.int64) * b[0][None]  # in 64ths of 2^exponent
    exponent = np.where(product == 0, _NO_EXPONENT, a[1][:, None] + b[1][None])
    top = np.maximum(exponent.max(-1), np.where(total == 0, _NO_EXPONENT, np.frexp(total)[1] - 1))
    aligned = np.abs(product) << FRACTION - 6 >> np.minimum(top[..., None] - exponent, 63)
    unit = np.ldexp(1.0, np.where(top == _NO_EXPONENT, 0, top) - FRACTION)
    units = (np.sign(product) * aligned).sum(-1) + np.trunc(total / unit)
    excess = np.maximum(np.frexp(units)[1] - SIGNIFICANT, 0)
    return np.ldexp(np.trunc(np.ldexp(units, -excess)), excess) * unit


def _stage(a: Array, b: Array) -> Array:
    """E4M3 bytes a (M, up to 128), b (N, the same) -> their products' sum (M, N) in fp32."""
    total = np.zeros((len(a), len(b)))
    for at in range(0, a.shape[1], TERMS):
        total = _add_products(total, _factors(a[:, at : at + TERMS]), _factors(b[:, at : at + TERMS]))
    nan = ((a & 0x7F) == E4M3_NAN).any(1)[:, None] | ((b & 0x7F) == E4M3_NAN).any(1)
    return np.where(nan, np.nan, total).astype(np.float32)


def stages(a: Array, b: Array) -> list[Array]:
    """E4M3 bytes a (M, K), b (N, K) -> for each 128 of K the sum (M, N) in fp32, a few rows at a time."""
    parts = [a[row : row + _ROWS_AT_ONCE] for row in range(0, len(a), _ROWS_AT_ONCE)]
    at = range(0, a.shape[1], STAGE)
    return [np.concatenate([_stage(part[:, k : k + STAGE], b[:, k : k + STAGE]) for part in parts]) for k in at]


def _scales(row_sf: Array, col_sf: Array) -> Array:
    return e8m0_value(row_sf)[:, None] * e8m0_value(col_sf)


def _m_grouped(
    lhs_qf: Array, rhs_qf: Array, group_ends: Array, of_group: Callable[[slice, int], Array], out_dtype: str
) -> Array:
    """of_group(rows, g) -> the group's scaled sums, fp64 values of fp32 sums; rows past the last end are zeros."""
    out = np.zeros((len(lhs_qf), rhs_qf.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, rows in enumerate(group_slices(group_ends)):
            if rows.stop > rows.start:
                out[rows] = of_group(rows, g)
    return round_to(out, out_dtype)


def _sum(parts: list[Array], total: Array | float = 0) -> Array:
    total = total + np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def grouped_mm_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K), (M,) x rhs_t (G, N, K), (G, N) -> out (M, N)."""

    def of_group(rows: slice, g: int) -> Array:
        return _sum(stages(lhs_qf[rows], rhs_qf[g])) * _scales(lhs_sf[rows], rhs_sf[g])

    return _m_grouped(lhs_qf, rhs_qf, group_ends, of_group, out_dtype)


def grouped_mm_fold_bias(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, bias: Array, group_ends: Array,
    out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """grouped_mm_fold plus the group's row of bias (G, N) fp32, rounded to fp32 and then to the result."""
    products = grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, "float64")

    def of_group(rows: slice, g: int) -> Array:
        return (products[rows] + bias[g]).astype(np.float32)

    return _m_grouped(lhs_qf, rhs_qf, group_ends, of_group, out_dtype)


def grouped_mm_fold_sum(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array,
    lhs2_qf: Array, lhs2_sf: Array, rhs2_qf: Array, rhs2_sf: Array, group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs rhs^T + lhs2 rhs2^T: the first sum goes on in the units of the second product."""

    def of_group(rows: slice, g: int) -> Array:
        first, second = _scales(lhs_sf[rows], rhs_sf[g]), _scales(lhs2_sf[rows], rhs2_sf[g])
        total = (_sum(stages(lhs_qf[rows], rhs_qf[g])) * (first / second)).astype(np.float32)
        return _sum(stages(lhs2_qf[rows], rhs2_qf[g]), total) * second

    return _m_grouped(lhs_qf, rhs_qf, group_ends, of_group, out_dtype)


def grouped_mm_blockwise(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K), (M, K/128) x rhs_t (G, N, K), (G, N/128, K/128) -> out (M, N): an fma with the product of scales."""

    def of_group(rows: slice, g: int) -> Array:
        return _blockwise_sum(np.zeros((), np.float32), lhs_q[rows], lhs_sf[rows], rhs_q[g], rhs_sf[g])

    return _m_grouped(lhs_q, rhs_q, group_ends, of_group, out_dtype)


def grouped_mm_blockwise_sum(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array,
    lhs2_q: Array, lhs2_sf: Array, rhs2_q: Array, rhs2_sf: Array, group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs rhs^T + lhs2 rhs2^T: one sum over both products."""

    def of_group(rows: slice, g: int) -> Array:
        first = _blockwise_sum(np.zeros((), np.float32), lhs_q[rows], lhs_sf[rows], rhs_q[g], rhs_sf[g])
        return _blockwise_sum(first, lhs2_q[rows], lhs2_sf[rows], rhs2_q[g], rhs2_sf[g])

    return _m_grouped(lhs_q, rhs_q, group_ends, of_group, out_dtype)


def _blockwise_sum(total: Array, lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array) -> Array:
    """total + lhs rhs^T of a group, an fma per stage."""
    squares = np.repeat(rhs_sf, SQUARE, 0)[: rhs_q.shape[0]]
    for k, part in enumerate(stages(lhs_q, rhs_q)):
        factor = lhs_sf[:, k, None] * squares[:, k]
        total = (total + part.astype(np.float64) * factor).astype(np.float32)
    return total


def grouped_wgrad_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs_t (N, M), (S, N) x rhs_t (K, M), (S, K) -> out (G, N, K); stages begin with the group."""
    out = np.zeros((len(group_ends), len(lhs_qf), len(rhs_qf)))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, spans in enumerate(span_slices(group_ends)):
            total, before = np.zeros((), np.float32), None
            for slot, tokens in spans:
                units = _scales(lhs_sf[slot], rhs_sf[slot])
                if before is not None:
                    total = (total * (before / units)).astype(np.float32)
                total, before = _sum(stages(lhs_qf[:, tokens], rhs_qf[:, tokens]), total), units
            if before is not None:
                out[g] = total * before
    return round_to(out, out_dtype)
