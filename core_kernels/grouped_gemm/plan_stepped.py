"""The folded product of rows whose scales change along K, as `fold_rows_stepped` makes them.

    lhs (M, K), scales (K/32, M)  x  rhs_t (G, N, K), scales (G, K/32, N)  -> out (M, N)

    terms         | 128                   | 32 | 32 | 32 | 32 | 128 ...
    scales        2^a                     2^a  2^a  2^b  2^a  2^a
    sum           + 128 terms             + 64 terms, * 2^(a-b)  + 32, * 2^(b-a)  + 32  + 128 ...         * 2^a --> out

`changes` tells the kernel in which 128 terms the scale of one of 32 rows or columns changes. Others it multiplies as
`grouped_mm_fold` does, with the same bytes. A sum changes its unit where the product of its two scales does.
"""

from ..fold.plan_stepped import stepped_types
from ..launch import ArrayType, KernelOp, Signature, require_dtype, require_shape
from .plan import ENDS, check_m_grouped, tile_m_grouped
from .plan_folded import check_codes


def _check(
    lhs_qf: ArrayType, lhs_sf: ArrayType, lhs_changes: ArrayType,
    rhs_qf: ArrayType, rhs_sf: ArrayType, rhs_changes: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16",
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold_stepped"
    check_codes(op, lhs_qf, rhs_qf)
    for side, q, sf, changes in (("lhs", lhs_qf, lhs_sf, lhs_changes), ("rhs", rhs_qf, rhs_sf, rhs_changes)):
        for name, got, wanted in zip(("sf", "changes"), (sf, changes), stepped_types(q.shape), strict=True):
            require_dtype(op, f"{side}_{name}", got, wanted.dtype)
            require_shape(op, f"{side}_{name}", got, wanted.shape, f"of fold_rows_stepped with {side}_qf")
    return check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype)


grouped_mm_fold_stepped = KernelOp(
    "grouped_mm_fold_stepped",
    f"""Each group of rows times its weight matrix, E4M3 operands whose scales change along K.

    lhs_qf: (M, K) E4M3, lhs_sf: (K/32, M) E8M0, lhs_changes: (ceil(M/32), ceil(K/4096)) int32. rhs_qf: (G, N, K) E4M3,
    rhs_sf: (G, K/32, N) E8M0, rhs_changes: (G, ceil(N/32), ceil(K/4096)) int32. uint8 but for changes; K is a positive
    multiple of 32 and N a multiple of 8. `fold_rows_stepped` makes such operands; no scale is NaN.
    {ENDS}
    out_dtype: "bfloat16" or "float32".
    Returns out (M, N) = lhs rhs[g]^T for the group g of each row, rounded once; zeros past the last end. Sums are fp32.
    A sum is in units of its last two scales: it is infinite if it is more than 2^100 larger than their product, and
    loses what came before scales that increase by 127 octaves.

    >>> q, sf = xp.full((8, 64), 0x38, dtype=xp.uint8), xp.full((8, 2), 127, dtype=xp.uint8)  # 1.0
    >>> x, w = ops.fold_rows_stepped(q, sf), ops.fold_rows_stepped(q[None], sf[None])
    >>> ops.grouped_mm_fold_stepped(*x, *w, xp.asarray([8], dtype=xp.int32))[0, 0].item()
    64.0

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype).
    """,
    ("lhs_qf", "lhs_sf", "lhs_changes", "rhs_qf", "rhs_sf", "rhs_changes", "group_ends"),
    ("out",),
    _check,
    tile_m_grouped,
    "grouped_gemm.kernel_stepped:mm_kernel",
)
