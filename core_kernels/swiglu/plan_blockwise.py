"""h, dgate and dup in blockwise FP8 in the pass that computes them: operands of the products with w2, w1 and w3.

    gate, up (M, F), prob (M,)      --swiglu_blockwise-----> q (M, F), sf (M, F/128) of h     read 4 bytes, write 1
    dh, gate, up (M, F), prob (M,)  --swiglu_blockwise_bwd-> the same of dgate and of dup     read 6 bytes, write 2

The separate ops store h, or dgate and dup, in bf16 and read them again: 9 bytes per value instead of 5, or 16 instead
of 8. Results are bitwise equal. `swiglu_bwd_fold` has dprob, and the operands along the tokens.
"""

from ..formats import SQUARE
from ..launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
)
from ..quantize.plan_blockwise import POWER_OF_TWO, row_types
from ..tiles import cdiv, looping_programs, tiles
from .activation import swiglu_attrs
from .plan import NUMBERS, UP_PROB, check_arrays, meta_of_rows


def _check_forward(
    gate: ArrayType, up: ArrayType, prob: ArrayType, group_ends: ArrayType = NO_ENDS, *,
    power_of_two: bool = False, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0,
) -> Signature:  # fmt: skip
    op = "swiglu_blockwise"
    shape = check_arrays(op, {"gate": gate, "up": up}, prob)
    return _signature(op, shape, group_ends, 1, power_of_two, swiglu_attrs(op, alpha, limit, offset))


def _check_backward(
    dh: ArrayType, gate: ArrayType, up: ArrayType, prob: ArrayType, group_ends: ArrayType = NO_ENDS, *,
    power_of_two: bool = False, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0,
) -> Signature:  # fmt: skip
    op = "swiglu_blockwise_bwd"
    shape = check_arrays(op, {"dh": dh, "gate": gate, "up": up}, prob)
    return _signature(op, shape, group_ends, 2, power_of_two, swiglu_attrs(op, alpha, limit, offset))


def _signature(
    op: str, shape: tuple[int, ...], group_ends: ArrayType, results: int, power_of_two: bool,
    numbers: dict[str, int],
) -> Signature:  # fmt: skip
    out, scales, _ = row_types(op, shape, power_of_two)
    return Signature(out * results, {**scales, **numbers}, check_optional_ends(op, group_ends, shape))


def _tile(call: Call, arch: str) -> Tiling:
    m, f = call.inputs[0].shape
    t = tiles(call.op, arch, row_width=f)
    width = max(t.k, SQUARE)
    return t.tiling(
        (looping_programs(cdiv(m, t.m) * cdiv(f, width)),), {"M": m}, **meta_of_rows(call, arch, t.m, width)
    )


swiglu_blockwise = KernelOp(
    "swiglu_blockwise",
    f"""`quantize_blockwise` of `swiglu` in one pass; h is not stored.

    Args:
        gate: (M, F) bf16.
        {UP_PROB}
        {ROWS_UP_TO}
        {POWER_OF_TWO}
        {NUMBERS}

    Returns:
        h_q (M, F) E4M3 as uint8 and h_sf (M, ceil(F/128)) fp32.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((1, 128), dtype=xp.bfloat16)
        >>> h_q, h_sf = ops.swiglu_blockwise(one, one, xp.zeros((0,)), power_of_two=True)
        >>> h_q[0, 0].item(), h_sf.tolist()  # 0.73 becomes 0.75 = 384 * 2^-9
        (124, [[0.001953125]])
    """,
    ("gate", "up", "prob", "group_ends"),
    ("h_q", "h_sf"),
    _check_forward,
    _tile,
    "swiglu.kernel:blockwise_kernel",
    optional_ends=True,
)
swiglu_blockwise_bwd = KernelOp(
    "swiglu_blockwise_bwd",
    f"""`quantize_blockwise` of dgate and dup of `swiglu_bwd` in one pass, without dprob.

    Args:
        dh: (M, F) bf16.
        gate: (M, F) bf16.
        {UP_PROB}
        {ROWS_UP_TO}
        {POWER_OF_TWO}
        {NUMBERS}

    Returns:
        dgate_q (M, F) E4M3 as uint8 and dgate_sf (M, ceil(F/128)) fp32; of dup the same dup_q and dup_sf.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> one = xp.ones((1, 128), dtype=xp.bfloat16)
        >>> *_, dup_q, dup_sf = ops.swiglu_blockwise_bwd(one, one, one, xp.zeros((0,)), power_of_two=True)
        >>> dup_q[0, 0].item(), dup_sf.tolist()  # 0.73 becomes 0.75 = 384 * 2^-9
        (124, [[0.001953125]])
    """,
    ("dh", "gate", "up", "prob", "group_ends"),
    ("dgate_q", "dgate_sf", "dup_q", "dup_sf"),
    _check_backward,
    _tile,
    "swiglu.kernel:bwd_blockwise_kernel",
    optional_ends=True,
)
