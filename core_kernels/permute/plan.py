"""Gather rows through a row map: permute, pad and un-permute are the same kernel.

    row_map[i] = j   output row i is input row j
    row_map[i] = -1  output row i is padding: zeros (E4M3 zeros with scale byte 0 for MX rows)

`row_map` of routing leads from received rows to padded expert-major rows; its inverse leads back,
so un-permuting is `permute_rows` with the inverse. Packed MX rows `[q | sf]` arrive as one wire row
and leave as the separate q and sf that the grouped GEMM reads. Rows are addressed with 64 bits.
"""

from ..formats import BLOCK
from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_rank
from ..tiles import cdiv, tiles
from . import kernel


def _launch(op: str, arch: str, out: tuple[ArrayType, ...], rows: int, width: int, width_name: str) -> Launch:
    if arch == "cpu":
        return Launch(out, ())
    p = out[0].shape[0]
    t = tiles(op, arch, row_width=width)
    k_tiles = cdiv(width, t.k)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(p, t.m) * k_tiles,),
        scalars={"R": rows, "P": p},
        meta={width_name: width, "TILES": k_tiles, "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def check_map(op: str, row_map: ArrayType) -> None:
    """Raise unless `row_map` is (P,) int32."""
    require_dtype(op, "row_map", row_map, "int32")
    require_rank(op, "row_map", row_map, 1)


def _plan_rows(x: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    require_dtype("permute_rows", "x", x, "bfloat16", "float32", "uint8")
    require_rank("permute_rows", "x", x, 2)
    check_map("permute_rows", row_map)
    out = (ArrayType((row_map.shape[0], x.shape[1]), x.dtype),)
    return _launch("permute_rows", arch, out, *x.shape, width_name="WIDTH")


def packed_blocks(op: str, packed: ArrayType) -> int:
    """Blocks of 32 values in a packed row; raises unless `packed` is (R, K + K/32) uint8."""
    require_dtype(op, "packed", packed, "uint8")
    require_rank(op, "packed", packed, 2)
    # `divmod` would not take a symbolic size.
    if packed.shape[1] % (BLOCK + 1):
        fail(
            ValueError, op, "packed", f"rows of {packed.shape[1]} bytes", "allowed: K + K/32 bytes, K a multiple of 32"
        )
    return packed.shape[1] // (BLOCK + 1)


def _plan_mx(packed: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    op = "permute_mx"
    blocks = packed_blocks(op, packed)
    check_map(op, row_map)
    p, k = row_map.shape[0], blocks * BLOCK
    out = (ArrayType((p, k), "uint8"), ArrayType((p, blocks), "uint8"))
    return _launch(op, arch, out, packed.shape[0], k, width_name="K")


permute_rows = KernelOp("permute_rows", kernel.rows_kernel, ("x", "row_map"), ("out",), (), _plan_rows)
permute_mx = KernelOp("permute_mx", kernel.mx_kernel, ("packed", "row_map"), ("q", "sf"), (), _plan_mx)
