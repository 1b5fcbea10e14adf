"""Triton kernels over the memory of peers; plan.py draws them.

table + r holds the address of rank r's memory, *_AT the first byte of an array in the memory of every rank. Offsets
have 64 bits. A kernel writes into the memory of peers with plain stores and reads with plain loads. What makes them
visible is the barrier between the kernels, which signals and waits with release and acquire of system scope: the end of
a kernel orders its stores before the signal, and the wait comes before the loads of the next kernel.

Scalars are not specialized: a launcher would compile for the values 1 and multiples of 16, some of them first in the
middle of a captured step.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX, dequantize_blocks, f32_to_bf16, to_f32

ROW_BITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _address(table, position, AT, nbytes):
    """The address of a row of `nbytes` bytes in the memory of its rank; without a position, of some row: mask it."""
    real = tl.maximum(position, 0)
    return tl.load(table + (real >> 32)) + AT + (real & ROW_BITS) * nbytes


@triton.jit
def _row_at(table, position, AT, nbytes, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to that row, at a multiple of ALIGNED bytes, which a cast of an address does not tell the compiler."""
    return tl.multiple_of(_address(table, position, AT, nbytes).to(tl.pointer_type(dtype)), ALIGNED)


@triton.jit
def _position(inverse, positions, t, k, K: tl.constexpr, REPLICAS: tl.constexpr):
    """The position of replica k of token t, or of row t."""
    row = t
    if REPLICAS:
        row = tl.load(inverse + t * K + k).to(tl.int64)
    return tl.load(positions + row)


