"""Operands with the largest loss of a fold, or with sums that cancel.

EXTREMES   name -> Extreme     fp32, all of one shape, because JAX compiles each shape
"""

from dataclasses import dataclass

import numpy as np
from mxep.core_kernels.cases import Array, lognormal_blocks, normal, seeded
from mxep.core_kernels.formats import BLOCK

GROUPS, ROWS, COLUMNS, TERMS = 2, 40, 16, 512
ROW_ENDS = np.int32([24, 40])
TERM_ENDS = np.int32([96, 96, 512])
"""Where groups end along the rows of a product, and along the terms of a weight gradient."""
TIES = "rounded_by_half_a_step"
LOST = "only_small_blocks_meet_weights"


@dataclass(frozen=True)
class Extreme:
    """lhs (ROWS, TERMS), rhs_t (GROUPS, COLUMNS, TERMS) fp32."""

    lhs: Array
    rhs_t: Array


def _octaves(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float, tops: list[int]) -> Array:
    """Normal values in blocks of magnitudes from 2^low to 2^high, shuffled; the largest of each group of terms is at
    `tops`, because XLA's matmul on a CPU reads operands that are all subnormal numbers as zeros."""
    octaves = np.linspace(high, low, TERMS // BLOCK)
    rest = [block for block in range(TERMS // BLOCK) if block not in tops]
    exponents = np.empty((*shape[:-1], TERMS // BLOCK))
    exponents[..., tops] = octaves[: len(tops)]
    exponents[..., rest] = rng.permuted(np.broadcast_to(octaves[len(tops) :], (*shape[:-1], len(rest))), axis=-1)
    return normal(rng, shape) * np.repeat(np.exp2(exponents), BLOCK, axis=-1)


def _extremes() -> dict[str, Extreme]:
    lhs_shape, rhs_shape = (ROWS, TERMS), (GROUPS, COLUMNS, TERMS)
    cases: dict[str, tuple[Array, Array]] = {}
    rng = seeded("extremes")

    cases["scales_of_every_size"] = _octaves(rng, lhs_shape, -140, 125, [0, 7]), normal(rng, rhs_shape) * 2.0**-60
    cases["scales_of_both_far_apart"] = (
        _octaves(rng, lhs_shape, -140, 60, [0, 7]),
        _octaves(rng, rhs_shape, -100, 40, [1, 6]),
    )

    lhs, rhs = normal(rng, lhs_shape), normal(rng, rhs_shape)
    lhs *= np.where(np.arange(TERMS) < TERMS // 2, 2.0**60, 2.0**-40)
    rhs[..., : TERMS // 2] = 0
    cases[LOST] = lhs, rhs

    lhs = normal(rng, lhs_shape)
    lhs[:, 37] = np.exp2(3.0 * np.arange(ROWS))  # the rest of a row passes through the subnormals, then vanishes
    cases["one_large_element"] = lhs, normal(rng, rhs_shape) * 2.0**-20

    lhs, rhs = lognormal_blocks(rng, lhs_shape), lognormal_blocks(rng, rhs_shape)
    lhs[::3], rhs[:, ::5] = 0, 0
    cases["rows_of_zeros"] = lhs, rhs

    lhs, rhs = lognormal_blocks(rng, lhs_shape), lognormal_blocks(rng, rhs_shape)
    lhs[3, 40], lhs[30, 200], rhs[1, 5, 70] = np.nan, np.inf, np.nan
    cases["a_nan_block_beside_finite_ones"] = lhs, rhs

    lhs, rhs = lognormal_blocks(rng, lhs_shape), lognormal_blocks(rng, rhs_shape)
    lhs[:, 1::2], rhs[..., 1::2] = -lhs[:, ::2], rhs[..., ::2]
    lhs[:, 0] *= 1.25
    cases["terms_that_cancel"] = lhs, rhs

    # The folded row has scale 1, and E4M3's smallest step is 2^-9. Half a step and one and a half steps are ties that
    # round the same way. A fold that truncates would lose seven eighths of a step, which the second group has.
    lhs = np.full(lhs_shape, 1.75 * 2.0**-10)
    lhs[: ROW_ENDS[0] : 2], lhs[1 : ROW_ENDS[0] : 2] = 2.0**-10, 3 * 2.0**-10
    lhs[:, :BLOCK], lhs[:, 0] = 0, 256
    rhs = np.where(np.arange(COLUMNS)[:, None] % 2, -1, 1) * np.ones(rhs_shape)
    rhs[..., 0] = 0
    cases[TIES] = lhs, rhs
    return {name: Extreme(*(x.astype(np.float32) for x in pair)) for name, pair in cases.items()}


EXTREMES = _extremes()
