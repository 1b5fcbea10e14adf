"""Two products of folded operands in one launch: the two weights that read the same rows, and their gradients.

    grouped_mm_fold_pair      lhs x rhs_t --> out, lhs x rhs2_t --> out2        gate and up: x with w1 and with w3
    grouped_wgrad_fold_pair   lhs_t x rhs_t --> out, lhs2_t x rhs_t --> out2    their gradients: dgate and dup with x

    one launch       | gate, up: tiles of both side by side       |    the last CTAs idle once, the common operand
    two launches     | gate               | up                    |    is read while it is in L2

Results are bitwise equal to two calls of `grouped_mm_fold` or `grouped_wgrad_fold`. There is no Triton kernel: where
CUDA C++ does not run, the op is composed of these calls.
"""

import math
from collections.abc import Callable
from typing import Any

from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_multiple, require_shape
from ..exact.plan import CLEAR_REST, ENDS, check_m_grouped
from .plan import COLUMNS, check_operands, check_wgrad_operands, grouped_mm_fold, grouped_wgrad_fold


def _check_mm(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType,
    rhs2_qf: ArrayType, rhs2_sf: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16",
    clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold_pair"
    check_operands(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    _check_alike(op, rhs_qf=(rhs_qf, rhs2_qf), rhs_sf=(rhs_sf, rhs2_sf))
    return _of_both(check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype, clear_rest))


def _check_wgrad(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType,
    lhs2_qf: ArrayType, lhs2_sf: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16",
) -> Signature:  # fmt: skip
    op = "grouped_wgrad_fold_pair"
    signature = check_wgrad_operands(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype)
    _check_alike(op, lhs_qf=(lhs_qf, lhs2_qf), lhs_sf=(lhs_sf, lhs2_sf))
    require_multiple(op, "lhs_qf", lhs_qf.shape[0], COLUMNS, "N", "call grouped_wgrad_fold twice")
    return _of_both(signature)


def _check_alike(op: str, **pairs: tuple[ArrayType, ArrayType]) -> None:
    """Raise unless both arrays are bytes of one shape. The first's name gives the second's: "rhs_qf", "rhs2_qf"."""
    for name, (first, second) in pairs.items():
        side, kind = name.split("_")
        require_dtype(op, f"{side}2_{kind}", second, "uint8")
        require_shape(op, f"{side}2_{kind}", second, first.shape, f"the shape of {name}")


def _of_both(signature: Signature) -> Signature:
    return signature._replace(out=signature.out * 2)


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    return Tiling(grid=(math.prod(call.out[0].shape),))


def _compose_mm(
    call: Callable[..., tuple[Any, ...]], lhs_qf: Any, lhs_sf: Any, rhs_qf: Any, rhs_sf: Any,
    rhs2_qf: Any, rhs2_sf: Any, group_ends: Any, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    first = call(grouped_mm_fold, lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, **options)
    return *first, *call(grouped_mm_fold, lhs_qf, lhs_sf, rhs2_qf, rhs2_sf, group_ends, **options)


def _compose_wgrad(
    call: Callable[..., tuple[Any, ...]], lhs_qf: Any, lhs_sf: Any, rhs_qf: Any, rhs_sf: Any,
    lhs2_qf: Any, lhs2_sf: Any, group_ends: Any, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    first = call(grouped_wgrad_fold, lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, **options)
    return *first, *call(grouped_wgrad_fold, lhs2_qf, lhs2_sf, rhs_qf, rhs_sf, group_ends, **options)


grouped_mm_fold_pair = KernelOp(
    "grouped_mm_fold_pair",
    f"""`grouped_mm_fold` of the same rows with two weights of one shape, in one launch.

    Args:
        lhs_qf: (M, K).
        lhs_sf: (M,).
        rhs_qf: (G, N, K).
        rhs_sf: (G, N): as for `grouped_mm_fold`.
        rhs2_qf: (G, N, K).
        rhs2_sf: (G, N): the second weight. All uint8.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T and out2 (M, N) = lhs rhs2[g]^T for the group g of each row.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> ones, sf = xp.full((1, 32), 0x38, dtype=xp.uint8), xp.full((1,), 127, dtype=xp.uint8)  # 1.0
        >>> w, w_sf = xp.full((1, 8, 32), 0x38, dtype=xp.uint8), xp.full((1, 8), 127, dtype=xp.uint8)
        >>> gate, up = ops.grouped_mm_fold_pair(ones, sf, w, w_sf, w, w_sf + 1, xp.asarray([1], dtype=xp.int32))
        >>> gate[0, 0].item(), up[0, 0].item()
        (32.0, 64.0)
    """,
    ("lhs_qf", "lhs_sf", "rhs_qf", "rhs_sf", "rhs2_qf", "rhs2_sf", "group_ends"),
    ("out", "out2"),
    _check_mm,
    _tile,
    compose=_compose_mm,
)
grouped_wgrad_fold_pair = KernelOp(
    "grouped_wgrad_fold_pair",
    """`grouped_wgrad_fold` of two gradients of one shape with the same x, in one launch.

    Args:
        lhs_qf: (N, M).
        lhs_sf: (M // 256 + G, N).
        rhs_qf: (K, M).
        rhs_sf: (M // 256 + G, K): as for `grouped_wgrad_fold`, N and K multiples of 8.
        lhs2_qf: (N, M).
        lhs2_sf: (M // 256 + G, N): the second gradient. All uint8.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32, up to M.
        out_dtype: "bfloat16" or "float32".

    Returns:
        out (G, N, K) = lhs rhs^T and out2 (G, N, K) = lhs2 rhs^T over the tokens of each group; zeros for an empty
        group.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> ones, sf = xp.full((8, 32), 0x38, dtype=xp.uint8), xp.full((1, 8), 127, dtype=xp.uint8)  # 1.0
        >>> dw1, dw3 = ops.grouped_wgrad_fold_pair(ones, sf, ones, sf, ones, sf + 1, xp.asarray([32], dtype=xp.int32))
        >>> dw1[0, 0, 0].item(), dw3[0, 0, 0].item()
        (32.0, 64.0)
    """,
    ("lhs_qf", "lhs_sf", "rhs_qf", "rhs_sf", "lhs2_qf", "lhs2_sf", "group_ends"),
    ("out", "out2"),
    _check_wgrad,
    _tile,
    compose=_compose_wgrad,
)
