"""The folded product of rows with blocks apart, as `fold_rows_stepped` makes them.

    lhs (M, K), scales (M,), of blocks (K/32, M)  x  rhs_t (G, N, K), scales (G, N), of blocks (G, K/32, N)  -> (M, N)

    terms         | 128                   | 32 | 32 | 32 | 32 | 128 ...
    scales        2^a                     2^a  2^a  2^b  2^a  2^a
    sum           + 128 terms             + 96 terms, + 2^(b-a) * 32 terms, + 128 ...                      * 2^a --> out

`apart` tells the kernel which blocks of 32 rows or columns are apart. It multiplies those in bf16, where an E4M3 code
times a power of two is exact, and all others as `grouped_mm_fold` does, with the same bytes.
"""

from ..fold.plan_stepped import stepped_types
from ..launch import ArrayType, KernelOp, Signature, require_dtype, require_shape
from .plan import ENDS, check_m_grouped, tile_m_grouped
from .plan_folded import check_codes


def _check(
    lhs_qf: ArrayType, lhs_sf: ArrayType, lhs_step_sf: ArrayType, lhs_apart: ArrayType,
    rhs_qf: ArrayType, rhs_sf: ArrayType, rhs_step_sf: ArrayType, rhs_apart: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16",
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold_stepped"
    check_codes(op, lhs_qf, rhs_qf)
    for side, q, *more in (
        ("lhs", lhs_qf, lhs_sf, lhs_step_sf, lhs_apart), ("rhs", rhs_qf, rhs_sf, rhs_step_sf, rhs_apart),
    ):  # fmt: skip
        for name, got, wanted in zip(("sf", "step_sf", "apart"), more, stepped_types(q.shape), strict=True):
            require_dtype(op, f"{side}_{name}", got, wanted.dtype)
            require_shape(op, f"{side}_{name}", got, wanted.shape, f"of fold_rows_stepped with {side}_qf")
    return check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype)


grouped_mm_fold_stepped = KernelOp(
    "grouped_mm_fold_stepped",
    f"""Each group of rows times its weight matrix, E4M3 operands with a scale per row and blocks apart.

    lhs_qf: (M, K) E4M3, lhs_sf: (M,) and lhs_step_sf: (K/32, M) E8M0, lhs_apart: (ceil(M/32), ceil(K/1024)) int32.
    rhs_qf: (G, N, K) E4M3, rhs_sf: (G, N) and rhs_step_sf: (G, K/32, N) E8M0, rhs_apart: (G, ceil(N/32), ceil(K/1024))
    int32. Others uint8; K is a positive multiple of 32 and N a multiple of 8. `fold_rows_stepped` makes such operands;
    no scale is NaN.
    {ENDS}
    out_dtype: "bfloat16" or "float32".
    Returns out (M, N) = lhs rhs[g]^T for the group g of each row, rounded once; zeros past the last end. Sums are fp32
    in units of the scales of row and column; scales of blocks are at most 44 octaves from these.

    >>> q, sf = xp.full((8, 64), 0x38, dtype=xp.uint8), xp.full((8, 2), 127, dtype=xp.uint8)  # 1.0
    >>> x, w = ops.fold_rows_stepped(q, sf), ops.fold_rows_stepped(q[None], sf[None])
    >>> ops.grouped_mm_fold_stepped(*x, *w, xp.asarray([8], dtype=xp.int32))[0, 0].item()
    64.0

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype).
    """,
    (
        *("lhs_qf", "lhs_sf", "lhs_step_sf", "lhs_apart"),
        *("rhs_qf", "rhs_sf", "rhs_step_sf", "rhs_apart", "group_ends"),
    ),
    ("out",),
    _check,
    tile_m_grouped,
    "grouped_gemm.kernel_stepped:mm_kernel",
)
