"""Folded operands of packed MXFP8 rows through a row map: the rows are gathered and folded in one read.

    packed (R, K + K/32), row_map (P,) ------------permute_mx_fold------> qf (P, K), row_sf (P,)
    packed, row_map, group_ends (G,) --------------permute_mx_col_fold--> qf_t (K, P), span_sf (S, K)

The rows of padded groups, replicas of tokens, are never stored as MXFP8: a product reads them folded, and a weight
gradient reads them along the tokens. The separate ops move 2 bytes per value more, once for each operand:

    packed, row_map --permute_mx--> q, sf --fold_rows------------> qf, row_sf
         read 1         write 1       '-----requantize_col_fold--> qf_t, span_sf        read 1, write 1 each

Results are bitwise equal to the separate ops. There is no Triton kernel of permute_mx_col_fold: it is composed of them
where neither CUDA C++ nor C++ runs, and on a GPU if some rows begin at no multiple of 4 bytes.
"""

from collections.abc import Callable
from typing import Any

from ...dispatch import facts
from ...formats import BLOCK, Rounding, scale_attrs, spans
from ...launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
    require_dtype,
    require_multiple,
    require_rank,
)
from ...permute.plan import check_map, packed_blocks, permute_mx
from ...quantize.plan import SCALES, whole_row_types
from ...tiles import cdiv, looping_programs, row_tiles
from ..both.plan import POLLS
from .plan_requantize import requantize_col_fold, scratch_bytes

_PACKED = "packed: (R, K + K/32) uint8, rows `[q | sf]`, K a positive multiple of 32."
_ROW_MAP = "row_map: (P,) int32, -1 to R - 1; -1 is padding, a row of zeros."


def _check_rows(packed: ArrayType, row_map: ArrayType, group_ends: ArrayType = NO_ENDS) -> Signature:
    op = "permute_mx_fold"
    blocks = packed_blocks(op, packed)
    check_map(op, row_map)
    shape = row_map.shape[0], blocks * BLOCK
    return Signature(whole_row_types(op, "packed", shape), tokens=check_optional_ends(op, group_ends, shape))


def _check_columns(
    packed: ArrayType,
    row_map: ArrayType,
    group_ends: ArrayType,
    *,
    rounding: Rounding = Rounding.RCEIL,
    satfinite: bool = False,
) -> Signature:
    op = "permute_mx_col_fold"
    k = packed_blocks(op, packed) * BLOCK
    check_map(op, row_map)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    p = row_map.shape[0]
    require_multiple(op, "row_map", p, BLOCK, "dim 0", "pad the groups, see `row_map`")
    out = ArrayType((k, p), "uint8"), ArrayType((spans(p, group_ends.shape[0]), k), "uint8")
    return Signature(out, scale_attrs(op, rounding, satfinite), tokens=(p, BLOCK))


def _tile_rows(call: Call, arch: str) -> Tiling:
    p, k = call.out[0].shape
    t, scalars, (groups,) = row_tiles(call.op, arch, k), {"R": call.inputs[0].shape[0], "P": p}, call.inputs[2].shape
    blocks = {"K": k, "G": groups, "HW_CAST": facts(arch).hw_cast, "BLOCK_M": t.m, "BLOCK_K": t.k}
    return t.tiling((looping_programs(cdiv(p, t.m)),), scalars, **blocks)


def _tile_columns(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    (k, p), width = call.out[0].shape, call.inputs[0].shape[1]
    scratch = ArrayType((scratch_bytes(p, k, call.inputs[2].shape[0]),), "uint8")
    unaligned = f"rows of {width} bytes, no multiple of 4" if width % 4 else ""
    return Tiling(grid=(k,), scratch=(scratch,), cuda_attrs=(POLLS,), cuda_unsupported=unaligned)


def _compose(
    call: Callable[..., tuple[Any, ...]], packed: Any, row_map: Any, group_ends: Any, **options: Any
) -> tuple[Any, ...]:
    return call(requantize_col_fold, *call(permute_mx, packed, row_map), group_ends, **options)


permute_mx_fold = KernelOp(
    "permute_mx_fold",
    f"""`fold_rows` of `permute_mx`, in one read of the rows: the operand of a product.

    Args:
        {_PACKED}
        {_ROW_MAP}
        {ROWS_UP_TO}

    Returns:
        qf (P, K) E4M3 and row_sf (P,) E8M0, as uint8.

    Raises:
        ValueError: shape, on a CPU also a row that does not exist.
        TypeError: dtype.

    Example:
        >>> packed = ops.quantize_row_packed(xp.full((1, 32), 3.0))
        >>> qf, row_sf = ops.permute_mx_fold(packed, xp.asarray([0, -1], dtype=xp.int32))
        >>> qf[:, 0].tolist(), row_sf.tolist()  # 3 = 384 * 2^-7
        ([124, 0], [120, 0])
    """,
    ("packed", "row_map", "group_ends"),
    ("qf", "row_sf"),
    _check_rows,
    _tile_rows,
    "fold.kernel:permute_fold_kernel",
    optional_ends=True,
)
permute_mx_col_fold = KernelOp(
    "permute_mx_col_fold",
    f"""`requantize_col_fold` of `permute_mx`, in one read of the rows: the operand of a weight gradient.

    Args:
        {_PACKED} Values count as bf16.
        {_ROW_MAP} P is a multiple of 32.
        group_ends: (G,) int32, where each group ends along P: non-decreasing multiples of 32.
        {SCALES}

    Returns:
        qf_t (K, P) and span_sf (P // 256 + G, K), uint8. Columns of qf_t past the last end are
        unspecified.

    Raises:
        ValueError: shape, rounding, on a CPU also the ends and a row that does not exist.
        TypeError: dtype.

    Example:
        >>> packed = ops.quantize_row_packed(xp.full((1, 32), 4.0))
        >>> row_map = xp.asarray([-1] * 31 + [0], dtype=xp.int32)
        >>> qf_t, span_sf = ops.permute_mx_col_fold(packed, row_map, xp.asarray([32], dtype=xp.int32))
        >>> span_sf[0, :2].tolist(), qf_t[0, 30:].tolist()  # 4 = 2^8 * 2^-6; 127 - 6 = 121, plus three octaves
        ([124, 124], [0, 96])
    """,
    ("packed", "row_map", "group_ends"),
    ("qf_t", "span_sf"),
    _check_columns,
    _tile_columns,
    compose=_compose,
)
