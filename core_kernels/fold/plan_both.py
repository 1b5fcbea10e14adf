"""Both folded operands of an activation from one launch: by row, and by column and span of tokens.

    x (M, K), group_ends (G,) --quantize_both_fold--> qf (M, K), row_sf (M,)        what out = x w^T multiplies
                                                      qf_t (K, M), span_sf (S, K)   what dw = dout^T x multiplies

          |<---------- K ---------->|
    32    v v v v ...               v     a row's scale is known when all of the row was read, a column's when 256 rows
    rows  v v v v ...               v     of its group were: both while the rows are still at hand. The scales of the
    ...                                   spans before raise a column's, and they come from the scratch memory through
          v v v v ...               v     which the parts of a launch hand each other the largest bytes so far.

An end that is no multiple of 32 does to the scales of spans what it does in `fold_groups`.

The bytes are those of `quantize_row_fold`, and of `fold_groups` of `quantize_col`. It has no Triton kernel; where
neither CUDA C++ nor C++ serves, the frontends run these three.
"""

from collections.abc import Callable
from typing import Any

from ..formats import BLOCK, Rounding, scale_attrs, spans
from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank
from ..quantize import plan as quantize
from ..quantize.plan import FLOATS
from ..tiles import cdiv
from . import plan as fold

TILE_BYTES = 256
"""Of a row of x, that one tile of the CUDA kernel has."""
TILES_ACROSS = 128
"""Tiles of a row, which ask each other: fewer than half of the CTAs that an H100 or H200 runs at a time. Of more, some
cannot start beside the others, which then look themselves at what those hold: the parts are faster."""
POLLS = 256
"""How often a warp asks in vain before it looks itself. A round takes about a microsecond and an answer as long as a
tile's load, with other kernels on the device some tens of microseconds: a launch that is alone never gets there, one
whose tiles cannot run side by side loses a fraction of a millisecond with the tiles of 256 rows."""


def tiles_across(k: int, dtype: str) -> int:
    """Tiles that a row of x has in the CUDA kernel.

    >>> tiles_across(7168, "bfloat16")
    56
    """
    return cdiv(k * (2 if dtype == "bfloat16" else 4), TILE_BYTES)


def scratch_bytes(m: int, k: int, groups: int, dtype: str) -> int:
    """Bytes of global memory through which the CUDA kernel's tiles tell each other what they hold: two for each column
    of a span, one for each row of a tile.

    >>> scratch_bytes(256, 32, 1, "bfloat16")
    384
    """
    return 2 * spans(m, groups) * k + m * tiles_across(k, dtype)


def _plan(
    x: ArrayType, group_ends: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    """On GPUs one output more than the op has, the scratch memory, which the caller drops, and one attribute more:
    `POLLS`."""
    op = "quantize_both_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    (m, k), groups = x.shape, group_ends.shape[0]
    require_multiple(op, "x", m, BLOCK, "dim 0", "pad the groups, see `row_map`")
    require_multiple(op, "x", k, BLOCK, "last dim")
    if k == 0:
        allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale"
        fail(ValueError, op, "x", "K = 0", allowed)
    out = (
        ArrayType((m, k), "uint8"),
        ArrayType((m,), "uint8"),
        ArrayType((k, m), "uint8"),
        ArrayType((spans(m, groups), k), "uint8"),
    )
    attrs = tuple(scale_attrs(op, rounding, satfinite).values())
    if arch == "cpu":
        return Launch(out, attrs)
    scratch = ArrayType((scratch_bytes(m, k, groups, x.dtype),), "uint8")
    wide = tiles_across(k, x.dtype) > TILES_ACROSS
    absent = f"its tiles ask each other across a row, of at most {TILES_ACROSS * TILE_BYTES} bytes" if wide else ""
    return Launch((*out, scratch), (*attrs, POLLS), not_in_cuda=absent)


quantize_both_fold = KernelOp(
    "quantize_both_fold",
    None,
    ("x", "group_ends"),
    ("qf", "row_sf", "qf_t", "span_sf"),
    ("rounding", "satfinite"),
    _plan,
)
PARTS: dict[KernelOp, tuple[KernelOp, ...]] = {
    quantize_both_fold: (fold.quantize_row_fold, quantize.quantize_col, fold.fold_groups),
}
"""What stands for an op's Triton kernel: others, each of which runs as it would alone."""


def composed(call: Callable[..., tuple[Any, ...]], x: Any, group_ends: Any, **options: Any) -> tuple[Any, ...]:
    """quantize_both_fold of its parts. call: a frontend's, which runs one op on its arrays."""
    columns = call(quantize.quantize_col, x, **options)
    return *call(fold.quantize_row_fold, x, **options), *call(fold.fold_groups, *columns, group_ends)
