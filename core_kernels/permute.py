"""Gather rows through a row map: permute, pad and un-permute are the same kernel.

    row_map[i] = j   output row i is input row j
    row_map[i] = -1  output row i is padding: zeros (E4M3 zeros with scale byte 0 for MX rows)

`row_map` of routing.py leads from received rows to padded expert-major rows; its inverse leads back,
so un-permuting is `permute_rows` with the inverse. Packed MX rows `[q | sf]` arrive as one wire row
and leave as the separate q and sf that the grouped GEMM reads. Rows are addressed with 64 bits.
"""

import triton
import triton.language as tl

from .formats import BLOCK
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_rank
from .mx_math import BLOCK_MX
from .tiles import cdiv, tiles


@triton.jit
def _gather(
    x, row_map, R, P, out, WIDTH: tl.constexpr, PITCH: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One tile of out (P, WIDTH) from rows of x (R rows, PITCH apart); TILES tiles lie side by side."""
    tile = tl.program_id(0)
    i = (tile // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    w = (tile % TILES) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(row_map + i, mask=i < P, other=-1).to(tl.int64)
    tl.device_assert((row >= -1) & (row < R), "row_map points outside the input")
    inside = (i < P)[:, None] & (w < WIDTH)[None, :]
    real = (row >= 0) & (row < R)
    values = tl.load(x + row[:, None] * PITCH + w[None, :], mask=inside & real[:, None], other=0)
    tl.store(out + i[:, None] * WIDTH + w[None, :], values, mask=inside)


@triton.jit
def _rows_kernel(
    x, row_map, R, P, out,
    WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _gather(x, row_map, R, P, out, WIDTH, WIDTH, TILES, BLOCK_M, BLOCK_K)


@triton.jit
def _mx_kernel(
    packed, row_map, R, P, q, sf,
    K: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scales: tl.constexpr = K // BLOCK_MX
    _gather(packed, row_map, R, P, q, K, K + scales, TILES, BLOCK_M, BLOCK_K)
    _gather(packed + K, row_map, R, P, sf, scales, K + scales, TILES, BLOCK_M, BLOCK_K // BLOCK_MX)


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


permute_rows = KernelOp("permute_rows", _rows_kernel, ("x", "row_map"), ("out",), (), _plan_rows)
permute_mx = KernelOp("permute_mx", _mx_kernel, ("packed", "row_map"), ("q", "sf"), (), _plan_mx)
