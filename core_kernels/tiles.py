"""Tiles of the Triton kernels: a pure function of op, architecture and shape.

Both frontends read the same table, so both launch the same program and round the same way; there is no autotuner at run
time. The GPU entries were measured on an H200 (131072 x 7168; experts 7168 x 2048), a handful per op. Row kernels reach
the bandwidth of a copy. Column kernels and MXFP8 products are far from tuned: entries that are a few percent faster and
use every register were left out. sm_100 takes the same entries except for the MXFP8 products.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .launch import Tiling, fail


class Tiles(NamedTuple):
    """Block sizes along M, N and K (1 where the op has no such dim), warps per program, pipeline stages."""

    m: int = 1
    n: int = 1
    k: int = 1
    num_warps: int = 4
    num_stages: int = 1

    def tiling(self, grid: tuple[int, ...], scalars: Mapping[str, int], **meta: Any) -> Tiling:
        """A Tiling with the warps and stages of these tiles."""
        return Tiling(grid, scalars, meta, self.num_warps, self.num_stages)


_GPU = {
    "quantize_row": Tiles(m=8, k=512),
    "quantize_row_packed": Tiles(m=16, k=256),
    "quantize_col": Tiles(m=128, k=64),
    "quantize_blockwise": Tiles(m=8, k=512),
    "quantize_squares": Tiles(num_warps=8),
    "quantize_squares_both": Tiles(num_warps=8),
    "dequantize": Tiles(m=16, k=256),
    "permute_rows": Tiles(m=4, k=1024),
    "permute_mx": Tiles(m=4, k=1024),
    "logits_bwd": Tiles(m=64, n=128, k=32, num_warps=4, num_stages=3),
    "fold_rows": Tiles(),
    "permute_mx_fold": Tiles(),
    "quantize_row_fold": Tiles(),
    "quantize_rowwise": Tiles(),
    "fold_groups": Tiles(m=16),
    "block_scales": Tiles(k=32),
    "unblock_scales": Tiles(m=128, k=64),
    "combine": Tiles(m=4, k=1024),
    "combine_bwd": Tiles(m=8, k=256),
    "combine_bwd_row": Tiles(m=8, k=256),
    "sort_by_expert": Tiles(m=4096, num_warps=8),
    "row_map": Tiles(m=1024),
    "slot_map": Tiles(m=1024),
    "swiglu": Tiles(m=8, k=256),
    "swiglu_blockwise": Tiles(m=8, k=256),
    "swiglu_bwd": Tiles(m=2, k=1024),
    "swiglu_blockwise_bwd": Tiles(m=8, k=256),
    "grouped_mm_mx": Tiles(m=128, n=128, k=64, num_warps=8, num_stages=3),
    "grouped_mm_bf16": Tiles(m=128, n=256, k=64, num_warps=8, num_stages=3),
    "grouped_mm_bf16_kn": Tiles(m=128, n=256, k=64, num_warps=8, num_stages=3),
    "grouped_mm_bf16_kn_sum": Tiles(m=128, n=256, k=64, num_warps=8, num_stages=3),
    "grouped_wgrad_mx": Tiles(m=64, n=128, k=128, num_warps=8, num_stages=3),
    "grouped_wgrad_bf16": Tiles(m=64, n=128, k=256, num_warps=8, num_stages=3),
    "grouped_wgrad_bf16_t": Tiles(m=64, n=128, k=128, num_warps=8, num_stages=3),
    # 128 along the contraction dim: the tensor core sums them before fp32 adds the sum (grouped_gemm/folded/kernel.py)
    "grouped_mm_fold": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
    "grouped_mm_fold_bias": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
    "grouped_mm_fold_sum": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
    "grouped_mm_blockwise": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
    "grouped_mm_blockwise_sum": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
    "grouped_wgrad_fold": Tiles(m=128, n=128, k=128, num_warps=8, num_stages=4),
}
# Compiled, not measured, since no sm_100 was available: the largest accumulators that fit tensor memory with their
# scales, without spills, and the deepest pipeline that fits 227 KiB. grouped_mm_mx: with 8 warps a thread would copy 2
# bytes of the scales of 128 rows at a time; cp.async copies at least 4.
_SM100 = _GPU | {
    "grouped_mm_mx": Tiles(m=128, n=256, k=128, num_warps=4, num_stages=4),
    "grouped_wgrad_mx": Tiles(m=256, n=128, k=256, num_warps=8, num_stages=3),
}
# Small, so that small shapes have several tiles and a ragged last one.
_INTERPRETER = {op: Tiles(m=64, n=64 if t.n > 1 else 1, k=64 if t.k > 1 else 1) for op, t in _GPU.items()}
_TABLES = {"interpreter": _INTERPRETER, "sm_90": _GPU, "sm_100": _SM100}


MOST_PROGRAMS = 8192
"""Programs of a kernel whose programs loop over rows: a few times as many as a GPU runs at once. The rows are known on
the device alone, and a program costs time even if it has none."""


def cdiv(a: int, b: int) -> int:
    """Tiles of `b` that cover `a`.

    >>> cdiv(65, 64)
    2
    """
    return -(-a // b)


def looping_programs(tiles: int) -> int:
    """Programs of a kernel that loop over `tiles` tiles; of a symbolic number of tiles that number.

    >>> looping_programs(100), looping_programs(100_000)
    (100, 8192)
    """
    return min(tiles, MOST_PROGRAMS) if isinstance(tiles, int) else tiles


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` and at least 1, as Triton requires of block sizes.

    >>> next_power_of_2(5)
    8
    """
    return 1 << max(n - 1, 0).bit_length()


def tiles(op: str, arch: str, *, row_width: int | None = None) -> Tiles:
    """Tiles of an op on "interpreter", "sm_90" or "sm_100".

    row_width: length of the rows of an op that streams rows; short rows get a narrower tile.

    >>> tiles("quantize_row", "sm_90", row_width=64)
    Tiles(m=8, n=1, k=64, num_warps=4, num_stages=1)

    Raises NotImplementedError for an architecture without Triton kernels.
    """
    if arch not in _TABLES:
        fail(NotImplementedError, op, "arch", repr(arch), f"allowed: {', '.join(map(repr, _TABLES))}")
    chosen = _TABLES[arch][op]
    if row_width is not None:
        chosen = chosen._replace(k=min(chosen.k, max(next_power_of_2(row_width), 32)))
    return chosen


def row_tiles(op: str, arch: str, width: int) -> Tiles:
    """Tiles of an op whose programs hold whole rows of `width` values: up to 32 values per thread.

    >>> row_tiles("fold_rows", "sm_90", 7168)
    Tiles(m=1, n=1, k=8192, num_warps=8, num_stages=1)
    """
    k = max(next_power_of_2(width), 32)
    return tiles(op, arch)._replace(k=k, num_warps=min(max(k // 1024, 1), 32))


def strip_tiles(op: str, arch: str, width: int) -> Tiles:
    """Tiles of an op whose programs loop over rows of `width` values: on GPUs rows of at most 2048 take one step.

    >>> strip_tiles("swiglu_bwd", "sm_90", 2048)
    Tiles(m=1, n=1, k=2048, num_warps=4, num_stages=1)
    """
    t, k = tiles(op, arch, row_width=width), next_power_of_2(width)
    if arch == "interpreter" or not t.k < k <= min(2048, t.m * t.k):
        return t
    return t._replace(m=t.m * t.k // k, k=k)