@triton.jit(do_not_specialize=["rank", "COUNTS_AT"])
def share_counts_kernel(counts, table, rank, COUNTS_AT, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Program r writes this rank's counts into row `rank` of the table of rank r."""
    e = tl.arange(0, BLOCK_E)
    n = tl.load(counts + e, mask=e < E, other=0)
    row = tl.load(table + tl.program_id(0)) + COUNTS_AT + rank.to(tl.int64) * (E * 4)
    tl.store(row.to(counts.dtype) + e, n, mask=e < E)


@triton.jit(do_not_specialize=["rank", "ROWS", "CAPACITY"])
def lay_out_kernel(
    counts, rank, ROWS, CAPACITY, positions, group_ends, filled_ends, totals, overflow,
    E: tl.constexpr, L: tl.constexpr, RANKS: tl.constexpr, ALIGNMENT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program e places this rank's rows for expert e. counts: (RANKS, E). overflow: (RANKS, 2), the most rows beyond
    the capacity of a rank, and the rows of its groups then. WHOLE: the rows beyond are for a next round, as in
    core_kernels/policy/rounds.py, and no overflow."""
    expert = tl.program_id(0)
    owner, local = expert // L, expert % L
    i, e = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_E)
    filled, before = tl.zeros((BLOCK_L,), tl.int32), tl.zeros((BLOCK_L,), tl.int32)
    for s in range(RANKS):
        n = tl.maximum(tl.load(counts + s * E + owner * L + i, mask=i < L, other=0), 0)
        filled += n
        before += tl.where(s < rank, n, 0)
    groups = tl.maximum(tl.cdiv(filled, ALIGNMENT), 1) * ALIGNMENT
    start = tl.sum(tl.where(i < local, groups, 0), 0)
    end = start + tl.sum(tl.where(i == local, groups, 0), 0)
    limit = CAPACITY
    if WHOLE:
        ends = tl.cumsum(tl.where(i < L, groups, 0), 0)
        first = tl.min(tl.where((ends > CAPACITY) & (i < L), i, L), 0)
        size = tl.sum(tl.where(i == first, groups, 0), 0)
        starts = tl.sum(tl.where(i < first, groups, 0), 0)
        limit = tl.where((first < L) & (first * ALIGNMENT + size <= CAPACITY), starts, CAPACITY)
    total = tl.sum(tl.where(i == local, filled, 0), 0)
    target = start + tl.sum(tl.where(i == local, before, 0), 0)
    tl.store(totals + expert, total)
    if owner == rank:
        tl.store(group_ends + local, tl.minimum(end, limit))
        tl.store(filled_ends + local, tl.minimum(start + total, limit))
    if not WHOLE and local == L - 1:
        beyond = end - CAPACITY
        worst = beyond > tl.maximum(tl.load(overflow + owner * 2), 0)
        tl.store(overflow + owner * 2, beyond, mask=worst)
        tl.store(overflow + owner * 2 + 1, end, mask=worst)

    mine = tl.maximum(tl.load(counts + rank * E + e, mask=e < E, other=0), 0)
    source = tl.sum(tl.where(e < expert, mine, 0), 0)
    count = tl.sum(tl.where(e == expert, mine, 0), 0)
    high = owner.to(tl.int64) << 32
    for m in range(0, count, BLOCK_M):
        j = m + tl.arange(0, BLOCK_M)
        row = target + j
        fits = (row >= 0) & (row < limit)
        position = tl.where(fits, high | row.to(tl.int64), -1)
        tl.store(positions + source + j, position, mask=(j < count) & (source + j < ROWS))
    # Rows beyond the counts have no position.
    rest = tl.where(expert == E - 1, ROWS, 0)
    for m in range(source + count, rest, BLOCK_M):
        j = m + tl.arange(0, BLOCK_M)
        tl.store(positions + j, tl.full((BLOCK_M,), -1, tl.int64), mask=j < rest)


@triton.jit
def _write(
    x, t, inverse, positions, table, AT,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr, K: tl.constexpr, REPLICAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Row t of x, WIDTH words of SIZE bytes, to the K positions of token t."""
    for w0 in range(0, WIDTH, BLOCK):
        w = w0 + tl.arange(0, BLOCK)
        words = tl.load(x + t * WIDTH + w, mask=w < WIDTH, other=0)
        for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            position = _position(inverse, positions, t, k, K, REPLICAS)
            row = _row_at(table, position, AT, WIDTH * SIZE, x.dtype.element_ty, ALIGNED)
            tl.store(row + w, words, mask=(w < WIDTH) & (position >= 0))


@triton.jit
def _write_weights(weights, t, inverse, positions, table, AT, K: tl.constexpr, REPLICAS: tl.constexpr):
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        position = _position(inverse, positions, t, k, K, REPLICAS)
        row = _row_at(table, position, AT, 4, tl.float32, 4)
        tl.store(row, tl.load(weights + t * K + k), mask=position >= 0)


@triton.jit(do_not_specialize=["TOKENS", "VALUES_AT", "SCALES_AT", "WEIGHTS_AT"])
def push_kernel(
    values, scales, weights, inverse, positions, table, TOKENS, VALUES_AT, SCALES_AT, WEIGHTS_AT,
    VALUES: tl.constexpr, SCALES: tl.constexpr, SCALE_SIZE: tl.constexpr, K: tl.constexpr, REPLICAS: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program p takes tokens p, p + programs, ...; a token is read once and written to each of its K positions. values,
    scales: rows of VALUES words of 8 bytes and of SCALES words of SCALE_SIZE; weights: (T, K) fp32."""
    for token in range(tl.program_id(0), TOKENS, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        _write(values, t, inverse, positions, table, VALUES_AT, VALUES, 8, 16, K, REPLICAS, BLOCK_V)
        _write(scales, t, inverse, positions, table, SCALES_AT, SCALES, SCALE_SIZE, SCALE_SIZE, K, REPLICAS, BLOCK_S)
        if WEIGHTED:
            _write_weights(weights, t, inverse, positions, table, WEIGHTS_AT, K, REPLICAS)


@triton.jit
def _clear(out, row, empty, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr):
    for w0 in range(0, WIDTH, BLOCK_W):
        w = w0 + tl.arange(0, BLOCK_W)
        zeros = tl.zeros((row.shape[0], BLOCK_W), out.dtype.element_ty)
        tl.store(out + row[:, None] * WIDTH + w[None, :], zeros, mask=empty[:, None] & (w < WIDTH)[None, :])


@triton.jit
def clear_kernel(
    group_ends, filled_ends, values, scales, weights,
    VALUES: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows of this rank's operand that no rank fills. A program has BLOCK_M rows: of one group, whose end
    is a multiple of BLOCK_M, or past the last one."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    g = tl.arange(0, BLOCK_G)
    ends = tl.load(group_ends + g, mask=g < GROUPS, other=ROW_BITS)
    group = tl.sum((ends <= first).to(tl.int32), 0)
    filled = tl.load(filled_ends + group, mask=group < GROUPS, other=0)
    row = first + tl.arange(0, BLOCK_M)
    empty = row >= filled
    if tl.max(empty.to(tl.int32), 0) > 0:
        _clear(values, row, empty, VALUES, BLOCK_V)
        _clear(scales, row, empty, SCALES, BLOCK_S)
        if WEIGHTED:
            tl.store(weights + row, tl.zeros((BLOCK_M,), tl.float32), mask=empty)


@triton.jit
def _row(
    table, position, d0, ROWS_AT, SCALES_AT,
    D: tl.constexpr, MX: tl.constexpr, WIDE: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D values of the row at a position, from d0 on, in fp32; zeros without a position."""
    d = d0 + tl.arange(0, BLOCK_D)
    inside = (d < D) & (position >= 0)
    if MX:
        S: tl.constexpr = BLOCK_D // BLOCK_MX
        q = _row_at(table, position, ROWS_AT, D, tl.uint8, 16)
        sf = _row_at(table, position, SCALES_AT, D // BLOCK_MX, tl.uint8, 1)
        block = d0 // BLOCK_MX + tl.arange(0, S)
        codes = tl.load(q + d, mask=inside, other=0)
        scales = tl.load(sf + block, mask=(block < D // BLOCK_MX) & (position >= 0), other=0)
        x = tl.reshape(dequantize_blocks(tl.reshape(codes, (S, BLOCK_MX)), scales, HW_CAST), (S * BLOCK_MX,))
        return x if WIDE else to_f32(f32_to_bf16(x, HW_CAST))
    elif WIDE:
        row = _row_at(table, position, ROWS_AT, D * 4, tl.float32, 16)
        return tl.load(row + d, mask=inside, other=0.0)
    else:
        row = _row_at(table, position, ROWS_AT, D * 2, tl.bfloat16, 16)
        return to_f32(tl.load(row + d, mask=inside, other=0.0))


@triton.jit(do_not_specialize=["TOKENS", "ROWS_AT", "SCALES_AT"])
def pull_kernel(
    inverse, positions, table, TOKENS, ROWS_AT, SCALES_AT, y,
    D: tl.constexpr, K: tl.constexpr, REPLICAS: tl.constexpr, MX: tl.constexpr, WIDE: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """SLOTS: rows are in the slots [t][k] of the first memory of the table, and positions say whether they were sent.

    Program p takes tokens p, p + programs, ... y[t]: the sum of the token's replicas in fp32 from +0 with ascending
    k, rounded once, as `combine` computes it; of rows without replicas the row. A row without a position makes it NaN
    (NAN), or is zero."""
    for token in range(tl.program_id(0), TOKENS, tl.num_programs(0)):
        t = tl.cast(token, tl.int64)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            acc = tl.zeros((BLOCK_D,), tl.float32)
            least = tl.full((), 0, tl.int64)
            for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
                position = _position(inverse, positions, t, k, K, REPLICAS)
                least = tl.minimum(least, position)
                if SLOTS:
                    position = tl.where(position < 0, position, t * K + k)
                x = _row(table, position, d0, ROWS_AT, SCALES_AT, D, MX, WIDE, HW_CAST, BLOCK_D)
                # 0 + -0 is +0: a row that is no sum is copied.
                acc = acc + x if REPLICAS else x
            if NAN:
                acc = tl.where(least < 0, float("nan"), acc)
            out = y + t * D + d
            if y.dtype.element_ty == tl.float32:
                tl.store(out, acc, mask=d < D)
            elif REPLICAS:
                tl.store(out, f32_to_bf16(acc, HW_CAST), mask=d < D)
            else:
                bits = (acc.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
                tl.store(out, bits.to(tl.bfloat16, bitcast=True), mask=d < D)


@triton.jit(do_not_specialize=["NUMBERS", "WEIGHTS_AT"])
def pull_weights_kernel(
    inverse, positions, table, NUMBERS, WEIGHTS_AT, out, BLOCK_M: tl.constexpr, SLOTS: tl.constexpr, NAN: tl.constexpr
):  # fmt: skip
    """out[s] = the fp32 number of slot s in the memory of its rank; without a position NaN or zero. SLOTS, NAN: as in
    pull."""
    s = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.load(inverse + s, mask=s < NUMBERS, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=s < NUMBERS, other=-1)
    if SLOTS:
        position = tl.where(position < 0, position, s)
    at = _address(table, position, WEIGHTS_AT, 4).to(out.dtype)
    value = tl.load(at, mask=position >= 0, other=float("nan") if NAN else 0.0)
    tl.store(out + s, value, mask=s < NUMBERS)
