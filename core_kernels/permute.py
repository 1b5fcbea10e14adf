"""Gather rows through a row map: permute, pad and un-permute are the same kernel.

    row_map[i] = j   output row i is input row j
    row_map[i] = -1  output row i is padding: zeros (E4M3 zeros with scale byte 0 for MX rows)

`row_map` of routing.py leads from received rows to padded expert-major rows; its inverse leads back,
so un-permuting is `permute_rows` with the inverse. Packed MX rows `[q | sf]` arrive as one wire row
and leave as the separate q and sf that the grouped GEMM reads. Rows are addressed with 64 bits.
"""

from .formats import BLOCK
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_rank


def _check_map(op: str, row_map: ArrayType) -> None:
    require_dtype(op, "row_map", row_map, "int32")
    require_rank(op, "row_map", row_map, 1)


def _plan_rows(x: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    require_dtype("permute_rows", "x", x, "bfloat16", "float32", "uint8")
    require_rank("permute_rows", "x", x, 2)
    _check_map("permute_rows", row_map)
    return Launch(out=(ArrayType((row_map.shape[0], x.shape[1]), x.dtype),), attrs=())


def _plan_mx(packed: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    op = "permute_mx"
    require_dtype(op, "packed", packed, "uint8")
    require_rank(op, "packed", packed, 2)
    _check_map(op, row_map)
    blocks, rest = divmod(packed.shape[1], BLOCK + 1)
    if rest:
        fail(
            ValueError, op, "packed", f"rows of {packed.shape[1]} bytes", "allowed: K + K/32 bytes, K a multiple of 32"
        )
    p = row_map.shape[0]
    return Launch(out=(ArrayType((p, blocks * BLOCK), "uint8"), ArrayType((p, blocks), "uint8")), attrs=())


permute_rows = KernelOp("permute_rows", None, ("x", "row_map"), ("out",), (), _plan_rows)
permute_mx = KernelOp("permute_mx", None, ("packed", "row_map"), ("q", "sf"), (), _plan_mx)
