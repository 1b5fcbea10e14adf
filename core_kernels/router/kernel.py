"""Triton kernels of the choice of experts and of its gradient; plan.py draws the operands.

A program holds 8 tokens with all their experts in registers and reads the logits once. The two dims of groups and of
experts within a group are each padded to a power of two: the place of an expert is group * BLOCK_E + its index there.

A candidate is one int64: an integer that orders as its fp32 value does, and below it 1023 - place. The maximum is the
largest value, among equal ones the lowest expert.
"""

import triton
import triton.language as tl

from ..mx_math import F32_INF, e8m0_to_f32, exp_minus, f32_to_bf16, inverse_scale, sigmoid, to_f32

SIGMOID: tl.constexpr = tl.constexpr(1)
OF_CHOSEN: tl.constexpr = tl.constexpr(2)
"""Places in SCORES of plan.py; the softmax is 0."""
TOP2: tl.constexpr = tl.constexpr(0)
"""Place in GROUP_SCORES."""
UNITS: tl.constexpr = tl.constexpr(2.0**40)
TINY: tl.constexpr = tl.constexpr(2.0**-126)
NONE: tl.constexpr = tl.constexpr(-(2**62))
"""A candidate below all others: no expert, or one that is chosen already."""


@triton.jit
def row_sum(x):
    """(M, N) -> (M, 1): the sum in units of 2^-40 of the largest value's power of two, exact in any order, then rounded
    once. NaN for a row with NaN or infinity."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]
    finite = largest < F32_INF
    byte = tl.where(finite, largest >> 23, 0)
    whole = (tl.where(finite, x, 0.0) * inverse_scale(byte) * UNITS).to(tl.int64)
    total = tl.sum(whole, 1)[:, None].to(tl.float32) * (1.0 / UNITS) * e8m0_to_f32(byte)
    return tl.where(finite, total, float("nan"))


@triton.jit
def at_least_tiny(x):
    return tl.where(x < TINY, TINY, x)


@triton.jit
def softmax(x, HW_CAST: tl.constexpr):
    """Along rows. The maximum passes over NaN; the sum does not."""
    d = tl.max(x, 1)[:, None] - x
    p = tl.where(d == d, exp_minus(d, HW_CAST), float("nan"))
    return tl.div_rn(p, row_sum(p))


@triton.jit
def scores_of(x, score_func: tl.constexpr, HW_CAST: tl.constexpr):
    if score_func == SIGMOID:
        return tl.where(x == x, sigmoid(x, HW_CAST), float("nan"))
    else:
        return softmax(x, HW_CAST)


@triton.jit
def number(bits: tl.constexpr):
    """fp32 of its bits."""
    return tl.full((), bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def candidates(value, place):
    """fp32 values and places -> int64 that order by value, then by place, descending; NaN is the largest."""
    value = tl.where(value == 0.0, 0.0, value)  # -0 equals 0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value == value, key, 0x7FFFFFFF)
    return key.to(tl.int64) * 1024 + (1023 - place)


@triton.jit
def value_of(candidate):
    key = (candidate >> 10).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def inside_top_groups(
    candidate, num_groups: tl.constexpr, top_k_groups: tl.constexpr, group_score: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The candidates of the best groups; NONE for the others."""
    grouped = tl.reshape(candidate, (BLOCK_M, BLOCK_G, BLOCK_E))
    best = tl.max(grouped, 2)
    score = value_of(best)
    if group_score == TOP2:
        score += value_of(tl.max(tl.where(grouped == best[:, :, None], NONE, grouped), 2))
    group = tl.arange(0, BLOCK_G)[None, :]
    left = tl.where(group < num_groups, candidates(score, group), NONE)
    for _ in range(top_k_groups):
        left = tl.where(left == tl.max(left, 1)[:, None], NONE, left)
    return tl.reshape(tl.where((left == NONE)[:, :, None], grouped, NONE), (BLOCK_M, BLOCK_G * BLOCK_E))


