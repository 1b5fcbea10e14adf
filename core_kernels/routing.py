"""Where every token goes: stable sort by expert, and the map from received rows to padded groups.

    expert_ids (T,) --sort_by_expert--> order (T,)    slots grouped by expert, stable
                                        inverse (T,)  order's inverse permutation
                                        counts (E,)

Rows arrive rank-major (rank, then local expert) and the grouped GEMM wants them expert-major, each
group padded to `alignment` rows (an empty expert still gets one aligned group):

    received   | rank 0: e0 e0 e1 | rank 1: e0 e1 e1 |        counts = [2, 1, 1, 2], 2 local experts
    padded     | e0 e0 e0 -1 ...  | e1 e1 e1 -1 ...  |        alignment rows each
    row_map    | 0  1  3  -1 ...  | 2  4  5  -1 ...  | -1 ... to the end of the buffer

`row_map` gathers into padded order, `inverse` gathers back (-1 where a received row holds no token:
the slack of a fixed-capacity buffer). All indices are int32; addressing through them is 64-bit.
"""

from .formats import BLOCK
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank


def padded_rows(num_rows: int, num_local_experts: int, alignment: int) -> int:
    """Rows that hold any split of `num_rows` over the experts, each group padded to `alignment`."""
    return -(-(num_rows + num_local_experts * alignment) // alignment) * alignment


def _plan_sort(expert_ids: ArrayType, *, arch: str, num_experts: int) -> Launch:
    op = "sort_by_expert"
    require_dtype(op, "expert_ids", expert_ids, "int32")
    require_rank(op, "expert_ids", expert_ids, 1)
    if num_experts < 1:
        fail(ValueError, op, "num_experts", num_experts, "allowed: at least 1")
    t = ArrayType(expert_ids.shape, "int32")
    return Launch(out=(t, t, ArrayType((num_experts,), "int32")), attrs=(num_experts,))


def _plan_row_map(
    counts: ArrayType, *, arch: str, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> Launch:
    """`num_rows`: rows received. `rank_rows`: rows that every rank's part of the buffer has; 0 when the
    parts follow each other without slack."""
    op = "row_map"
    require_dtype(op, "counts", counts, "int32")
    require_rank(op, "counts", counts, 1)
    if num_local_experts < 1:
        fail(ValueError, op, "num_local_experts", num_local_experts, "allowed: at least 1")
    require_multiple(
        op, "counts", counts.shape[0], num_local_experts, "length", "pass ep_degree * num_local_experts counts"
    )
    if alignment <= 0 or alignment % BLOCK:
        fail(ValueError, op, "alignment", alignment, f"allowed: positive multiples of {BLOCK}")
    ranks = counts.shape[0] // num_local_experts
    if rank_rows < 0 or (rank_rows and rank_rows * ranks != num_rows):
        fail(ValueError, op, "rank_rows", rank_rows, f"allowed: 0, or num_rows / ranks = {num_rows} / {ranks}")
    out = (
        ArrayType((padded_rows(num_rows, num_local_experts, alignment),), "int32"),
        ArrayType((num_rows,), "int32"),
        ArrayType((num_local_experts,), "int32"),
        ArrayType((num_local_experts,), "int32"),
    )
    return Launch(out=out, attrs=(num_local_experts, alignment, rank_rows))


sort_by_expert = KernelOp(
    "sort_by_expert", None, ("expert_ids",), ("order", "inverse", "counts"), ("num_experts",), _plan_sort
)
row_map = KernelOp(
    "row_map",
    None,
    ("counts",),
    ("row_map", "inverse", "padded_counts", "group_ends"),
    ("num_local_experts", "alignment", "rank_rows"),
    _plan_row_map,
)
