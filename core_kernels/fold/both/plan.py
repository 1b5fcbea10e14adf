"""Both folded operands of an activation from one launch: by row, and by column and span of tokens.

    x (M, K), group_ends (G,) --quantize_both_fold--> qf (M, K), row_sf (M,)        operand of out = x w^T
                                                      qf_t (K, M), span_sf (S, K)   operand of dw = dout^T x

          |<---------- K ---------->|
    32    v v v v ...               v     The scale of a row is known after the whole row, the scale of a column after
    rows  v v v v ...               v     256 rows of its group: both while the CTAs still hold the rows. Earlier spans
    ...                                   raise the scale of a column. CTAs publish the largest bytes that they hold in
          v v v v ...               v     scratch memory and poll the bytes of their neighbours.

An end that is no multiple of 32 has the effect that it has in `fold_groups`. Results are bitwise equal to
`quantize_row_fold`, and to `fold_groups` after `quantize_col`. There is no Triton kernel: where neither CUDA C++ nor
C++ runs, the op is composed of these three.
"""

from collections.abc import Callable
from typing import Any

from ...formats import BLOCK, Rounding, scale_attrs, spans
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, fail, require_dtype, require_multiple, require_rank
from ...quantize import plan as quantize
from ...quantize.plan import FLOATS, SCALES
from ...tiles import cdiv
from ..plan import fold_groups, quantize_row_fold

TILE_BYTES = 256
"""Bytes of a row of x in one tile of the CUDA kernel."""
TILES_ACROSS = 128
"""The most tiles of a row, whose CTAs poll each other: fewer than half of the CTAs that an H100 or H200 runs at a time.
Of more tiles, some would not start while the others wait, and these would read x of their neighbours themselves; the
composition is faster."""
POLLS = 256
"""Polls of a warp until it reads the data of its neighbour itself. A poll takes about a microsecond and an answer as
long as the load of a tile, with other kernels on the device some tens of microseconds. A launch that runs alone never
gets there; a launch whose tiles cannot run side by side loses a fraction of a millisecond per tile of 256 rows."""


def tiles_across(k: int, dtype: str) -> int:
    """Tiles of a row of x in the CUDA kernel.

    >>> tiles_across(7168, "bfloat16")
    56
    """
    return cdiv(k * (2 if dtype == "bfloat16" else 4), TILE_BYTES)


def scratch_bytes(m: int, k: int, groups: int, dtype: str) -> int:
    """Bytes of the scratch memory of the CUDA kernel: two for each column of a span, one for each row of a tile.

    >>> scratch_bytes(256, 32, 1, "bfloat16")
    384
    """
    return 2 * spans(m, groups) * k + m * tiles_across(k, dtype)


def _check(
    x: ArrayType, group_ends: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Signature:
    op = "quantize_both_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    m, k = x.shape
    require_multiple(op, "x", m, BLOCK, "dim 0", "pad the groups, see `row_map`")
    require_multiple(op, "x", k, BLOCK, "last dim")
    if k == 0:
        allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale"
        fail(ValueError, op, "x", "K = 0", allowed)
    out = (
        ArrayType((m, k), "uint8"),
        ArrayType((m,), "uint8"),
        ArrayType((k, m), "uint8"),
        ArrayType((spans(m, group_ends.shape[0]), k), "uint8"),
    )
    return Signature(out, scale_attrs(op, rounding, satfinite), tokens=(m, BLOCK))


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    x, group_ends = call.inputs
    m, k = x.shape
    scratch = ArrayType((scratch_bytes(m, k, group_ends.shape[0], x.dtype),), "uint8")
    wide = tiles_across(k, x.dtype) > TILES_ACROSS
    unsupported = f"allowed: rows of at most {TILES_ACROSS * TILE_BYTES} bytes; the tiles of a row poll each other"
    return Tiling(scratch=(scratch,), cuda_attrs=(POLLS,), cuda_unsupported=unsupported if wide else "")


def _compose(call: Callable[..., tuple[Any, ...]], x: Any, group_ends: Any, **options: Any) -> tuple[Any, ...]:
    rows = call(quantize_row_fold, x, group_ends, **options)
    columns = call(quantize.quantize_col, x, **options)
    return *rows, *call(fold_groups, *columns, group_ends)


quantize_both_fold = KernelOp(
    "quantize_both_fold",
    f"""`quantize_row_fold` of x, and `fold_groups` of its `quantize_col`, in one read of x.

    Args:
        x: (M, K) bf16 or fp32, M and K multiples of 32, K positive.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32.
        {SCALES}

    Returns:
        qf (M, K), row_sf (M,), qf_t (K, M) and span_sf (M // 256 + G, K), uint8. Rows of qf and row_sf, and columns of
        qf_t, past the last end are unspecified.

    Raises:
        ValueError: shape, rounding, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> x = xp.asarray([[4.0] * 64] + [[1.0] * 64] * 31)
        >>> qf, row_sf, qf_t, span_sf = ops.quantize_both_fold(x, xp.asarray([32], dtype=xp.int32))
        >>> row_sf[:2].tolist(), span_sf[:, 0].tolist()  # 4 = 2^8 * 2^-6; 127 - 6 = 121, plus three octaves
        ([121, 119], [124])
    """,
    ("x", "group_ends"),
    ("qf", "row_sf", "qf_t", "span_sf"),
    _check,
    _tile,
    compose=_compose,
)
