"""The token operand of rows that are MXFP8 already, in one pass.

    q (M, K), sf (M, K/32), group_ends (G,) --requantize_col_fold--> qf_t (K, M), span_sf (S, K)

A weight gradient contracts the tokens, so its operand has scales along them. Rows that arrived as MXFP8 have scales
along K. The three separate ops move 8 bytes per value; this one reads one byte and writes one:

    q, sf --dequantize--> bf16 --quantize_col--> q_t, sf_t --fold_groups--> qf_t, span_sf
    read 1      write 2     read 2        write 1      read 1       write 1

Results are bitwise equal to the three ops. There is no Triton kernel: on an H200 it took twice as long as the three
ops, which run where neither CUDA C++ nor C++ does.
"""

from collections.abc import Callable
from typing import Any

from ...formats import BLOCK, Rounding, scale_attrs, spans
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_multiple, require_rank
from ...quantize.plan import SCALES, check_scaled, dequantize, quantize_col
from ..both.plan import POLLS
from ..plan import fold_groups


def scratch_bytes(m: int, k: int, groups: int) -> int:
    """Bytes of the scratch memory of the CUDA kernel: two for each column of a span.

    >>> scratch_bytes(256, 32, 1)
    128
    """
    return 2 * spans(m, groups) * k


def _check(
    q: ArrayType,
    sf: ArrayType,
    group_ends: ArrayType,
    *,
    rounding: Rounding = Rounding.RCEIL,
    satfinite: bool = False,
) -> Signature:
    op = "requantize_col_fold"
    check_scaled(op, q, sf, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    m, k = q.shape
    require_multiple(op, "q", m, BLOCK, "dim 0", "pad the groups, see `row_map`")
    out = ArrayType((k, m), "uint8"), ArrayType((spans(m, group_ends.shape[0]), k), "uint8")
    return Signature(out, scale_attrs(op, rounding, satfinite), tokens=(m, BLOCK))


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    m, k = call.inputs[0].shape
    scratch = ArrayType((scratch_bytes(m, k, call.inputs[2].shape[0]),), "uint8")
    return Tiling(grid=(k,), scratch=(scratch,), cuda_attrs=(POLLS,))


def _compose(call: Callable[..., tuple[Any, ...]], q: Any, sf: Any, group_ends: Any, **options: Any) -> tuple[Any, ...]:
    (x,) = call(dequantize, q, sf, out_dtype="bfloat16")
    return call(fold_groups, *call(quantize_col, x, **options), group_ends)


requantize_col_fold = KernelOp(
    "requantize_col_fold",
    f"""`fold_groups` of the `quantize_col` of MXFP8 rows, in one read of them: the operand of a weight gradient.

    Args:
        q: (M, K) E4M3.
        sf: (M, K/32) E8M0, both uint8; M and K multiples of 32. Values count as bf16.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32.
        {SCALES}

    Returns:
        qf_t (K, M) and span_sf (M // 256 + G, K), uint8. Columns of qf_t past the last end are
        unspecified.

    Raises:
        ValueError: shape, rounding, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q, sf = ops.quantize_row(xp.asarray([[4.0] * 32] + [[1.0] * 32] * 31))
        >>> qf_t, span_sf = ops.requantize_col_fold(q, sf, xp.asarray([32], dtype=xp.int32))
        >>> span_sf[0, :2].tolist()  # 4 = 2^8 * 2^-6; 127 - 6 = 121, plus three octaves
        [124, 124]
    """,
    ("q", "sf", "group_ends"),
    ("qf_t", "span_sf"),
    _check,
    _tile,
    compose=_compose,
)
