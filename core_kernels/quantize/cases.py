"""Cases of the family `quantize`: floats in, bytes out."""

import numpy as np

from ..cases import (
    BF16,
    DISTRIBUTIONS,
    F32,
    GROUPS,
    MODES,
    OUT_DTYPES,
    Array,
    Arrays,
    Case,
    K,
    Rng,
    fixed,
    floats,
    lognormal_blocks,
    normal,
    seeded,
    student_t,
    timed,
)
from ..formats import BLOCK
from .oracle import quantize_row

ROWS = (
    *("quantize_row", "quantize_row_packed", "quantize_rowwise"),
    *("quantize_blockwise", "quantize_squares", "quantize_squares_both"),
)
COLUMNS = ("quantize_col", "quantize_both")


def matrix(rng: Rng, m: int) -> Arrays:
    return (floats(rng, m, K),)


def matrix_fp32(rng: Rng, m: int) -> Arrays:
    return (floats(rng, m, K, dtype=F32),)


def experts(rng: Rng, m: int) -> Arrays:
    return (floats(rng, GROUPS, m, K),)


def mx(rng: Rng, m: int) -> Arrays:
    return quantize_row(floats(rng, m, K))


def of_matrices(*ops: str, multiple: int = 1) -> dict[str, Case]:
    makes = {"": matrix, "_fp32": matrix_fp32, "_3d": experts}
    return {
        f"{op}{kind}": Case(op, make, {}, multiple)
        for op in ops
        for kind, make in makes.items()
        if (op, kind) != ("quantize_row_packed", "_3d")
    }


CASES = {
    **of_matrices(*ROWS),
    **of_matrices(*COLUMNS, multiple=32),
    "quantize_both_floor_satfinite": Case("quantize_both", matrix, {"rounding": 1, "satfinite": True}, 32),
    "dequantize": Case("dequantize", mx),
    "dequantize_fp32": Case("dequantize", mx, {"out_dtype": "float32"}),
}
TIMED = (
    *(timed(op, "M K") for op in ("quantize_row", "quantize_rowwise", "quantize_col", "quantize_both", "dequantize")),
    *(timed("quantize_weights", "G N K", f"quantize_{layout}", layout=layout) for layout in ("row", "col")),
)


# --- fixed values ---------------------------------------------------------------------------------------


def _fp32(bits: Array | list[int]) -> Array:
    return np.asarray(bits, np.uint32).view(np.float32)


def _matrices() -> dict[str, Array]:
    shape = (64, 160)
    cases = {name: f(seeded(name), shape).astype(BF16) for name, f in DISTRIBUTIONS.items()}
    cases["normal_fp32"] = normal(seeded("fp32"), shape).astype(np.float32)
    cases["large_fp32"] = lognormal_blocks(seeded("large"), (96, 544)).astype(np.float32)
    cases["three_dims"] = student_t(seeded("3d"), (3, 64, 96)).astype(BF16)

    patterns = np.arange(2**16, dtype=np.uint16)
    cases["all_bf16"] = patterns.view(BF16).reshape(512, 128)  # a block holds 32 consecutive values of one exponent
    cases["all_bf16_shuffled"] = seeded("shuffle").permutation(patterns).view(BF16).reshape(512, 128)
    cases["random_bits_fp32"] = _fp32(seeded("bits").integers(0, 2**32, (64, 64), np.uint32))

    # the fp32 values at and next to the edge of each scale, 448 * 2^k or 2^k, one block each
    for name, top in (("rceil_edges", 448.0), ("floor_edges", 1.0)):
        edges = np.ldexp(np.float32(top), np.arange(-157, 119)).astype(np.float32)
        edges = np.nextafter(np.stack([edges] * 3), np.array([[-np.inf], [0], [np.inf]], np.float32)).reshape(-1)[:800]
        edges[1::3] = np.abs(edges[1::3])
        x = edges[:, None] * seeded(name).uniform(-1, 1, (800, BLOCK)).astype(np.float32)
        x[:, 5] = -edges
        cases[name] = x.reshape(32, 800)

    signs = np.where(seeded("signs").random((32, 64)) < 0.5, -1.0, 1.0).astype(np.float32)
    cases["signed_zeros"] = 0 * signs
    cases["fp32_subnormals"] = _fp32(seeded("subnormal").integers(1, 2**23, (32, 64), np.uint32)) * signs
    cases["smallest_subnormals"] = _fp32(seeded("smallest").integers(0, 4, (32, 64), np.uint32)) * signs
    cases["bf16_subnormals"] = seeded("bf16").integers(0, 2**7, (32, 64)).astype(np.uint16).view(BF16)
    cases["largest_finite"] = np.float32(3.4028235e38) * signs
    cases["element_subnormals"] = np.float32(2.0**-17) * seeded("elements").uniform(-1, 1, (32, 64)).astype(np.float32)
    cases["element_subnormals"][:, ::BLOCK] = 1  # so that the rest of a block falls below 2^-6 of its scale

    for name, bad in (("nan_row", np.nan), ("inf_row", np.inf), ("minus_inf_row", -np.inf)):
        x = normal(seeded(name), (64, 96)).astype(np.float32)
        x[7, 40] = bad
        cases[name] = x.astype(BF16)
    cases["nan_signs_and_inf"] = normal(seeded("ns"), (32, 64)).astype(np.float32)
    cases["nan_signs_and_inf"][0, :3] = _fp32([0xFFC00001, 0x7FA00000, 0x7F800000])
    cases["zero_rows"] = np.zeros((0, 64), BF16)
    cases["one_block"] = normal(seeded("block"), (32, 32)).astype(np.float32)
    return cases


