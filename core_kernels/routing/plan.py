"""Positions of tokens: the stable sort by expert, and the maps from received rows, or from slots, to padded groups.

    expert_ids (T,) --sort_by_expert--> order (T,)    slots grouped by expert, stable
                                        inverse (T,)  the inverse permutation of order
                                        counts (E,)

Rows are received rank-major (rank, then local expert). The grouped GEMM takes them expert-major, each group padded to
`alignment` rows; an empty expert gets one aligned group:

    received   | rank 0: e0 e0 e1 | rank 1: e0 e1 e1 |        counts = [2, 1, 1, 2], 2 local experts
    padded     | e0 e0 e0 -1 ...  | e1 e1 e1 -1 ...  |        alignment rows each
    row_map    | 0  1  3  -1 ...  | 2  4  5  -1 ...  | -1 ... to the end of the buffer

`row_map` gathers into padded order. `inverse` gathers back; it is -1 where a received row holds no token, which is the
slack of a fixed-capacity buffer. All indices are int32; addresses are 64-bit.

`slot_map` composes both on one rank, where sorted slots are the received rows: from slots to padded groups.
"""

from ..formats import BLOCK
from ..launch import (
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    fail,
    require_dtype,
    require_multiple,
    require_rank,
    require_shape,
    require_size,
)
from ..tiles import next_power_of_2, tiles

MOST_ROWS = 2**31 - 8192
"""Rows and slots are counted in int32, also by a block that begins at the last of them."""
CUDA_EXPERTS = 4096
"""The most experts of the CUDA C++ kernel, whose outputs hold a count per expert and block of slots in between."""


