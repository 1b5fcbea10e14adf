"""MXFP8 quantization along rows, along columns, along both in one read; and dequantization.

    x (M, K) --row---> q (M, K)   sf (M, K/32)       one scale per 32 values of a row
             --col---> q (K, M)   sf (K, M/32)       one scale per 32 values of a column, written transposed
             --both--> both pairs, x read once
             --packed> [q | sf] (M, K + K/32)        one row per token for the all-to-all: a dispatch is one collective
    q, sf ---dequantize--> x (M, K)

A leading dim (experts) is a batch: (G, M, K) quantizes each expert's matrix. All bytes are uint8: E4M3 for q, E8M0 for
sf. oracle.py defines every byte. There is no Triton kernel of `quantize_both`: where neither CUDA C++ nor C++ runs, it
is composed of `quantize_row` and `quantize_col`, and reads x twice.

`quantize_rowwise` has one power-of-two scale per row instead; its block is the row:

              |<----------------- K ----------------->|
    x         x0  x1  x2  ...                     xK-1    bf16 or fp32
              '-------- largest magnitude ------------'--> row_sf, one E8M0 byte
    qf        x0  x1  x2  ...                     xK-1    / 2^(row_sf - 127), rounded once to E4M3

`quantize_row_fold` has the same scales for finite rows. It rounds twice, to the scale of the block and then to the
scale of the row, and a NaN makes NaN of its block alone. In `quantize_rowwise` a NaN makes NaN of the row.
"""

import math
from collections.abc import Callable
from typing import Any

from ..dispatch import facts
from ..formats import BLOCK, Rounding, packed_width, scale_attrs
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
    require_multiple,
    require_rank,
    require_shape,
)
from ..tiles import cdiv, looping_programs, row_tiles, tiles

FLOATS = ("bfloat16", "float32")
SCALES = """rounding: how a scale is chosen, RCEIL (0) or FLOOR (1).
        satfinite: an infinite value gives the largest finite scale; without it, NaN."""
"""The options of all ops that quantize, as entries under `Args:` of their docs."""


def check_scaled(op: str, q: ArrayType, sf: ArrayType, *ranks: int) -> None:
    """Raise unless q and sf are MXFP8 bytes, scaled along the last dim of q."""
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "q", q, *ranks)
    require_multiple(op, "q", q.shape[-1], BLOCK, "last dim")
    require_shape(op, "sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), "one scale per 32 values of q's last dim")


def _check_x(op: str, x: ArrayType, *ranks: int) -> None:
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, *ranks)


