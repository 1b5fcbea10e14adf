"""Blockwise FP8: one fp32 scale per 128 values of a row, or per square of 128 x 128 values of a weight.

    x (..., M, K) --quantize_blockwise--> q (..., M, K)  sf (..., M, K/128)       activations and gradients
    w (..., N, K) --quantize_squares----> q (..., N, K)  sf (..., N/128, K/128)   weights

                        128       128      rest
                   |---------|---------|----|      amax of each part
    x   row m      |  sf 0   |  sf 1   |sf 2|      sf = amax / 448, or the smallest power of two at least as large
                   |---------|---------|----|      q  = RTNE(x * (1 / sf))

All divisions of dims are rounded up. A square has the same scale read along either dim: q and sf of the transposed
weight, the operand of the input gradient, are the transposed q and sf. `quantize_squares_both` writes both.
"""

import math

from ..dispatch import facts
from ..formats import SQUARE
from ..launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
    fail,
    require_dtype,
    require_rank,
)
from ..tiles import cdiv, looping_programs, tiles
from .plan import FLOATS

POWER_OF_TWO = """power_of_two: whether scales are rounded up to powers of two."""


def _check(op: str, x: ArrayType, sf: tuple[int, ...], power_of_two: bool) -> Signature:
    require_dtype(op, "x", x, *FLOATS)
    return _types(op, x.shape, sf, power_of_two)


def _types(op: str, shape: tuple[int, ...], sf: tuple[int, ...], power_of_two: bool) -> Signature:
    if power_of_two not in (False, True):
        fail(TypeError, op, "power_of_two", repr(power_of_two), "allowed: a bool")
    return Signature((ArrayType(shape, "uint8"), ArrayType(sf, "float32")), {"power_of_two": int(power_of_two)})


def row_types(op: str, shape: tuple[int, ...], power_of_two: bool) -> Signature:
    """q and sf of rows (..., K), and the attribute of their scales; raises unless power_of_two is a bool."""
    return _types(op, shape, (*shape[:-1], cdiv(shape[-1], SQUARE)), power_of_two)


def _check_rows(x: ArrayType, group_ends: ArrayType = NO_ENDS, *, power_of_two: bool = False) -> Signature:
    op = "quantize_blockwise"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    signature = row_types(op, x.shape, power_of_two)
    return signature._replace(tokens=check_optional_ends(op, group_ends, x.shape))


def _check_squares(x: ArrayType, *, power_of_two: bool = False) -> Signature:
    require_rank("quantize_squares", "x", x, 2, 3)
    *lead, n, k = x.shape
    return _check("quantize_squares", x, (*lead, cdiv(n, SQUARE), cdiv(k, SQUARE)), power_of_two)


def _tile_rows(call: Call, arch: str) -> Tiling:
    *lead, k = call.inputs[0].shape
    m, t = math.prod(lead), tiles(call.op, arch, row_width=k)
    width, (groups,) = max(t.k, SQUARE), call.inputs[1].shape
    blocks = {"K": k, "G": groups, "HW_CAST": facts(arch).hw_cast, "BLOCK_M": t.m, "BLOCK_K": width}
    return t.tiling((looping_programs(cdiv(m, t.m) * cdiv(k, width)),), {"M": m}, **blocks)


def _check_squares_both(x: ArrayType, *, power_of_two: bool = False) -> Signature:
    require_rank("quantize_squares_both", "x", x, 2, 3)
    *lead, n, k = x.shape
    one = _check("quantize_squares_both", x, (*lead, cdiv(n, SQUARE), cdiv(k, SQUARE)), power_of_two)
    transposed = ArrayType((*lead, k, n), "uint8"), ArrayType((*lead, cdiv(k, SQUARE), cdiv(n, SQUARE)), "float32")
    return Signature(one.out + transposed, one.attrs)


def _tile_squares(call: Call, arch: str) -> Tiling:
    *lead, n, k = call.inputs[0].shape
    grid = cdiv(n, SQUARE) * cdiv(k, SQUARE), math.prod(lead)
    # ptxas 12.9 mixes up the bytes of fp32 that the hardware casts for two stores, one of them transposed (triton issue
    # 11111).
    mixed_up = call.op == "quantize_squares_both" and call.inputs[0].dtype == "float32"
    return tiles(call.op, arch).tiling(grid, {}, N=n, K=k, HW_CAST=facts(arch).hw_cast and not mixed_up)


quantize_blockwise = KernelOp(
    "quantize_blockwise",
    f"""Quantize along the last dim, one fp32 scale per 128 values: an operand of `grouped_mm_blockwise`.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims.
        {ROWS_UP_TO}
        {POWER_OF_TWO}

    Returns:
        q (..., M, K) E4M3 as uint8 and sf (..., M, ceil(K/128)) fp32. A scale is at least 2^-126. A NaN or an infinity
        makes its scale NaN and the bytes of its block 0x7F.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> q, sf = ops.quantize_blockwise(xp.asarray([[672.0] + [1.5] * 127]))
        >>> q[0, :2].tolist(), sf.tolist()  # 448 and 1
        ([126, 56], [[1.5]])

    Source:
        DeepSeek-V3 Technical Report, section 3.3.2.
    """,
    ("x", "group_ends"),
    ("q", "sf"),
    _check_rows,
    _tile_rows,
    "quantize.kernel_blockwise:rows_kernel",
    optional_ends=True,
)
quantize_squares = KernelOp(
    "quantize_squares",
    f"""Quantize matrices with one fp32 scale per square of 128 x 128 values: weights of `grouped_mm_blockwise`.

    Args:
        x: (..., N, K) bf16 or fp32, 2 or 3 dims.
        {POWER_OF_TWO}

    Returns:
        q (..., N, K) E4M3 as uint8 and sf (..., ceil(N/128), ceil(K/128)) fp32. A scale is at least 2^-126. A NaN or an
        infinity makes its scale NaN and the bytes of its square 0x7F.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> q, sf = ops.quantize_squares(xp.full((256, 128), 3.0), power_of_two=True)
        >>> int(q[0, 0]), sf.tolist()  # 384 under 2^-7
        (124, [[0.0078125], [0.0078125]])

    Source:
        DeepSeek-V3 Technical Report, section 3.3.2.
    """,
    ("x",),
    ("q", "sf"),
    _check_squares,
    _tile_squares,
    "quantize.kernel_blockwise:squares_kernel",
)
quantize_squares_both = KernelOp(
    "quantize_squares_both",
    f"""`quantize_squares`, and its result transposed, in one read of x.

    Args:
        x: (..., N, K) bf16 or fp32, 2 or 3 dims.
        {POWER_OF_TWO}

    Returns:
        q (..., N, K) as uint8 and sf (..., ceil(N/128), ceil(K/128)) fp32, q_t (..., K, N) and sf_t (..., ceil(K/128),
        ceil(N/128)).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> [tuple(x.shape) for x in ops.quantize_squares_both(xp.ones((256, 128)))]
        [(256, 128), (2, 1), (128, 256), (1, 2)]
    """,
    ("x",),
    ("q", "sf", "q_t", "sf_t"),
    _check_squares_both,
    _tile_squares,
    "quantize.kernel_blockwise:squares_both_kernel",
)
