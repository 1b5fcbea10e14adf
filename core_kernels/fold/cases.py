"""Cases of the family `fold`."""

from collections.abc import Iterator

import numpy as np

from ..cases import (
    BF16,
    F32,
    MODES,
    Array,
    Arrays,
    Case,
    K,
    N,
    Rng,
    exp2,
    finite,
    fixed,
    floats,
    group_ends,
    normal,
    seeded,
    timed,
)
from ..formats import BLOCK, packed_width
from ..permute.cases import packed_and_map
from ..quantize.cases import MATRICES, ROW_ONLY, matrix, matrix_fp32, mx, of_matrices
from ..quantize.oracle import quantize_col, quantize_row, quantize_row_packed

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


def _matrix_cases(op: str) -> dict[str, Case]:
    return {
        op: Case(op, lambda rng, m: matrix(rng, m + 32), FLOOR, 32),  # one matrix, which has rows if m is 0, too
        f"{op}_3d": Case(op, lambda rng, m: (floats(rng, m // 32, 32, K),), multiple=32),
        f"{op}_beyond": Case(op, weights_beyond, multiple=32),
        f"{op}_sorted": Case(op, weights_sorted, {"rounding": 1}, 32),
    }


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
    **{
        f"quantize_blockwise_fold{kind}": Case(
            "quantize_blockwise_fold",
            lambda rng, m: (*matrix(rng, m), group_ends(rng, m, 32)),
            {"power_of_two": bool(kind)},
            32,
        )
        for kind in ("", "_powers")
    },
    "requantize_col_fold": Case(
        "requantize_col_fold", lambda rng, m: (*mx(rng, m), group_ends(rng, m, 32)), multiple=32
    ),
    "permute_mx_fold": Case("permute_mx_fold", packed_and_map),
    "permute_mx_col_fold": Case("permute_mx_col_fold", packed_map_and_ends, multiple=32),
    **_matrix_cases("quantize_matrix_fold"),
    **_matrix_cases("quantize_matrix_fold_t"),
}
TIMED = (
    timed("quantize_row_fold", "M K"),
    timed("quantize_both_fold", "M K G"),
    timed("requantize_col_fold", "M K G"),
    timed("quantize_matrix_fold", "G N K"),
    timed("quantize_matrix_fold_t", "G N K"),
)


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


HEADROOMS = (0, 1, 7)
NO_ROWS = {str(ends): np.array(ends, np.int32) for ends in ([0, 0], [0], [])}
SPECIAL = ("all_bf16_shuffled", "random_bits_fp32", "nan_signs_and_inf", "smallest_subnormals", "signed_zeros")


def _mx(rng: Rng, low: int, high: int, *shape: int) -> Arrays:
    """q of any bytes, sf of the bytes from low to high."""
    return rng.integers(0, 256, shape, np.uint8), rng.integers(low, high, (*shape[:-1], shape[-1] // BLOCK), np.uint8)


def _close_scales(k: int) -> Arrays:
    """Scales close to each other, with NaN blocks, first spans of NaN blocks alone, and the largest scale."""
    rng = seeded(f"headroom {k}")
    sf = rng.integers(100, 104, (64, k // BLOCK), np.uint8)
    sf[rng.random(sf.shape) < 0.05] = 255
    sf[:4, :8], sf[4:8] = 255, rng.integers(248, 255, (4, k // BLOCK))
    return rng.integers(0, 256, (64, k), np.uint8), sf


def _rows_of_1024() -> Array:
    x = MATRICES["all_bf16_shuffled"]
    return np.concatenate([x.reshape(-1, 1024), np.zeros((4, 1024), x.dtype)])


def _of_rows() -> Iterator[tuple[str, Case]]:
    """fold_rows and quantize_row_fold."""
    q, sf = every_shift()
    yield "fold_rows-every_shift", fixed("fold_rows", q, sf)
    for shape in ((0, 64), (1, 32), (37, 544), (3, 5, 96)):
        yield f"fold_rows-{shape}", fixed("fold_rows", *_mx(np.random.default_rng(3), 100, 140, *shape))
    for headroom in HEADROOMS:
        for k in (64, 256, 288, 800):
            yield f"fold_rows-headroom_{headroom}-{k}", fixed("fold_rows", *_close_scales(k), headroom=headroom)
        rows = fixed("quantize_row_fold", _rows_of_1024(), headroom=headroom)
        yield f"quantize_row_fold-headroom_{headroom}", rows
    for name, x in MATRICES.items():
        for mode, options in MODES.items():
            yield f"quantize_row_fold-{name}-{mode}", fixed("quantize_row_fold", x, **options)


def _every_course_of_scales() -> Arrays:
    """q, sf of 1440 tokens: scales that rise by 1, 17 and 200, fall, or begin with NaN or zero blocks; random ones."""
    rng, block = seeded("courses"), np.arange(1440 // BLOCK)
    courses = [np.full(len(block), byte) for byte in (0, 100, 254, 255)]
    courses += [100 + block // 8, 20 + block // 8 * 17, np.where(block < 20, 10, 210), 200 - block]
    courses += [np.where(block < 9, early, 120) for early in (0, 118, 119, 120, 121, 255)]
    courses += [np.where(block < 9, 253, 254), np.where(block % 2, 255, 90 + block), np.where(block < 12, 255, 0)]
    random = [rng.integers(0, 256, (20, len(block))), rng.integers(110, 130, (20, len(block)))]
    sf = np.concatenate([np.stack(courses), *random]).astype(np.uint8)
    return rng.integers(0, 256, (len(sf), 1440), np.uint8), sf


def _of_groups() -> Iterator[tuple[str, Case]]:
    """fold_groups."""
    q, sf = every_shift()
    for ends in ([96], [0, 32, 32, 96], [32, 64, 96], [64], [0, 0], []):
        yield f"fold_groups-every_shift-{ends}", fixed("fold_groups", q, sf, np.array(ends, np.int32))
    for rows, ends in ((1, [0, 2048, 5120]), (37, [4064, 4096]), (5, [32 * g for g in range(65)])):
        q, sf = _mx(seeded(f"groups {rows}"), 90, 140, rows, ends[-1] + 96)
        yield f"fold_groups-{rows}_rows", fixed("fold_groups", q, sf, np.array(ends, np.int32))
    q, sf = _every_course_of_scales()
    for name, ends in SPANNED.items():
        yield f"fold_groups-courses-{name}", fixed("fold_groups", q, sf, ends)
    for shape, ends in (((3, 0), [0, 0]), ((0, 64), [32, 64])):
        q, sf = np.zeros(shape, np.uint8), np.zeros((shape[0], shape[1] // BLOCK), np.uint8)
        yield f"fold_groups-{shape}", fixed("fold_groups", q, sf, np.array(ends, np.int32))


def _of_both() -> Iterator[tuple[str, Case]]:
    """quantize_both_fold."""
    op = "quantize_both_fold"
    for name, x in MATRICES.items():
        if x.ndim == 2 and name not in ROW_ONLY:
            half = len(x) // 2 // BLOCK * BLOCK
            for mode, options in MODES.items():
                yield f"{op}-matrix-{name}-{mode}", fixed(op, x, np.array([0, half, half, len(x)], np.int32), **options)
    for name, x in COURSES.items():
        for of, ends in SPANNED.items():
            yield f"{op}-courses-{name}-{of}", fixed(op, x, ends)
    for mode, options in MODES.items():
        yield f"{op}-wide-{mode}", fixed(op, WIDE_COURSES, SPANNED["every_length"], **options)
    for of, ends in NO_ROWS.items():
        yield f"{op}-no_rows-{of}", fixed(op, np.zeros((0, 64), BF16), ends)


def _of_blockwise() -> Iterator[tuple[str, Case]]:
    """quantize_blockwise_fold."""
    op = "quantize_blockwise_fold"
    for powers in (False, True):
        for name in ("all_bf16", "all_bf16_shuffled", "random_bits_fp32"):
            x = MATRICES[name]
            ends = np.array([len(x) // 2, len(x) // 2, len(x)], np.int32)
            yield f"{op}-matrix-{name}-{powers}", fixed(op, x, ends, power_of_two=powers)
    for of, ends in SPANNED.items():
        yield f"{op}-courses-{of}", fixed(op, COURSES["bf16"], ends)
    for of, ends in NO_ROWS.items():
        yield f"{op}-no_rows-{of}", fixed(op, np.zeros((0, 64), BF16), ends)


def _neighbours() -> Array:
    """Three matrices of other magnitudes, with rows, columns and a whole matrix of NaN."""
    x = normal(seeded("matrices"), (4, 96, 160)) * np.exp2([-20, 0, 30, 0]).reshape(4, 1, 1)
    x[0, 5], x[1, :, 9], x[3] = np.nan, np.nan, np.nan
    x[2, 33, 70] = np.inf
    return x


def _beyond_the_first_span(name: str) -> Array:
    """(2, 544, 320): rows and columns whose largest block is not among their first 256 values."""
    x = normal(seeded(name), (2, 544, 320))
    if name == "some":
        x[0, 300, 300], x[1, 3, 319], x[1, 543, 5] = 1e3, -1e4, 20
    elif name == "all":
        x[:, :256] /= 64
        x[:, :, :256] /= 64
    elif name == "first span of NaN":
        x[:, :256, 40:], x[:, 40:, :256] = np.nan, np.nan
    else:  # the first span decides, with and without its headroom
        x[:, :, 256:] *= np.exp2(np.arange(544) % 4 - 1)[:, None]
    return x.astype(BF16)


def _of_matrices(op: str) -> Iterator[tuple[str, Case]]:
    """quantize_matrix_fold and quantize_matrix_fold_t."""
    for name in SPECIAL:
        for mode, options in MODES.items():
            yield f"{op}-matrix-{name}-{mode}", fixed(op, MATRICES[name], **options)
    for name, x in COURSES.items():
        yield f"{op}-courses-{name}", fixed(op, x)
    for dtype in (BF16, F32):
        yield f"{op}-neighbours-{dtype}", fixed(op, _neighbours().astype(dtype))
    for name in ("some", "all", "first span of NaN", "near"):
        yield f"{op}-beyond_the_first_span-{name}", fixed(op, _beyond_the_first_span(name))
    yield f"{op}-no_matrices", fixed(op, np.zeros((0, 32, 64), BF16))


def _mapped(rows: int, out_rows: int = 1440) -> Array:
    """Any rows, some several times, and padding."""
    return seeded("mapped").integers(-1, rows, out_rows).astype(np.int32)


def _any_packed(k: int) -> Arrays:
    """Every code under every scale, NaN among them."""
    packed, row_map = seeded("any").integers(0, 256, (40, packed_width(k)), np.uint8), _mapped(40, 96)
    packed[7, k:] = 255
    row_map[:2] = 7, -1
    return packed, row_map


def _of_maps() -> Iterator[tuple[str, Case]]:
    """permute_mx_fold and permute_mx_col_fold."""
    for k in (32, 128, 160):
        yield f"permute_mx_fold-any-{k}", fixed("permute_mx_fold", *_any_packed(k))
    op, in_order = "permute_mx_col_fold", np.arange(1440, dtype=np.int32)
    in_order[::37] = -1
    for name, x in COURSES.items():
        for of, ends in SPANNED.items():  # 160 columns, whose rows begin at any byte, or 128 or 96
            packed = quantize_row_packed(x[:, :128] if of == "every_length" else x)
            yield f"{op}-courses-{name}-{of}", fixed(op, packed, in_order, ends)
    packed = seeded("packed").integers(0, 256, (300, packed_width(128)), np.uint8)
    packed[:150, 128:] = packed[:150, 128:] % 40 + 100
    for mode, options in MODES.items():
        yield f"{op}-any-{mode}", fixed(op, packed, _mapped(300), SPANNED["every_length"], **options)
    packed, none = np.zeros((3, packed_width(128)), np.uint8), np.zeros(0, np.int32)
    for of, ends in NO_ROWS.items():
        yield f"{op}-no_rows-{of}", fixed(op, packed, none, ends)
    yield "permute_mx_fold-no_rows", fixed("permute_mx_fold", packed, none)


def _of_mx_rows() -> Iterator[tuple[str, Case]]:
    """requantize_col_fold."""
    op, rng, m = "requantize_col_fold", seeded("requantized"), 1440
    for name, x in COURSES.items():
        for of, ends in SPANNED.items():
            yield f"{op}-courses-{name}-{of}", fixed(op, *quantize_row(x), ends)
    # every code under every scale, next to blocks of ordinary magnitudes
    q, sf = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((m, 160), (m, 5)))
    sf[: m // 2] = rng.integers(100, 140, sf[: m // 2].shape)
    for mode, options in MODES.items():
        yield f"{op}-any-{mode}", fixed(op, q, sf, SPANNED["every_length"], **options)
    for of, ends in NO_ROWS.items():
        yield f"{op}-no_rows-{of}", fixed(op, np.zeros((0, 64), np.uint8), np.zeros((0, 2), np.uint8), ends)


CONFORMANCE = {
    **dict(case for of in (_of_rows, _of_groups, _of_both, _of_blockwise, _of_maps, _of_mx_rows) for case in of()),
    **dict(case for op in ("quantize_matrix_fold", "quantize_matrix_fold_t") for case in _of_matrices(op)),
}