def padded_rows(num_rows: int, num_local_experts: int, alignment: int) -> int:
    """Rows that hold any split of `num_rows` over the experts, each group padded to `alignment`."""
    return -(-(num_rows + num_local_experts * alignment) // alignment) * alignment


def _checked_padded_rows(op: str, argument: str, num_rows: int, num_local_experts: int, alignment: int) -> int:
    """`padded_rows`; raises ValueError for an alignment that is not allowed, and for more rows than int32 counts.
    argument: the one that has the rows."""
    require_size(op, "alignment", alignment, BLOCK)
    if alignment % BLOCK:
        fail(ValueError, op, "alignment", alignment, f"allowed: positive multiples of {BLOCK}")
    padded = padded_rows(num_rows, num_local_experts, alignment)
    if isinstance(padded, int) and padded > MOST_ROWS:
        fail(ValueError, op, argument, f"{num_rows}, padded to {padded}", f"allowed: {MOST_ROWS} rows with padding")
    return padded


def _check_sort(expert_ids: ArrayType, *, num_experts: int) -> Signature:
    op = "sort_by_expert"
    require_dtype(op, "expert_ids", expert_ids, "int32")
    require_rank(op, "expert_ids", expert_ids, 1)
    (slots,) = expert_ids.shape
    if isinstance(slots, int) and slots > MOST_ROWS:
        fail(ValueError, op, "expert_ids", f"{slots} slots", f"allowed: {MOST_ROWS}")
    require_size(op, "num_experts", num_experts, 1)
    t = ArrayType(expert_ids.shape, "int32")
    return Signature((t, t, ArrayType((num_experts,), "int32")), {"num_experts": num_experts})


def _tile_sort(call: Call, arch: str) -> Tiling:
    (slots,), (num_experts,), t = call.inputs[0].shape, call.out[2].shape, tiles(call.op, arch)
    many = f"allowed: triton; its CUDA kernel takes up to {CUDA_EXPERTS} experts, these are {num_experts}"
    unsupported = many if num_experts > CUDA_EXPERTS else ""
    return t.tiling((num_experts,), {"T": slots}, BLOCK_M=t.m)._replace(cuda_unsupported=unsupported)


def _check_row_map(
    counts: ArrayType, *, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> Signature:
    op = "row_map"
    require_dtype(op, "counts", counts, "int32")
    require_rank(op, "counts", counts, 1)
    require_size(op, "num_rows", num_rows)
    require_size(op, "num_local_experts", num_local_experts, 1)
    require_multiple(
        op, "counts", counts.shape[0], num_local_experts, "length", "pass ep_degree * num_local_experts counts"
    )
    padded = _checked_padded_rows(op, "num_rows", num_rows, num_local_experts, alignment)
    ranks = counts.shape[0] // num_local_experts
    require_size(op, "rank_rows", rank_rows)
    if rank_rows and rank_rows * ranks != num_rows:
        fail(ValueError, op, "rank_rows", rank_rows, f"allowed: 0, or num_rows / ranks = {num_rows} / {ranks}")
    shapes = (padded,), (num_rows,), (num_local_experts,), (num_local_experts,)
    attrs = {"num_local_experts": num_local_experts, "alignment": alignment, "rank_rows": rank_rows}
    return Signature(tuple(ArrayType(shape, "int32") for shape in shapes), attrs)


def _tile_row_map(call: Call, arch: str) -> Tiling:
    (counts,), (padded,), (num_rows,), (experts,), _ = (array.shape for array in (*call.inputs, *call.out))
    ranks, t = counts // experts, tiles(call.op, arch)
    scalars = {"NUM_ROWS": num_rows, "P": padded}
    blocks = {"BLOCK_R": next_power_of_2(ranks), "BLOCK_E": next_power_of_2(experts), "BLOCK_M": t.m}
    # Without a rank there still is padding to write.
    return t.tiling((max(ranks, 1) * experts,), scalars, RANKS=ranks, **blocks)


def _check_slot_map(
    counts: ArrayType, order: ArrayType, weights: ArrayType, *, top_k: int, alignment: int = BLOCK
) -> Signature:
    op = "slot_map"
    for name, array in (("counts", counts), ("order", order)):
        require_dtype(op, name, array, "int32")
        require_rank(op, name, array, 1)
    require_dtype(op, "weights", weights, "float32")
    weighted = weights.shape == order.shape
    if not weighted:
        require_shape(op, "weights", weights, (0,), f"for none; or {order.shape}, order's")
    require_size(op, "counts", counts.shape[0], 1)
    require_size(op, "top_k", top_k, 1)
    if order.shape[0] % top_k:
        fail(ValueError, op, "top_k", top_k, f"allowed: divisors of {order.shape[0]}, the slots of all tokens")
    shape = (_checked_padded_rows(op, "order", order.shape[0], counts.shape[0], alignment),)
    padded, of_rows = ArrayType(shape, "int32"), ArrayType(shape if weighted else (0,), "float32")
    return Signature((padded, padded, order, counts, counts, of_rows), {"top_k": top_k, "alignment": alignment})


def _tile_slot_map(call: Call, arch: str) -> Tiling:
    (experts,), (num_slots,), weights = (array.shape for array in call.inputs)
    (padded,), t = call.out[0].shape, tiles(call.op, arch)
    meta = {"EXPERTS": experts, "WEIGHTED": weights == (num_slots,), "BLOCK_E": next_power_of_2(experts)}
    return t.tiling((experts,), {"S": num_slots, "P": padded}, **meta, BLOCK_M=t.m)


sort_by_expert = KernelOp(
    "sort_by_expert",
    """The stable sort of slots by expert.

    Args:
        expert_ids: (T,) int32, 0 to num_experts - 1.
        num_experts: positive.

    Returns:
        order (T,) int32, slots grouped by expert; inverse (T,) int32, the position of each slot in order; counts
        (num_experts,) int32, slots of each expert.

    Raises:
        ValueError: shape, on a CPU also an expert that does not exist.
        TypeError: dtype.

    Example:
        >>> [x.tolist() for x in ops.sort_by_expert(xp.asarray([1, 0, 1], dtype=xp.int32), 2)]
        [[1, 0, 2], [1, 0, 2], [1, 2]]
    """,
    ("expert_ids",),
    ("order", "inverse", "counts"),
    _check_sort,
    _tile_sort,
    "routing.kernel:sort_kernel",
)
row_map = KernelOp(
    "row_map",
    """The map from rank-major received rows to padded expert-major rows.

    Args:
        counts: (ranks * num_local_experts,) int32, rows received from each rank for each local expert.
        num_rows: rows of the receive buffer.
        num_local_experts: groups, one per expert of this rank.
        alignment: rows that each group is padded to, a positive multiple of 32.
        rank_rows: rows of the part of each rank; 0 if the parts follow each other without slack.

    Returns:
        row_map (P,) int32: padded row i is received row row_map[i], -1 for padding; inverse (num_rows,) int32: received
        row j is padded row inverse[j], -1 without a token; padded_counts and group_ends (num_local_experts,) int32:
        rows of each group with padding, and where it ends.

    Raises:
        ValueError: shape, sizes, on a CPU also counts beyond num_rows.
        TypeError: dtype.

    Example:
        >>> counts = xp.asarray([2, 1], dtype=xp.int32)
        >>> row_map, inverse, padded_counts, group_ends = ops.row_map(counts, num_rows=3, num_local_experts=2)
        >>> inverse.tolist(), group_ends.tolist()
        ([0, 1, 32], [32, 64])
    """,
    ("counts",),
    ("row_map", "inverse", "padded_counts", "group_ends"),
    _check_row_map,
    _tile_row_map,
    "routing.kernel:row_map_kernel",
)
slot_map = KernelOp(
    "slot_map",
    """The maps between slots and padded groups on one rank: `row_map` of the rows that `sort_by_expert` has sorted,
    composed with its order.

    Args:
        counts: (E,) int32, slots of each expert.
        order: (S,) int32, slots sorted by expert; a permutation.
        weights: (S,) fp32, of each slot, or (0,) for none.
        top_k: slots of a token, of which S is a multiple.
        alignment: rows that each group is padded to, a positive multiple of 32.

    Returns:
        slots (P,) int32: the slot of each padded row, -1 for padding; tokens (P,) int32: its token, slot // top_k, -1
        for padding; inverse (S,) int32: the padded row of each slot; padded_counts and group_ends (E,) int32 as in
        `row_map`; row_weights (P,) fp32: the weight of each padded row, 0 for padding; (0,) without weights.

    Raises:
        ValueError: shape, sizes, on a CPU also counts and slots that do not belong together.
        TypeError: dtype.

    Example:
        >>> order, counts = xp.asarray([1, 0, 2, 3], dtype=xp.int32), xp.asarray([1, 3], dtype=xp.int32)
        >>> slots, tokens, inverse, *_ = ops.slot_map(counts, order, xp.zeros((0,)), 2)
        >>> slots[32:36].tolist(), tokens[32:36].tolist(), inverse.tolist()
        ([0, 2, 3, -1], [0, 1, 1, -1], [32, 0, 33, 34])
    """,
    ("counts", "order", "weights"),
    ("slots", "tokens", "inverse", "padded_counts", "group_ends", "row_weights"),
    _check_slot_map,
    _tile_slot_map,
    "routing.kernel:slot_map_kernel",
)
