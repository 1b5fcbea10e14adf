"""h folded in the pass that computes it: the operand of the product with w2.

    gate, up (M, F), prob (M,) --swiglu_row_fold--> qf (M, F), row_sf (M,)       read 4 bytes per value, write 1

The separate ops store MXFP8 rows, which a second pass reads and folds: 7 bytes per value.

    gate, up, prob --swiglu_row--> q, sf --fold_rows--> qf, row_sf
        read 4         write 1       read 1     write 1

Results are bitwise equal to the separate ops. There is no Triton kernel: the op is composed of them where neither CUDA
C++ nor C++ runs, and on a GPU for rows that a CTA does not hold.
"""

from collections.abc import Callable
from typing import Any

from ...fold.plan import fold_rows
from ...formats import BLOCK, Rounding, scale_attrs
from ...launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
    require_multiple,
)
from ...quantize.plan import SCALES, whole_row_types
from ..activation import swiglu_attrs
from ..plan import NUMBERS, UP_PROB, check_arrays, swiglu_row

LONGEST_ROW = 16384
"""Values of a row that a CTA of the CUDA kernel holds: 32 in each of 512 threads."""


def _check(
    gate: ArrayType, up: ArrayType, prob: ArrayType, group_ends: ArrayType = NO_ENDS, *,
    rounding: Rounding = Rounding.RCEIL, satfinite: bool = False, alpha: float = 1.0, limit: float = 0.0,
    offset: float = 0.0,
) -> Signature:  # fmt: skip
    op = "swiglu_row_fold"
    shape = check_arrays(op, {"gate": gate, "up": up}, prob)
    require_multiple(op, "gate", shape[1], BLOCK, "last dim")
    out = whole_row_types(op, "gate", shape)
    attrs = scale_attrs(op, rounding, satfinite) | swiglu_attrs(op, alpha, limit, offset)
    return Signature(out, attrs, check_optional_ends(op, group_ends, shape))


def _tile(call: Call, arch: str) -> Tiling:  # the same on every architecture
    m, f = call.inputs[0].shape
    unsupported = f"allowed: rows of at most {LONGEST_ROW} values" if f > LONGEST_ROW else ""
    return Tiling(grid=(m,), cuda_unsupported=unsupported)


def _compose(
    call: Callable[..., tuple[Any, ...]], gate: Any, up: Any, prob: Any, group_ends: Any, **options: Any
) -> tuple[Any, ...]:
    return call(fold_rows, *call(swiglu_row, gate, up, prob, **options), group_ends)


swiglu_row_fold = KernelOp(
    "swiglu_row_fold",
    f"""`fold_rows` of `swiglu_row` in one pass; h is not stored.

    Args:
        gate: (M, F) bf16. F is a positive multiple of 32.
        {UP_PROB}
        {ROWS_UP_TO}
        {SCALES}
        {NUMBERS}

    Returns:
        h_qf (M, F) E4M3 and h_row_sf (M,) E8M0, as uint8.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((1, 32), dtype=xp.bfloat16)
        >>> h_qf, h_row_sf = ops.swiglu_row_fold(one, one, xp.zeros((0,)))
        >>> h_qf[0, 0].item(), h_row_sf.tolist()  # 0.73 becomes 0.75 = 384 * 2^-9
        (124, [118])
    """,
    ("gate", "up", "prob", "group_ends"),
    ("h_qf", "h_row_sf"),
    _check,
    _tile,
    compose=_compose,
    optional_ends=True,
)
