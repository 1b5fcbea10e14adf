"""Gather rows through a row map: permute, pad and un-permute are the same kernel.

    row_map[i] = j   output row i is input row j
    row_map[i] = -1  output row i is padding: zeros (E4M3 zeros with scale byte 0 for MXFP8 rows)

`row_map` of routing leads from received rows to padded expert-major rows and its inverse leads back, so `permute_rows`
with the inverse un-permutes. `permute_mx` reads packed MXFP8 rows `[q | sf]` and writes the separate q and sf that the
grouped GEMM reads. Rows are addressed with 64 bits.
"""

from ..formats import BLOCK
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, fail, require_dtype, require_rank
from ..tiles import cdiv, tiles


def check_map(op: str, row_map: ArrayType) -> None:
    """Raise unless `row_map` is (P,) int32."""
    require_dtype(op, "row_map", row_map, "int32")
    require_rank(op, "row_map", row_map, 1)


def packed_blocks(op: str, packed: ArrayType) -> int:
    """Blocks of 32 values in a packed row; raises unless `packed` is (R, K + K/32) uint8."""
    require_dtype(op, "packed", packed, "uint8")
    require_rank(op, "packed", packed, 2)
    # `divmod` does not take a symbolic size.
    if packed.shape[1] % (BLOCK + 1):
        allowed = "allowed: K + K/32 bytes, K a multiple of 32"
        fail(ValueError, op, "packed", f"rows of {packed.shape[1]} bytes", allowed)
    return packed.shape[1] // (BLOCK + 1)


def _check_rows(x: ArrayType, row_map: ArrayType) -> Signature:
    op = "permute_rows"
    require_dtype(op, "x", x, "bfloat16", "float32", "uint8")
    require_rank(op, "x", x, 2)
    check_map(op, row_map)
    return Signature((ArrayType((row_map.shape[0], x.shape[1]), x.dtype),))


def _check_mx(packed: ArrayType, row_map: ArrayType) -> Signature:
    op = "permute_mx"
    blocks = packed_blocks(op, packed)
    check_map(op, row_map)
    p = row_map.shape[0]
    return Signature((ArrayType((p, blocks * BLOCK), "uint8"), ArrayType((p, blocks), "uint8")))


def _tile(call: Call, arch: str, width_name: str) -> Tiling:
    p, width = call.out[0].shape
    t = tiles(call.op, arch, row_width=width)
    across = cdiv(width, t.k)
    scalars = {"R": call.inputs[0].shape[0], "P": p}
    meta = {width_name: width, "TILES": across, "BLOCK_M": t.m, "BLOCK_K": t.k}
    return t.tiling((cdiv(p, t.m) * across,), scalars, **meta)


permute_rows = KernelOp(
    "permute_rows",
    """Gather rows: row i of the result is x[row_map[i]], zeros where row_map[i] is -1.

    Args:
        x: (R, D) bf16, fp32 or uint8.
        row_map: (P,) int32, -1 to R - 1.

    Returns:
        out (P, D) in the dtype of x.

    Raises:
        ValueError: shape, on a CPU also a row that does not exist.
        TypeError: dtype.

    Example:
        >>> ops.permute_rows(xp.asarray([[1.0], [2.0]]), xp.asarray([1, -1, 0], dtype=xp.int32)).tolist()
        [[2.0], [0.0], [1.0]]
    """,
    ("x", "row_map"),
    ("out",),
    _check_rows,
    lambda call, arch: _tile(call, arch, "WIDTH"),
    "permute.kernel:rows_kernel",
)
permute_mx = KernelOp(
    "permute_mx",
    """Gather packed MXFP8 rows `[q | sf]` and split them into q and sf; zeros where row_map[i] is -1.

    Args:
        packed: (R, K + K/32) uint8, K a multiple of 32.
        row_map: (P,) int32, -1 to R - 1.

    Returns:
        q (P, K) E4M3 and sf (P, K/32) E8M0, as uint8.

    Raises:
        ValueError: shape, on a CPU also a row that does not exist.
        TypeError: dtype.

    Example:
        >>> packed = ops.quantize_row_packed(xp.full((1, 32), 448.0))
        >>> q, sf = ops.permute_mx(packed, xp.asarray([0, -1], dtype=xp.int32))
        >>> q[:, 0].tolist(), sf.tolist()
        ([126, 0], [[127], [0]])
    """,
    ("packed", "row_map"),
    ("q", "sf"),
    _check_mx,
    lambda call, arch: _tile(call, arch, "K"),
    "permute.kernel:mx_kernel",
)