@triton.jit
def route_kernel(
    logits, bias, T, expert_ids, weights, share_sums,
    top_k: tl.constexpr, score_func: tl.constexpr, normalize: tl.constexpr, route_scale: tl.constexpr,
    num_groups: tl.constexpr, top_k_groups: tl.constexpr, group_score: tl.constexpr, force_balance: tl.constexpr,
    E: tl.constexpr, BIASED: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    size: tl.constexpr = E // num_groups
    place = tl.arange(0, BLOCK_G * BLOCK_E)[None, :]
    expert = place // BLOCK_E * size + place % BLOCK_E
    exists = (place // BLOCK_E < num_groups) & (place % BLOCK_E < size)
    x = to_f32(tl.load(logits + m * E + expert, mask=(m < T) & exists, other=0.0))
    x = tl.where(exists, x, float("-inf"))
    s = scores_of(x, score_func, HW_CAST)

    value = x if score_func == OF_CHOSEN else s
    choice = value
    if BIASED:
        choice = value + tl.load(bias + expert, mask=exists, other=0.0)
    if force_balance:
        first = ((m % E) * top_k % E).to(tl.int32)
        choice = -((expert + E - first) % E).to(tl.float32)
    left = tl.where(exists, candidates(choice, place), NONE)
    if num_groups > 1:
        left = inside_top_groups(left, num_groups, top_k_groups, group_score, BLOCK_M, BLOCK_G, BLOCK_E)
    k = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros((BLOCK_M, BLOCK_K), tl.int32)
    chosen = tl.full((BLOCK_M, BLOCK_K), float("-inf"), tl.float32)
    for i in range(top_k):
        best = tl.max(left, 1)[:, None]
        found = left == best
        left = tl.where(found, NONE, left)
        ids = tl.where(k == i, 1023 - (best & 1023).to(tl.int32), ids)
        chosen = tl.where(k == i, tl.sum(tl.where(found, value, 0.0), 1)[:, None], chosen)
    ids = ids // BLOCK_E * size + ids % BLOCK_E

    if score_func == OF_CHOSEN:
        w = softmax(chosen, HW_CAST)
    else:
        w = tl.where(k < top_k, chosen, 0.0)
        if normalize:
            w = tl.div_rn(w, at_least_tiny(row_sum(w)))
    w = w * number(route_scale)
    tl.store(expert_ids + m * top_k + k, ids, mask=(m < T) & (k < top_k))
    tl.store(weights + m * top_k + k, tl.where(w == w, w, float("nan")), mask=(m < T) & (k < top_k))

    share = s
    if score_func == SIGMOID:
        share = tl.div_rn(s, at_least_tiny(row_sum(s)))
    share = tl.where(m < T, share, 0.0)
    nan = tl.max((share != share).to(tl.int32), 0)
    whole = (tl.where(share == share, share, 0.0) * UNITS).to(tl.int64)
    total = tl.where(nan > 0, float("nan"), tl.sum(whole, 0).to(tl.float32) * (1.0 / UNITS))
    at = tl.program_id(0).to(tl.int64) * E + expert
    tl.store(share_sums + at, total[None, :], mask=exists)


@triton.jit
def route_bwd_kernel(
    dweights, dshares, logits, expert_ids, T, dlogits,
    score_func: tl.constexpr, normalize: tl.constexpr, route_scale: tl.constexpr, split: tl.constexpr,
    E: tl.constexpr, top_k: tl.constexpr, SHARED: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    exists = expert < E
    x = to_f32(tl.load(logits + m * E + expert, mask=(m < T) & exists, other=0.0))
    x = tl.where(exists, x, float("-inf"))
    s = scores_of(x, score_func, HW_CAST)

    d = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    chosen = tl.zeros((BLOCK_M, BLOCK_E), tl.int1)
    for i in range(top_k):
        found = tl.load(expert_ids + m * top_k + i, mask=m < T, other=-1) == expert
        d = tl.where(found, tl.load(dweights + m * top_k + i, mask=m < T, other=0.0) * number(route_scale), d)
        chosen = chosen | found
    if SHARED:
        of_shares = tl.load(dshares + expert, mask=exists, other=0.0)

    if score_func == OF_CHOSEN:
        w = softmax(tl.where(chosen, x, float("-inf")), HW_CAST)
        dx = w * (d - row_sum(w * d))
        if SHARED:
            dx += s * (of_shares - row_sum(s * of_shares))
    else:
        if normalize:
            total = row_sum(tl.where(chosen, s, 0.0))
            divisor = at_least_tiny(total)
            w = tl.div_rn(tl.where(chosen, s, 0.0), divisor)
            through = chosen & ((total >= TINY) | (total != total))
            d = tl.where(through, tl.div_rn(d - row_sum(w * d), divisor), 0.0)
        if score_func == SIGMOID:
            if SHARED:
                total = row_sum(s)
                divisor = at_least_tiny(total)
                mean = row_sum(tl.div_rn(s, divisor) * of_shares)
                d += tl.where(total < TINY, 0.0, tl.div_rn(of_shares - mean, divisor))
            dx = d * (s * (1.0 - s))
        else:
            if SHARED:
                d += of_shares
            dx = s * (d - row_sum(s * d))
    dx = tl.where(dx == dx, dx, float("nan"))
    width: tl.constexpr = 2 * E if split else E
    first = dx
    if dlogits.dtype.element_ty == tl.bfloat16:
        first = f32_to_bf16(dx, HW_CAST)
    tl.store(dlogits + m * width + expert, first, mask=(m < T) & exists)
    if split:
        high = to_f32(first)
        finite = (high.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < F32_INF
        low = f32_to_bf16(tl.where(finite, dx - high, 0.0), HW_CAST)
        tl.store(dlogits + m * width + E + expert, low, mask=(m < T) & exists)
