"""The kernels over memory of peers against their oracle, byte for byte, in Triton's interpreter: plain tensors are the
memory of the ranks."""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from mxep.core_kernels.peer import kernel, oracle, plan
from mxep.core_kernels.policy import rounds
from mxep.core_kernels.quantize.oracle import dequantize, quantize_row

RANKS, LOCAL, TOP_K = 3, 2, 2
EXPERTS = RANKS * LOCAL
COUNTS = {
    "random": lambda rng: rng.integers(0, 40, (RANKS, EXPERTS), np.int32),
    "empty experts": lambda rng: rng.integers(0, 40, (RANKS, EXPERTS), np.int32) * (np.arange(EXPERTS) % 2),
    "empty rank": lambda rng: rng.integers(0, 40, (RANKS, EXPERTS), np.int32) * np.array([[1], [0], [1]]),
    "one expert": lambda rng: np.array([[0, 0, 0, 0, 0, n] for n in (33, 64, 1)], np.int32),
    "nothing": lambda rng: np.zeros((RANKS, EXPERTS), np.int32),
}


def launch(name: str, programs: int, *args, **constexprs) -> None:
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        getattr(kernel, f"{name}_kernel")[(programs,)](*args, **constexprs)


def addresses(memory: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([m.data_ptr() for m in memory])


def laid_out(counts: np.ndarray, rank: int, rows: int, capacity: int, whole: bool = False) -> list[np.ndarray]:
    places = torch.full((rows,), -7, dtype=torch.int64)
    ends, filled, totals = (torch.full((n,), -7, dtype=torch.int32) for n in (LOCAL, LOCAL, EXPERTS))
    worst = torch.zeros((RANKS, 2), dtype=torch.int32)
    args = torch.from_numpy(counts.astype(np.int32)), rank, rows, capacity, places, ends, filled, totals, worst
    launch("lay_out", EXPERTS, *args, **plan.lay_out(EXPERTS, RANKS, 32, whole) | {"BLOCK_M": 16})
    return [t.numpy() for t in (places, ends, filled, totals, worst)]


@pytest.mark.parametrize("name", COUNTS)
def test_layout(name):
    """Of every rank, with capacity for all rows and for some."""
    counts = COUNTS[name](np.random.default_rng(0)).astype(np.int32)
    for rank in range(RANKS):
        rows = int(counts[rank].sum())
        for capacity in (plan.capacity_of(int(counts.sum()), LOCAL, 32), 64):
            *got, worst = laid_out(counts, rank, rows, capacity)
            *want, needed = oracle.lay_out(counts, rank, rows, capacity)
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one, other)
            beyond = np.maximum(needed - capacity, 0)
            np.testing.assert_array_equal(worst, np.stack([beyond, np.where(beyond > 0, needed, 0)], 1))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("capacity", [64, 96, 128, 192, 4096])
