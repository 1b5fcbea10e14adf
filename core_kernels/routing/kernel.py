"""Triton kernels of the expert sort and of the maps of rows and slots; plan.py draws them."""

import triton
import triton.language as tl


@triton.jit
def sort_kernel(
    expert_ids, T, order, inverse, counts,
    num_experts: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per expert: counts the slots of lower experts, then places its own slots in order."""
    expert = tl.program_id(0)
    lower = tl.zeros((BLOCK_M,), tl.int32)
    for i in range(0, T, BLOCK_M):
        slot = i + tl.arange(0, BLOCK_M)
        ids = tl.load(expert_ids + slot, mask=slot < T, other=num_experts)
        lower += (ids < expert).to(tl.int32)
    start = tl.sum(lower, 0)
    place = start
    for i in range(0, T, BLOCK_M):
        slot = i + tl.arange(0, BLOCK_M)
        ids = tl.load(expert_ids + slot, mask=slot < T, other=num_experts)
        tl.device_assert((slot >= T) | ((ids >= 0) & (ids < num_experts)), "expert_ids: allowed: 0 <= id < num_experts")
        mine = ids == expert
        position = place + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + position, slot, mask=mine)
        tl.store(inverse + slot, position, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, place - start)


@triton.jit
def _is_inside(at, size):
    """Counts that are negative, or exceed the buffers, break the contract: nothing is read or written outside, and no
    loop is longer than the buffers."""
    return (at >= 0) & (at < size)


@triton.jit
def _fill_padding(out, size, value, start, stop, BLOCK_M: tl.constexpr):
    """From `start` to `stop`, of `size` values."""
    stop = tl.minimum(stop, size)
    for i in range(tl.maximum(start, 0), stop, BLOCK_M):
        at = i + tl.arange(0, BLOCK_M)
        tl.store(out + at, tl.full((BLOCK_M,), value, out.dtype.element_ty), mask=at < stop)


@triton.jit
def row_map_kernel(
    counts, NUM_ROWS, P, row_map, inverse, padded_counts, group_ends,
    num_local_experts: tl.constexpr, alignment: tl.constexpr, rank_rows: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per (rank, expert): the rows that one rank sent to one expert are contiguous in both orders.

    The last rank's program also pads the expert's group; the last expert's program pads the rank's slack in `inverse`.
    """
    rank, expert = tl.program_id(0) // num_local_experts, tl.program_id(0) % num_local_experts
    last_rank = rank >= RANKS - 1
    last_expert = expert == num_local_experts - 1
    r, e = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_E)[None, :]
    n = tl.load(counts + r * num_local_experts + e, mask=(r < RANKS) & (e < num_local_experts), other=0)
    tl.device_assert(n >= 0, "counts: allowed: at least 0")

    groups = tl.maximum(tl.cdiv(tl.sum(n, 0), alignment), 1) * alignment
    group = tl.arange(0, BLOCK_E)
    size = tl.sum(tl.where(group == expert, groups, 0), 0)
    end = tl.sum(tl.where(group <= expert, groups, 0), 0)
    if rank == 0:
        tl.store(padded_counts + expert, size)
        tl.store(group_ends + expert, end)

    count = tl.sum(tl.where((r == rank) & (e == expert), n, 0))
    source = tl.sum(tl.where((r == rank) & (e < expert), n, 0))
    target = end - size + tl.sum(tl.where((r < rank) & (e == expert), n, 0))
    if rank_rows:
        source += rank * rank_rows
        slack_end = tl.where(last_expert, (rank + 1) * rank_rows, 0)
    else:
        source += tl.sum(tl.where(r < rank, n, 0))
        slack_end = tl.where(last_expert & last_rank, NUM_ROWS, 0)
    for i in range(0, tl.minimum(count, P), BLOCK_M):
        j = i + tl.arange(0, BLOCK_M)
        received = (j < count) & _is_inside(source + j, NUM_ROWS)
        padded = (j < count) & _is_inside(target + j, P)
        tl.store(row_map + target + j, tl.where(received, source + j, -1), mask=padded)
        tl.store(inverse + source + j, target + j, mask=received)
    padding_end = tl.where(last_rank, tl.where(last_expert, P, end), 0)
    _fill_padding(row_map, P, -1, target + count, padding_end, BLOCK_M)
    _fill_padding(inverse, NUM_ROWS, -1, source + count, slack_end, BLOCK_M)


@triton.jit
def slot_map_kernel(
    counts, order, weights, S, P, slots, tokens, inverse, padded_counts, group_ends, row_weights,
    top_k: tl.constexpr, alignment: tl.constexpr,
    EXPERTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program per expert. The last one's also pads the rest of the buffer."""
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    n = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tl.device_assert(n >= 0, "counts: allowed: at least 0")
    groups = tl.maximum(tl.cdiv(n, alignment), 1) * alignment
    size = tl.sum(tl.where(e == expert, groups, 0), 0)
    end = tl.sum(tl.where(e <= expert, groups, 0), 0)
    tl.store(padded_counts + expert, size)
    tl.store(group_ends + expert, end)

    count = tl.sum(tl.where(e == expert, n, 0), 0)
    source = tl.sum(tl.where(e < expert, n, 0), 0)
    target = end - size
    for i in range(0, tl.minimum(count, P), BLOCK_M):
        j = i + tl.arange(0, BLOCK_M)
        slot = tl.load(order + source + j, mask=(j < count) & _is_inside(source + j, S), other=-1)
        padded, exists = (j < count) & _is_inside(target + j, P), _is_inside(slot, S)
        tl.store(slots + target + j, slot, mask=padded)
        tl.store(tokens + target + j, tl.where(slot < 0, -1, slot // top_k), mask=padded)
        tl.store(inverse + slot, target + j, mask=exists)
        if WEIGHTED:
            tl.store(row_weights + target + j, tl.load(weights + slot, mask=exists, other=0.0), mask=padded)
    padding_end = tl.where(expert == EXPERTS - 1, P, end)
    _fill_padding(slots, P, -1, target + count, padding_end, BLOCK_M)
    _fill_padding(tokens, P, -1, target + count, padding_end, BLOCK_M)
    if WEIGHTED:
        _fill_padding(row_weights, P, 0.0, target + count, padding_end, BLOCK_M)