def row_types(x: ArrayType) -> tuple[ArrayType, ArrayType]:
    """q and sf of an array quantized along its last dim."""
    *lead, k = x.shape
    return ArrayType(x.shape, "uint8"), ArrayType((*lead, k // BLOCK), "uint8")


def col_types(x: ArrayType) -> tuple[ArrayType, ArrayType]:
    """q and sf of an array quantized along dim -2, transposed."""
    *lead, m, k = x.shape
    return ArrayType((*lead, k, m), "uint8"), ArrayType((*lead, k, m // BLOCK), "uint8")


def whole_row_types(op: str, argument: str, shape: tuple[int, ...]) -> tuple[ArrayType, ArrayType]:
    """qf of this shape and its scales, one per row; raises for rows without values, naming `argument`."""
    *lead, k = shape
    if k == 0:
        allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale"
        fail(ValueError, op, argument, "K = 0", allowed)
    return ArrayType(shape, "uint8"), ArrayType(tuple(lead), "uint8")


def _tile_matrices(call: Call, arch: str, batch: int, m: int, k: int) -> Tiling:
    t = tiles(call.op, arch, row_width=k)
    grid = cdiv(m, t.m) * cdiv(k, t.k), batch
    return t.tiling(grid, {"M": m}, K=k, HW_CAST=facts(arch).hw_cast, BLOCK_M=t.m, BLOCK_K=t.k)


def _tile_rows(call: Call, arch: str) -> Tiling:
    """One matrix of all rows: a scale along a row does not depend on the matrix of the row."""
    *lead, k = call.inputs[0].shape
    return _tile_matrices(call, arch, 1, math.prod(lead), k)


def _tile_batch(call: Call, arch: str) -> Tiling:
    *lead, m, k = call.inputs[0].shape
    return _tile_matrices(call, arch, math.prod(lead), m, k)


def _tile_both(call: Call, arch: str) -> Tiling:  # the same on every architecture
    return Tiling(grid=call.inputs[0].shape)


def _compose_both(call: Callable[..., tuple[Any, ...]], x: Any, **options: Any) -> tuple[Any, ...]:
    return *call(quantize_row, x, **options), *call(quantize_col, x, **options)


def tile_whole_rows(call: Call, arch: str) -> Tiling:
    """Programs that hold whole rows: the scale of a row is not known before its last value. They loop over the rows up
    to the last end."""
    *lead, k = call.out[0].shape
    m, t, (groups,) = math.prod(lead), row_tiles(call.op, arch, k), call.inputs[-1].shape
    blocks = {"K": k, "G": groups, "HW_CAST": facts(arch).hw_cast, "BLOCK_M": t.m, "BLOCK_K": t.k}
    return t.tiling((looping_programs(cdiv(m, t.m)),), {"M": m}, **blocks)


def _check_row(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_row"
    _check_x(op, x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    return Signature(row_types(x), scale_attrs(op, rounding, satfinite))


def _check_packed(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_row_packed"
    _check_x(op, x, 2)
    m, k = x.shape
    require_multiple(op, "x", k, BLOCK, "last dim")
    return Signature((ArrayType((m, packed_width(k)), "uint8"),), scale_attrs(op, rounding, satfinite))


def _check_col(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_col"
    _check_x(op, x, 2, 3)
    require_multiple(op, "x", x.shape[-2], BLOCK, "dim -2 (the scaled one)")
    return Signature(col_types(x), scale_attrs(op, rounding, satfinite))


def _check_both(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_both"
    _check_x(op, x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    require_multiple(op, "x", x.shape[-2], BLOCK, "dim -2")
    return Signature(row_types(x) + col_types(x), scale_attrs(op, rounding, satfinite))


def _check_dequantize(q: ArrayType, sf: ArrayType, *, out_dtype: str = "bfloat16") -> Signature:
    op = "dequantize"
    check_scaled(op, q, sf, 2, 3)
    out = ArrayType(q.shape, out_dtype)
    require_dtype(op, "out_dtype", out, *FLOATS)
    return Signature((out,))


def _check_rowwise(
    x: ArrayType, group_ends: ArrayType = NO_ENDS, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Signature:
    op = "quantize_rowwise"
    _check_x(op, x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")  # grouped_mm_fold takes no other rows
    tokens = check_optional_ends(op, group_ends, x.shape)
    return Signature(whole_row_types(op, "x", x.shape), scale_attrs(op, rounding, satfinite), tokens)


quantize_row = KernelOp(
    "quantize_row",
    f"""Quantize along the last dim, one scale per 32 values.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, K a multiple of 32.
        {SCALES}

    Returns:
        q (..., M, K) E4M3 and sf (..., M, K/32) E8M0, as uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> q, sf = ops.quantize_row(xp.full((1, 32), 448.0))
        >>> int(q[0, 0]), int(sf[0, 0])  # 448 is the largest E4M3 value; scale byte 127 is 2^0
        (126, 127)

    Source:
        OCP Microscaling Formats v1.0, section 6.3.
    """,
    ("x",),
    ("q", "sf"),
    _check_row,
    _tile_rows,
    "quantize.kernel:row_kernel",
)
quantize_row_packed = KernelOp(
    "quantize_row_packed",
    f"""`quantize_row` with q and sf of a row side by side: one row of bytes per token for the all-to-all.

    Args:
        x: (M, K) bf16 or fp32, K a multiple of 32.
        {SCALES}

    Returns:
        packed = [q | sf] (M, K + K/32) uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> packed = ops.quantize_row_packed(xp.full((1, 32), 448.0))
        >>> packed.shape[1], packed[0, 31:].tolist()  # the last element and the scale 2^0
        (33, [126, 127])
    """,
    ("x",),
    ("packed",),
    _check_packed,
    _tile_rows,
    "quantize.kernel:row_packed_kernel",
)
quantize_col = KernelOp(
    "quantize_col",
    f"""Quantize along dim -2, one scale per 32 values, and write the result transposed.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, M a multiple of 32.
        {SCALES}

    Returns:
        q_t (..., K, M) E4M3 and sf_t (..., K, M/32) E8M0, as uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> q_t, sf_t = ops.quantize_col(xp.full((32, 1), 448.0))
        >>> tuple(q_t.shape), int(sf_t[0, 0])
        ((1, 32), 127)
    """,
    ("x",),
    ("q_t", "sf_t"),
    _check_col,
    _tile_batch,
    "quantize.kernel:col_kernel",
)
quantize_both = KernelOp(
    "quantize_both",
    f"""`quantize_row` and `quantize_col` in one read of x.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, M and K multiples of 32.
        {SCALES}

    Returns:
        q (..., M, K), sf (..., M, K/32), q_t (..., K, M) and sf_t (..., K, M/32), uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> [tuple(x.shape) for x in ops.quantize_both(xp.ones((32, 64)))]
        [(32, 64), (32, 2), (64, 32), (64, 1)]
    """,
    ("x",),
    ("q", "sf", "q_t", "sf_t"),
    _check_both,
    _tile_both,
    compose=_compose_both,
)
dequantize = KernelOp(
    "dequantize",
    """The values of MXFP8 bytes: exact in fp32, rounded once in bf16.

    Args:
        q: (..., M, K) E4M3, 2 or 3 dims, K a multiple of 32.
        sf: (..., M, K/32) E8M0. Both uint8.
        out_dtype: "bfloat16" or "float32".

    Returns:
        x (..., M, K).

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> ops.dequantize(xp.full((1, 32), 126, dtype=xp.uint8), xp.full((1, 1), 128, dtype=xp.uint8))[0, :2].tolist()
        [896.0, 896.0]
    """,
    ("q", "sf"),
    ("x",),
    _check_dequantize,
    _tile_rows,
    "quantize.kernel:dequantize_kernel",
)
quantize_rowwise = KernelOp(
    "quantize_rowwise",
    f"""Quantize with one power-of-two scale per row, for `grouped_mm_fold`.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, K a positive multiple of 32.
        {ROWS_UP_TO}
        {SCALES}

    Returns:
        qf (..., M, K) E4M3 and row_sf (..., M) E8M0, as uint8. A NaN or an infinity makes row_sf 255 and all bytes of
        the row 0x7F.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> qf, row_sf = ops.quantize_rowwise(xp.asarray([[896.0] + [448.0] * 31]))
        >>> qf[0, :2].tolist(), row_sf.tolist()  # 448 and 224 under 2^1
        ([126, 118], [128])
    """,
    ("x", "group_ends"),
    ("qf", "row_sf"),
    _check_rowwise,
    tile_whole_rows,
    "quantize.kernel:rowwise_kernel",
    optional_ends=True,
)