def test_rounds(name, capacity):
    """Each round has the layout of its oracle, and its rows are those that the next round has not."""
    counts = COUNTS[name](np.random.default_rng(0)).astype(np.int32)
    found, seen = rounds.list_rounds(counts, capacity, 32), np.zeros_like(counts)
    split = np.zeros(EXPERTS, bool)
    for one, after in zip(found, [*found[1:], None], strict=True):
        rest = 0 if after is None else after.counts
        for rank in range(RANKS):
            rows = int(one.counts[rank].sum())
            *got, worst = laid_out(one.counts, rank, rows, capacity, whole=True)
            *want, needed = oracle.lay_out(one.counts, rank, rows, capacity, whole=True)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b)
            assert not worst.any()
            assert (needed <= capacity).all() == (after is None)
            of_rows = np.repeat(np.arange(EXPERTS), one.counts[rank])
            served = np.bincount(of_rows[want[0] >= 0], minlength=EXPERTS)
            np.testing.assert_array_equal(served, (one.counts - rest)[rank])
            starts = np.concatenate([[0], want[1][:-1]])
            assert (starts < want[1]).sum() == one.begun[rank]
            seen[rank] += served
        split |= ((one.counts - rest).any(0)) & (np.broadcast_to(rest, counts.shape).any(0))
    np.testing.assert_array_equal(seen, counts)
    sizes = -(-counts.sum(0) // 32) * 32
    assert (sizes[split] + np.arange(EXPERTS)[split] % LOCAL * 32 > capacity).all()
    assert len(found) == 1 or capacity < 4096


def test_rows_that_the_counts_leave_out_have_no_place():
    counts = np.ones((RANKS, EXPERTS), np.int32)
    assert laid_out(counts, 1, EXPERTS + 50, 1024)[0][EXPERTS:].tolist() == [-1] * 50
    assert (laid_out(counts, 1, 3, 1024)[0] >= 0).all()
    assert laid_out(-counts, 1, 3, 1024)[0].tolist() == [-1] * 3


def routed(rng: np.random.Generator, tokens: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """slots (T, TOP_K) and the places of their rows, some of which have none."""
    order = rng.permutation(tokens * TOP_K).astype(np.int32)
    rows = rng.permutation(RANKS * capacity)[: tokens * TOP_K].astype(np.int64)
    places = rows // capacity << 32 | rows % capacity
    places[rng.random(len(places)) < 0.1] = -1
    return order.reshape(tokens, TOP_K), places


@pytest.mark.parametrize(("k", "programs"), [(64, 3), (288, 50)])
def test_push_writes_each_row_to_its_places_and_nothing_else(k, programs):
    rng = np.random.default_rng(k)
    tokens, capacity = 7, 9
    slots, places = routed(rng, tokens, capacity)
    x = [rng.integers(0, 256, (tokens, width), np.uint8) for width in (k, k // 32)]
    weights = rng.random((tokens, TOP_K), np.float32)
    starts = 64, 64 + capacity * k, 64 + capacity * (k + k // 32) + 56
    memory = [torch.full((starts[2] + 4 * capacity + 64,), 255, dtype=torch.uint8) for _ in range(RANKS)]
    want = [m.numpy().copy() for m in memory]
    for rows, start in zip(x, starts, strict=False):
        width = rows.shape[1]
        oracle.push([m[start : start + capacity * width].reshape(capacity, width) for m in want], rows, slots, places)
    for (t, j), row in np.ndenumerate(slots):
        if places[row] >= 0:
            at = starts[2] + 4 * (places[row] & 0xFFFFFFFF)
            want[places[row] >> 32][at : at + 4] = weights[t : t + 1, j].view(np.uint8)
    word, per_row = plan.words_of(k // 32)
    dtype = getattr(torch, word)
    parts = torch.from_numpy(x[0]).view(torch.int64), torch.from_numpy(x[1]).view(dtype), torch.from_numpy(weights)
    maps = torch.from_numpy(slots.reshape(-1)), torch.from_numpy(places), addresses(memory)
    blocks = plan.push(k // 8, per_row, dtype.itemsize, TOP_K, True, True)
    launch("push", programs, *parts, *maps, tokens, *starts, **blocks | {"BLOCK_V": 16})
    for got, expected in zip(memory, want, strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["bf16", "mx", "f32", "mx of f32"])
@pytest.mark.parametrize("drop", [False, True])
def test_pull_sums_as_combine_does(drop, kind, out):
    rng = np.random.default_rng(1)
    tokens, capacity, width = 7, 9, 96
    slots, places = routed(rng, tokens, capacity)
    values = rng.standard_normal((RANKS, capacity, width)).astype(np.float32)
    values[0, 0, :40], values[1, 1] = -0.0, np.nan
    wide, mx = kind.endswith("f32"), kind.startswith("mx")
    rows = list(values if wide else values.astype(ml_dtypes.bfloat16))
    memory = [r.view(np.uint8).reshape(-1) for r in rows]
    if mx:
        codes = [quantize_row(r) for r in rows]
        memory = [np.concatenate([c.reshape(-1), sf.reshape(-1)]) for c, sf in codes]
        rows = [dequantize(*pair, "float32" if wide else "bfloat16") for pair in codes]
    of_rank = [torch.from_numpy(np.concatenate([np.zeros(64, np.uint8), m])) for m in memory]
    maps = torch.from_numpy(slots.reshape(-1)), torch.from_numpy(places), addresses(of_rank)
    y = torch.full((tokens, width), 7, dtype=getattr(torch, out))
    starts = 64, 64 + capacity * width
    blocks = plan.pull(width, TOP_K, True, mx, wide, False, drop=drop)
    launch("pull", 3, *maps, tokens, *starts, y, **blocks | {"BLOCK_D": 32})
    want = oracle.pull(rows, slots, places, out, drop)
    np.testing.assert_array_equal(y.float().numpy(), want.astype(np.float32))
    assert (np.signbit(y.float().numpy()) == np.signbit(want.astype(np.float32)))[~np.isnan(want)].all()
    column = torch.full((tokens, TOP_K), 7.0)
    launch(
        "pull_weights",
        2,
        *maps,
        tokens * TOP_K,
        64,
        column,
        **plan.pull_weights(drop=drop) | {"BLOCK_M": 8},
    )
    lost = 0 if drop else np.nan
    flat = [m[64 : 64 + 4 * capacity].numpy().view(np.float32) for m in of_rank]
    found = [flat[p >> 32][p & 0xFFFFFFFF] if p >= 0 else lost for p in places[slots].reshape(-1)]
    np.testing.assert_array_equal(column.numpy().reshape(-1), np.array(found, np.float32))


def test_pull_of_slots_reads_the_own_memory_and_where_rows_were_not_sent_nan():
    """Slots are in the order of tokens; a token with a row of no place is NaN."""
    rng = np.random.default_rng(2)
    tokens, width = 7, 96
    order, places = routed(rng, tokens, 9)
    rows = rng.standard_normal((tokens * TOP_K, width)).astype(ml_dtypes.bfloat16)
    numbers = rng.standard_normal(tokens * TOP_K).astype(np.float32)
    memory = np.concatenate([rows.view(np.uint8).reshape(-1), numbers.view(np.uint8)])
    maps = torch.from_numpy(order.reshape(-1)), torch.from_numpy(places), addresses([torch.from_numpy(memory)])
    sent = places[order] >= 0
    y = torch.full((tokens, width), 7, dtype=torch.bfloat16)
    launch("pull", 3, *maps, tokens, 0, 0, y, **plan.pull(width, TOP_K, True, False, False, False, True))
    own = np.where(sent, np.arange(tokens * TOP_K).reshape(tokens, TOP_K), -1)
    want = oracle.pull([rows], np.arange(tokens * TOP_K).reshape(tokens, TOP_K), own.reshape(-1), "bfloat16")
    np.testing.assert_array_equal(y.float().numpy(), want.astype(np.float32))
    column = torch.full((tokens, TOP_K), 7.0)
    launch("pull_weights", 2, *maps, tokens * TOP_K, rows.nbytes, column, **plan.pull_weights(True) | {"BLOCK_M": 8})
    np.testing.assert_array_equal(column.numpy(), np.where(sent, numbers.reshape(tokens, TOP_K), np.float32(np.nan)))


def test_a_row_is_copied_where_a_sum_would_change_it():
    """-0, a NaN's bits."""
    bits = torch.tensor([[-32768, 0x7FC1, 0x7F80, 1] * 8] * 2, dtype=torch.int16)
    y = torch.zeros((2, 32), dtype=torch.bfloat16)
    places = torch.tensor([1, 0])
    blocks = plan.pull(32, 1, False, False, False, False)
    launch("pull", 1, places, places, addresses([bits]), 2, 0, 0, y, **blocks)
    assert torch.equal(y.view(torch.int16), bits)


def test_clear_writes_zeros_where_no_row_arrives():
    ends, filled = torch.tensor([32, 96, 128], dtype=torch.int32), torch.tensor([32, 65, 96], dtype=torch.int32)
    empty = torch.zeros(160, dtype=torch.bool)
    empty[65:] = True
    parts = [torch.full((160, 5), 9), torch.full((160, 3), 9, dtype=torch.uint8), torch.full((160,), 9.0)]
    launch("clear", 5, ends, filled, *parts, **plan.clear(5, 3, 3, True))
    for part in parts:
        zero = (part == 0).view(160, -1)
        assert torch.equal(zero.all(1), empty)
        assert torch.equal(zero.any(1), empty)


def test_past_2_31_bytes():
    """Rows whose first byte has an index above 2^31; the other rows are not accessed."""
    row, words = (1 << 20) + 1, 256
    memory = torch.zeros((row + 1) * words, dtype=torch.int64)
    place = torch.tensor([row])
    x = torch.arange(1, words + 1)[None]
    none, blocks = torch.zeros(0), plan.push(words, 0, 1, 1, False, False)
    launch("push", 1, x, none, none, place, place, addresses([memory]), 1, 0, 0, 0, **blocks)
    assert torch.equal(memory[-words:], x[0])
    y = torch.zeros((1, 4 * words), dtype=torch.bfloat16)
    blocks = plan.pull(4 * words, 1, False, False, False, False)
    launch("pull", 1, place, place, addresses([memory]), 1, 0, 0, y, **blocks)
    assert torch.equal(y.view(torch.int64), x)
