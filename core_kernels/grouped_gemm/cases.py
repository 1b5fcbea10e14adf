"""Cases of the family `grouped_gemm`."""

import numpy as np

from ..cases import BF16, F32, GROUPS, Array, Arrays, Case, K, N, Rng, finite, group_ends
from ..fold.oracle import fold_groups, quantize_row_fold
from ..quantize.oracle import quantize_col, quantize_row
from ..quantize.oracle_blockwise import quantize_blockwise, quantize_squares

WIDE = {"out_dtype": "float32"}


def ragged(rng: Rng, m: int) -> Array:
    """Unaligned ends. The first group has one row if m > 0."""
    return np.int32([min(m, 1), max(min(m, 1), m // 3), m - m // 8])


def mm(rng: Rng, m: int) -> Arrays:
    return finite(rng, m, K), finite(rng, GROUPS, N, K), group_ends(rng, m)


def kn(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return lhs, rhs_t.swapaxes(1, 2), ends


def kn_sum(rng: Rng, m: int) -> Arrays:
    *pair, ends = kn(rng, m)
    return *pair, *kn(rng, m)[:2], ends


def kn_tiles(rng: Rng, m: int) -> Arrays:
    """A contraction dim that is no multiple of a stage: a stage does not reach into the weights of the next group."""
    rhs = finite(rng, GROUPS, 200, 808)
    rhs[1:, :56] = np.nan
    return finite(rng, m, 200), rhs, np.full(3, m - m // 8, np.int32)


def mm_mx(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_row(lhs), *quantize_row(rhs_t), ends


def wgrad_mx(rng: Rng, m: int) -> Arrays:
    return *quantize_col(finite(rng, m, N)), *quantize_col(finite(rng, m, K)), group_ends(rng, m, 32)


def mm_fold(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_row_fold(lhs), *quantize_row_fold(rhs_t), ends


def mm_fold_bias(rng: Rng, m: int) -> Arrays:
    *operands, ends = mm_fold(rng, m)
    return *operands, rng.standard_normal((GROUPS, N), F32), ends


def mm_fold_sum(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t = finite(rng, m, 2 * K), finite(rng, GROUPS, N, 2 * K)
    large, small = BF16.type(2.0**60), BF16.type(2.0**-60)
    operands = lhs[:, :K], rhs_t[..., :K], lhs[:, K:] * large, rhs_t[..., K:] * small
    return *(t for x in operands for t in quantize_row_fold(x)), group_ends(rng, m)


def mm_fold_pair(rng: Rng, m: int) -> Arrays:
    *operands, ends = mm_fold(rng, m)
    return *operands, *quantize_row_fold(finite(rng, GROUPS, N, K)), ends


def mm_fold_pair_tiles(rng: Rng, m: int) -> Arrays:
    operands = finite(rng, m, 416), finite(rng, GROUPS, 808, 416), finite(rng, GROUPS, 808, 416)
    return *(t for x in operands for t in quantize_row_fold(x)), ragged(rng, m)


def blockwise(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t, ends = mm(rng, m)
    return *quantize_blockwise(lhs), *quantize_squares(rhs_t), ends


def blockwise_tiles(rng: Rng, m: int) -> Arrays:
    lhs, rhs_t = finite(rng, m, 416), finite(rng, GROUPS, 808, 416)
    return *quantize_blockwise(lhs), *quantize_squares(rhs_t), ragged(rng, m)


def by_group(x: Array, ends: Array) -> Arrays:
    return fold_groups(*quantize_col(x), ends)


def wgrad_fold(rng: Rng, m: int) -> Arrays:
    lhs, rhs, ends = finite(rng, m, N), finite(rng, m, K), group_ends(rng, m, 32)
    return *by_group(lhs, ends), *by_group(rhs, ends), ends


def wgrad_fold_pair(rng: Rng, m: int) -> Arrays:
    *operands, ends = wgrad_fold(rng, m)
    return *operands, *by_group(finite(rng, m, N), ends), ends


def wgrad_fold_pair_tiles(rng: Rng, m: int) -> Arrays:
    ends = group_ends(rng, m, 32)
    return *(t for n in (808, 328, 808) for t in by_group(finite(rng, m, n), ends)), ends


CASES = {
    "grouped_mm_mx": Case("grouped_mm_mx", mm_mx),
    "grouped_mm_bf16": Case("grouped_mm_bf16", mm),
    "grouped_wgrad_mx": Case("grouped_wgrad_mx", wgrad_mx, multiple=32),
    "grouped_wgrad_bf16": Case(
        "grouped_wgrad_bf16", lambda rng, m: (finite(rng, m, N), finite(rng, m, K), group_ends(rng, m))
    ),
    "grouped_wgrad_bf16_t": Case(
        "grouped_wgrad_bf16_t", lambda rng, m: (finite(rng, N, m), finite(rng, K, m), group_ends(rng, m)), multiple=32
    ),
    "grouped_mm_bf16_kn": Case("grouped_mm_bf16_kn", kn),
    "grouped_mm_bf16_kn_sum": Case("grouped_mm_bf16_kn_sum", kn_sum),
    "grouped_mm_bf16_kn_tiles": Case("grouped_mm_bf16_kn", kn_tiles, WIDE),
    "grouped_mm_bf16_tiles": Case(
        "grouped_mm_bf16", lambda rng, m: (finite(rng, m, 200), finite(rng, GROUPS, 808, 200), ragged(rng, m)), WIDE
    ),
    "grouped_wgrad_bf16_tiles": Case(
        "grouped_wgrad_bf16", lambda rng, m: (finite(rng, m, 808), finite(rng, m, 328), ragged(rng, m)), WIDE
    ),
    "grouped_wgrad_bf16_t_tiles": Case(
        "grouped_wgrad_bf16_t", lambda rng, m: (finite(rng, 808, m), finite(rng, 328, m), ragged(rng, m)), WIDE, 32
    ),
    "grouped_mm_fold": Case("grouped_mm_fold", mm_fold),
    "grouped_mm_fold_fp32": Case("grouped_mm_fold", mm_fold, WIDE),
    "grouped_mm_fold_bias": Case("grouped_mm_fold_bias", mm_fold_bias),
    "grouped_mm_fold_sum": Case("grouped_mm_fold_sum", mm_fold_sum),
    "grouped_mm_fold_sum_fp32": Case("grouped_mm_fold_sum", mm_fold_sum, WIDE),
    "grouped_mm_fold_bias_fp32": Case("grouped_mm_fold_bias", mm_fold_bias, WIDE),
    "grouped_mm_blockwise": Case("grouped_mm_blockwise", blockwise),
    "grouped_mm_blockwise_tiles": Case("grouped_mm_blockwise", blockwise_tiles, WIDE),
    "grouped_mm_fold_pair": Case("grouped_mm_fold_pair", mm_fold_pair),
    "grouped_mm_fold_pair_tiles": Case("grouped_mm_fold_pair", mm_fold_pair_tiles, WIDE),
    "grouped_wgrad_fold": Case("grouped_wgrad_fold", wgrad_fold, multiple=32),
    "grouped_wgrad_fold_pair": Case("grouped_wgrad_fold_pair", wgrad_fold_pair, multiple=32),
    "grouped_wgrad_fold_pair_tiles": Case("grouped_wgrad_fold_pair", wgrad_fold_pair_tiles, WIDE, 32),
}
