"""Cases of the family `fold`."""

import numpy as np

from ..cases import BF16, F32, Array, Arrays, Case, K, N, Rng, exp2, finite, floats, group_ends, seeded
from ..formats import BLOCK
from ..permute.cases import packed_and_map
from ..quantize.cases import matrix, matrix_fp32, mx, of_matrices
from ..quantize.oracle import quantize_col, quantize_row_packed

FLOOR = {"rounding": 1, "satfinite": True}


def weights_beyond(rng: Rng, m: int) -> Arrays:
    """Two matrices of which some rows and columns need a larger scale after their first 256 values: many of the first,
    whose first rows are zeros, one row and one column of the second. Tiles of the CUDA kernel are partial."""
    x = finite(rng, 2, m + 32, 2 * K)
    heavy = rng.random(x.shape[1:], F32) < 0.001
    x[0] = np.where(heavy, 1e4 * x[0].astype(F32), x[0]).astype(BF16)
    x[0, : min(256, m)] = 0
    x[1, m // 2, 300] = 2.0**20
    x[1, m, 17] = -(2.0**12)
    return (x,)


def weights_sorted(rng: Rng, m: int) -> Arrays:
    """A matrix of which all rows need a larger scale after their first 256 values, and most columns if it is high."""
    x = finite(rng, m + 32, 2 * K).astype(F32)
    steps = np.arange(x.shape[1]) / 16 + np.arange(x.shape[0])[:, None] / 64
    return ((x * exp2(np.minimum(steps, 100))).astype(BF16),)


def packed_map_and_ends(rng: Rng, m: int) -> Arrays:
    """Rows that begin at multiples of 4 bytes, and m of any of them or padding."""
    row_map = rng.integers(-1, max(m, 1), m).astype(np.int32)
    return quantize_row_packed(floats(rng, max(m, 1), 128)), row_map, group_ends(rng, m, 32)


def groups(rng: Rng, m: int) -> Arrays:
    return *quantize_col(floats(rng, m, N)), group_ends(rng, m, 32)


def many_groups(rng: Rng, m: int) -> Arrays:
    """Groups of up to nine blocks, some empty: shorter and longer than a span. After them one group of most tokens."""
    q, sf = quantize_col(floats(rng, m, N))
    blocks = m // 32
    ends = rng.integers(0, 10, 69).cumsum().clip(max=blocks)
    ends = np.append(ends, max(ends[-1], blocks - blocks // 8))
    return q[:37], sf[:37], ends.astype(np.int32) * np.int32(32)


CASES = {
    **of_matrices("quantize_row_fold"),
    "fold_rows": Case("fold_rows", mx),
    "fold_rows_headroom": Case("fold_rows", mx, {"headroom": 3}),
    "fold_groups": Case("fold_groups", groups, multiple=32),
    "fold_groups_of_many": Case("fold_groups", many_groups, multiple=32),
    "quantize_both_fold": Case(
        "quantize_both_fold", lambda rng, m: (*matrix(rng, m), group_ends(rng, m, 32)), multiple=32
    ),
    "quantize_both_fold_fp32": Case(
        "quantize_both_fold", lambda rng, m: (*matrix_fp32(rng, m), group_ends(rng, m, 32)), FLOOR, 32
    ),
    "requantize_col_fold": Case(
        "requantize_col_fold", lambda rng, m: (*mx(rng, m), group_ends(rng, m, 32)), multiple=32
    ),
    "permute_mx_fold": Case("permute_mx_fold", packed_and_map),
    "permute_mx_col_fold": Case("permute_mx_col_fold", packed_map_and_ends, multiple=32),
    # one matrix, which has rows if m is 0, too
    "quantize_matrix_fold": Case("quantize_matrix_fold", lambda rng, m: matrix(rng, m + 32), FLOOR, 32),
    "quantize_matrix_fold_3d": Case("quantize_matrix_fold", lambda rng, m: (floats(rng, m // 32, 32, K),), multiple=32),
    "quantize_matrix_fold_beyond": Case("quantize_matrix_fold", weights_beyond, multiple=32),
    "quantize_matrix_fold_sorted": Case("quantize_matrix_fold", weights_sorted, {"rounding": 1}, 32),
}


# --- fixed values ---------------------------------------------------------------------------------------

SPANNED = {
    name: np.array(ends, np.int32)
    for name, ends in {
        "every_length": [0, 32, 256, 512, 800, 800, 1344],  # of a group: 0, 32, 224, 256, 288, 544 tokens, and slack
        "ends_between_spans": [96, 640, 1440],
        "one_group": [1440],
        "no_tokens": [0, 0],
        "no_group": [],
        "one_block_each": list(range(BLOCK, 1441, BLOCK)),
    }.items()
}
"""Group ends among 1440 tokens."""


def _courses(columns: int) -> Array:
    """(1440, columns) fp32. By block, magnitudes are constant, rise by 2 or 2^17 every 8 blocks or by 2^200 at once,
    fall, or are 2^-40 to 2^40 at random. Some columns begin with zeros, NaN or infinity, some have nothing else."""
    rng, block = seeded("courses"), np.arange(1440 // BLOCK)[:, None]
    courses = [block * 0, block // 8 - 5, 17 * (block // 8 - 5), np.where(block < 20, -100, 100), -block]
    courses += [rng.integers(-40, 41, (len(block), columns))]
    octaves = np.choose(np.arange(columns) % len(courses), courses)
    x = (rng.standard_normal((1440, columns)) * np.exp2(octaves).repeat(BLOCK, 0)).astype(np.float32)
    for kind, value in enumerate((0, np.nan, np.inf)):
        x[:, 7 + kind :: 41] = value
        x[:300, 11 + kind :: 41] = value
        x[37::BLOCK, 15 + kind :: 41] = value  # every block but the first
        x[2 * BLOCK : 3 * BLOCK, 20 + kind :: 41] = value
    return x


COURSES = {"bf16": _courses(160).astype(BF16), "f32": _courses(96)}
WIDE_COURSES = _courses(544).astype(BF16)


def every_shift() -> tuple[Array, Array]:
    """Every element under every scale byte, next to a block that sets the row's scale: q (4096, 96), sf (4096, 3)."""
    rng = seeded("shifts")
    q = np.tile(np.arange(256, dtype=np.uint8).reshape(8, 1, BLOCK), (1, 256, 2)).reshape(2048, 2 * BLOCK)
    q = np.concatenate([np.concatenate([q, q]), rng.integers(0, 256, (4096, BLOCK), np.uint8)], axis=1)
    sf = np.tile(np.arange(256, dtype=np.uint8), 16)
    near = np.clip(sf.astype(int) + rng.integers(-24, 25, 4096), 0, 255).astype(np.uint8)
    return q, np.stack([sf, near, rng.integers(0, 256, 4096, np.uint8)], axis=1)
