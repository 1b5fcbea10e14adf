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

from ..formats import BLOCK
from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_size
from ..tiles import next_power_of_2, tiles
from . import kernel

CUDA_EXPERTS = 4096
"""The CUDA C++ kernel keeps as many counts for each of its blocks of slots in the outputs; Triton sorts by more."""


def padded_rows(num_rows: int, num_local_experts: int, alignment: int) -> int:
    """Rows that hold any split of `num_rows` over the experts, each group padded to `alignment`."""
    return -(-(num_rows + num_local_experts * alignment) // alignment) * alignment


def _plan_sort(expert_ids: ArrayType, *, arch: str, num_experts: int) -> Launch:
    op = "sort_by_expert"
    require_dtype(op, "expert_ids", expert_ids, "int32")
    require_rank(op, "expert_ids", expert_ids, 1)
    require_size(op, "num_experts", num_experts, 1)
    t = ArrayType(expert_ids.shape, "int32")
    out = (t, t, ArrayType((num_experts,), "int32"))
    if arch == "cpu":
        return Launch(out, (num_experts,))
    chosen = tiles(op, arch)
    return Launch(
        out=out,
        attrs=(num_experts,),
        grid=(num_experts,),
        scalars={"T": expert_ids.shape[0]},
        meta={"num_experts": num_experts, "BLOCK_M": chosen.m},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        not_in_cuda=""
        if num_experts <= CUDA_EXPERTS
        else f"allowed: triton; its CUDA kernel takes up to {CUDA_EXPERTS} experts, these are {num_experts}",
    )


def _plan_row_map(
    counts: ArrayType, *, arch: str, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> Launch:
    """`num_rows`: rows received. `rank_rows`: rows that every rank's part of the buffer has; 0 when the
    parts follow each other without slack."""
    op = "row_map"
    require_dtype(op, "counts", counts, "int32")
    require_rank(op, "counts", counts, 1)
    require_size(op, "num_rows", num_rows)
    require_size(op, "num_local_experts", num_local_experts, 1)
    require_multiple(
        op, "counts", counts.shape[0], num_local_experts, "length", "pass ep_degree * num_local_experts counts"
    )
    require_size(op, "alignment", alignment, BLOCK)
    if alignment % BLOCK:
        fail(ValueError, op, "alignment", alignment, f"allowed: positive multiples of {BLOCK}")
    ranks = counts.shape[0] // num_local_experts
    require_size(op, "rank_rows", rank_rows)
    if rank_rows and rank_rows * ranks != num_rows:
        fail(ValueError, op, "rank_rows", rank_rows, f"allowed: 0, or num_rows / ranks = {num_rows} / {ranks}")
    padded = padded_rows(num_rows, num_local_experts, alignment)
    if isinstance(padded, int) and padded >= 2**31:
        fail(ValueError, op, "num_rows", f"{num_rows}, padded to {padded}", f"allowed: {2**31 - 1} rows with padding")
    out = (
        ArrayType((padded,), "int32"),
        ArrayType((num_rows,), "int32"),
        ArrayType((num_local_experts,), "int32"),
        ArrayType((num_local_experts,), "int32"),
    )
    attrs = {"num_local_experts": num_local_experts, "alignment": alignment, "rank_rows": rank_rows}
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    chosen = tiles(op, arch)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        # without a rank there is padding to write still
        grid=(max(ranks, 1) * num_local_experts,),
        scalars={"NUM_ROWS": num_rows, "P": out[0].shape[0]},
        meta={
            **attrs,
            "RANKS": ranks,
            "BLOCK_R": next_power_of_2(ranks),
            "BLOCK_E": next_power_of_2(num_local_experts),
            "BLOCK_M": chosen.m,
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )


sort_by_expert = KernelOp(
    "sort_by_expert", kernel.sort_kernel, ("expert_ids",), ("order", "inverse", "counts"), ("num_experts",), _plan_sort
)
row_map = KernelOp(
    "row_map",
    kernel.row_map_kernel,
    ("counts",),
    ("row_map", "inverse", "padded_counts", "group_ends"),
    ("num_local_experts", "alignment", "rank_rows"),
    _plan_row_map,
)