def _row_only() -> dict[str, Array]:
    return {
        "one_token": normal(seeded("token"), (1, 64)).astype(BF16),
        "odd_rows": normal(seeded("odd"), (37, 96)).astype(BF16),
        "odd_rows_three_dims": normal(seeded("odd3"), (2, 5, 32)).astype(np.float32),
    }


ROW_ONLY = _row_only()
"""Rows are no multiple of 32."""
MATRICES = _matrices() | ROW_ONLY


def _amax_at_every_edge() -> Array:
    """Each row has another amax, at or next to 448 * 2^e or 2^e, from fp32's smallest to its largest value."""
    with np.errstate(over="ignore"):
        powers = np.concatenate([np.ldexp(np.float32(top), np.arange(-158, 128)) for top in (448, 1)])
    edges = np.nextafter(np.stack([powers] * 3), np.array([[0], [0], [np.inf]], np.float32))
    edges[1] = powers
    edges = np.abs(edges[np.isfinite(edges)])
    x = edges[:, None] * seeded("edges").uniform(-1, 1, (len(edges), 3 * BLOCK)).astype(np.float32)
    x[:, 70] = -edges  # in the last block of the three
    return x


def _one_huge_value() -> Array:
    """Next to it the other values are E4M3 subnormals or less; the last row has one value of each magnitude."""
    x = seeded("huge").standard_normal((40, 96)).astype(np.float32)
    x[np.arange(40), np.arange(40) * 2] = np.ldexp(np.float32(1), np.arange(40) * 3)
    x[-1] = np.ldexp(np.float32(-1), np.arange(96) - 80)
    return x


def _special_rows() -> Array:
    """Between ordinary rows, one row each with a NaN, an infinity, both, zeros of one sign, subnormals, the largest."""
    x = seeded("special").standard_normal((15, 64)).astype(np.float32)
    x[1, 40], x[3, 0], x[5, 63] = np.nan, np.inf, -np.inf
    x[7, :2] = np.nan, np.inf
    x[9], x[11, :] = -0.0, np.uint32(3).view(np.float32)
    x[13] = np.copysign(np.finfo(np.float32).max, x[13])
    x[14, :33] = 0
    return x


LONG_ROWS = {
    "amax_at_every_edge": _amax_at_every_edge(),
    "one_huge_value": _one_huge_value(),
    "special_rows": _special_rows(),
    "special_rows_bf16": _special_rows().astype(BF16),
    "zeros_of_both_signs": np.tile(np.array([0.0, -0.0], np.float32), (2, 32)),
    "more_than_a_power_of_two": seeded("wide").standard_normal((3, 1056)).astype(BF16),
    "wide": seeded("wider").standard_t(2, (2, 7168)).astype(np.float32),
}


def _special_squares() -> Array:
    """(2, 150, 300): squares with a NaN, an infinity, negative zeros, subnormals, the largest value; ragged ends."""
    x = seeded("squares").standard_normal((2, 150, 300)).astype(np.float32)
    x[0, 5, 7], x[0, 149, 130], x[1, 3, 299] = np.nan, -np.inf, np.finfo(np.float32).max
    x[0, :128, 256:] = -0.0
    x[1, :128, :128] = np.uint32(3).view(np.float32)
    return x


SQUARES = {
    "special_squares": _special_squares(),
    "one_value": np.array([[-3.0]], np.float32),
    "no_rows": np.zeros((0, 256), np.float32),
    "no_columns": np.zeros((3, 0), np.float32),
    "across_a_square": seeded("across").standard_normal((129, 385)).astype(BF16),
}


EVERY_BF16 = np.arange(2**16, dtype=np.uint16).reshape(512, 128).view(BF16)
"""A row holds values of one exponent."""
_VALUES = MATRICES | LONG_ROWS
_IN_ROWS = {
    "every_bf16": EVERY_BF16,
    "every_bf16_and_1": np.concatenate([EVERY_BF16, np.ones((512, 32), BF16)], axis=1),
}
_BYTES = np.arange(256, dtype=np.uint8)


def _mx(*shape: int) -> Arrays:
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, shape, np.uint8), rng.integers(0, 256, (*shape[:-1], shape[-1] // BLOCK), np.uint8)


CONFORMANCE = {
    **{
        f"{op}-{name}-{mode}": fixed(op, x, **options)
        for op in ("quantize_row", "quantize_row_packed", "quantize_col", "quantize_both")
        for name, x in MATRICES.items()
        if not (op == "quantize_row_packed" and x.ndim == 3) and not (op in COLUMNS and name in ROW_ONLY)
        for mode, options in MODES.items()
    },
    **{
        f"quantize_rowwise-{name}-{mode}": fixed("quantize_rowwise", x, **options)
        for name, x in (_VALUES | _IN_ROWS).items()
        for mode, options in MODES.items()
    },
    **{
        f"{op}-{name}{'-powers' * powers}": fixed(op, x, power_of_two=powers)
        for op in ("quantize_blockwise", "quantize_squares_both")
        for name, x in (_VALUES | SQUARES).items()
        for powers in (False, True)
    },
    **{
        f"dequantize-every_byte_pair-{dtype}": fixed(
            "dequantize", np.tile(_BYTES, (256, 1)), _BYTES[:, None].repeat(256 // BLOCK, 1), out_dtype=dtype
        )
        for dtype in OUT_DTYPES
    },
    **{
        f"dequantize-{shape}": fixed("dequantize", *_mx(*shape), out_dtype="float32")
        for shape in ((0, 64), (1, 32), (3, 5, 96))
    },
}
