"""Random inputs of every C++ op, with shapes near edges and any bytes as values; and inputs that are slightly wrong.

DRAWS[op](rng) -> arrays, options     valid values; the plan may refuse a shape, as any call
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mxep.core_kernels.cases import BF16, F32, Array, Rng, floats
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.router.plan import GROUP_SCORES, SCORES
from mxep.core_kernels.routing.oracle import sort_by_expert
from mxep.core_kernels.scale_layout.plan import _blocked_shape

Drawn = tuple[list[Array], dict[str, Any]]

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257)
ROW_BLOCKS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17)
BLOCKS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18)
WIDTHS = (0, 1, 15, 16, 17, 31, 32, 33, 72, 255, 256, 257, 511, 512, 513, 544)
EXPERTS = (1, 2, 3, 8, 9, 40, 255, 256, 257, 511, 512)
CODES = np.array([0, 1, 7, 8, 0x77, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF], np.uint8)
"""Bytes at the edges of E4M3 and E8M0: zeros, subnormal and largest numbers, NaN."""
PATTERNS = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x43E0, 0x7F7F, 0x7F80, 0x7FC0, 0x8000, 0xFF80, 0xFFFF], np.uint16)
"""bf16, and upper halves of fp32: zeros, subnormal numbers, 1, 448, the largest, infinity, NaN."""


def any_of(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def flip(rng: Rng) -> bool:
    return bool(rng.random() < 0.5)


def codes(rng: Rng, *shape: int) -> Array:
    return any_of(rng, [rng.integers(0, 256, shape, np.uint8), CODES[rng.integers(0, len(CODES), shape)]])


def numbers(rng: Rng, *shape: int, dtype: Any = None) -> Array:
    """Any bits, patterns at edges, or normal values with a few of these."""
    dtype = dtype or any_of(rng, (BF16, F32))
    unsigned = np.dtype(f"u{dtype.itemsize}")
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(0, 2 ** (8 * dtype.itemsize), shape, unsigned).view(dtype)
    if kind == 1:
        patterns = PATTERNS[rng.integers(0, len(PATTERNS), shape)].astype(unsigned)
        return (patterns << unsigned.type(8 * dtype.itemsize - 16)).view(dtype)
    return floats(rng, *shape, dtype=dtype)


def ends(rng: Rng, m: int, multiple: int = 1) -> Array:
    groups = any_of(rng, (1, 2, 3, 5, 40))
    return (np.sort(rng.integers(0, m // multiple + 1, groups)) * multiple).astype(np.int32)


def optional(rng: Rng, m: int) -> list[Array]:
    return any_of(rng, ([], [np.zeros(0, np.int32)], [ends(rng, m)]))


def row_map(rng: Rng, rows: int, entries: int) -> Array:
    return rng.integers(-1, rows, entries).astype(np.int32)


def scale_options(rng: Rng) -> dict[str, Any]:
    return {"rounding": any_of(rng, tuple(Rounding)), "satfinite": flip(rng)}


def blocks(rng: Rng, of: Sequence[int] = BLOCKS) -> int:
    return 32 * any_of(rng, of)


def mx(rng: Rng, m: int, k: int, *leading: int) -> list[Array]:
    return [codes(rng, *leading, m, k), codes(rng, *leading, m, k // 32)]


def packed_and_map(rng: Rng, entries: int) -> list[Array]:
    rows = any_of(rng, ROWS)
    return [codes(rng, rows, 33 * any_of(rng, BLOCKS)), row_map(rng, rows, entries)]


# --- ops ------------------------------------------------------------------------------------------------


def of_values(rows: Sequence[int], columns: int, leading: bool = True) -> Callable[[Rng], Drawn]:
    """x with a number of rows of `rows`, whose width is a multiple of `columns`."""

    def draw(rng: Rng) -> Drawn:
        width = blocks(rng) if columns == 32 else any_of(rng, WIDTHS)
        shape = (*any_of(rng, ((), (), (2,), (0,)) if leading else ((),)), any_of(rng, rows), width)
        return [numbers(rng, *shape)], scale_options(rng)

    return draw


def of_rows(rng: Rng) -> Drawn:
    m = any_of(rng, ROWS)
    return [numbers(rng, m, blocks(rng)), *optional(rng, m)], scale_options(rng)


def of_rows_fold(rng: Rng) -> Drawn:
    arrays, options = of_rows(rng)
    return arrays, {**options, "headroom": int(rng.integers(4))}


def blockwise(rng: Rng) -> Drawn:
    m = any_of(rng, ROWS)
    return [numbers(rng, m, any_of(rng, (0, 1, 2, 3)) * 128), *optional(rng, m)], {"power_of_two": flip(rng)}


def squares(rng: Rng) -> Drawn:
    shape = (*any_of(rng, ((), (3,))), 128 * any_of(rng, (0, 1, 2)), 128 * any_of(rng, (0, 1, 2)))
    return [numbers(rng, *shape)], {"power_of_two": flip(rng)}


def dequantize(rng: Rng) -> Drawn:
    leading = any_of(rng, ((), (2,)))
    return mx(rng, any_of(rng, ROWS), blocks(rng), *leading), {"out_dtype": any_of(rng, ("bfloat16", "float32"))}


def permute_rows(rng: Rng) -> Drawn:
    rows, width = any_of(rng, ROWS), any_of(rng, WIDTHS)
    x = codes(rng, rows, width) if flip(rng) else numbers(rng, rows, width)
    return [x, row_map(rng, rows, any_of(rng, ROWS))], {}


def permute_mx(rng: Rng) -> Drawn:
    return packed_and_map(rng, any_of(rng, ROWS)), {}


def permute_mx_fold(rng: Rng) -> Drawn:
    entries = any_of(rng, ROWS)
    return packed_and_map(rng, entries) + optional(rng, entries), {}


def permute_mx_col_fold(rng: Rng) -> Drawn:
    entries = blocks(rng, ROW_BLOCKS)
    return [*packed_and_map(rng, entries), ends(rng, entries, 32)], scale_options(rng)


def fold_rows(rng: Rng) -> Drawn:
    m = any_of(rng, ROWS)
    return mx(rng, m, blocks(rng)) + optional(rng, m), {"headroom": int(rng.integers(4))}


def fold_groups(rng: Rng) -> Drawn:
    m = blocks(rng, ROW_BLOCKS)
    return [*mx(rng, any_of(rng, WIDTHS), m), ends(rng, m, 32)], {}


def both_fold(rng: Rng) -> Drawn:
    m = blocks(rng, ROW_BLOCKS)
    return [numbers(rng, m, blocks(rng)), ends(rng, m, 32)], scale_options(rng)


def requantize_col_fold(rng: Rng) -> Drawn:
    m = blocks(rng, ROW_BLOCKS)
    return [*mx(rng, m, blocks(rng)), ends(rng, m, 32)], scale_options(rng)


def scores(rng: Rng) -> dict[str, Any]:
    score_func = any_of(rng, SCORES)
    normalize = score_func == SCORES[2] or flip(rng)
    return {"score_func": score_func, "normalize": normalize, "route_scale": any_of(rng, (1.0, -2.5, 2.0**-126, 1e38))}


def route(rng: Rng) -> Drawn:
    experts = any_of(rng, EXPERTS)
    groups = any_of(rng, [n for n in range(1, experts + 1) if experts % n == 0])
    chosen = int(rng.integers(1, groups + 1))
    top_k = int(rng.integers(1, min(32, experts // groups * chosen) + 1))
    of_groups = {"num_groups": groups, "top_k_groups": chosen, "group_score": any_of(rng, GROUP_SCORES)}
    options = {"top_k": top_k, **scores(rng), **of_groups, "force_balance": groups == 1 and flip(rng)}
    bias = numbers(rng, experts if flip(rng) else 0, dtype=F32)
    return [numbers(rng, any_of(rng, ROWS[:12]), experts), bias], options


def route_bwd(rng: Rng) -> Drawn:
    tokens, experts = any_of(rng, ROWS[:12]), any_of(rng, EXPERTS)
    top_k = int(rng.integers(1, min(experts, 32) + 1))
    ids = rng.random((tokens, experts)).argsort()[:, :top_k].astype(np.int32)
    logits = numbers(rng, tokens, experts)
    dshares = numbers(rng, experts if flip(rng) else 0, dtype=F32)
    options = {**scores(rng), "split": logits.dtype == F32 and flip(rng)}
    return [numbers(rng, tokens, top_k, dtype=F32), dshares, logits, ids], options


def sort_ids(rng: Rng) -> Drawn:
    experts = any_of(rng, EXPERTS)
    return [rng.integers(0, experts, any_of(rng, ROWS)).astype(np.int32)], {"num_experts": experts}


def map_rows(rng: Rng) -> Drawn:
    experts, ranks = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    counts = rng.integers(0, any_of(rng, (1, 5, 70)), (ranks, experts)).astype(np.int32)
    rank_rows = int(counts.sum(1).max()) + any_of(rng, (0, 1, 40)) if flip(rng) else 0
    num_rows = rank_rows * ranks or int(counts.sum()) + any_of(rng, (0, 1, 40))
    alignment = 32 * int(rng.integers(1, 5))
    options = {"num_rows": num_rows, "num_local_experts": experts, "alignment": alignment, "rank_rows": rank_rows}
    return [counts.reshape(-1)], options


def map_slots(rng: Rng) -> Drawn:
    experts, top_k = any_of(rng, EXPERTS), int(rng.integers(1, 9))
    order, _, counts = sort_by_expert(rng.integers(0, experts, any_of(rng, ROWS) * top_k).astype(np.int32), experts)
    weights = numbers(rng, len(order) if flip(rng) else 0, dtype=F32)
    return [counts, order, weights], {"top_k": top_k, "alignment": 32 * int(rng.integers(1, 5))}


def block_scales(rng: Rng) -> Drawn:
    m = any_of(rng, ROWS)
    return [codes(rng, m, any_of(rng, WIDTHS[:9])), ends(rng, m)], {}


def unblock_scales(rng: Rng) -> Drawn:
    m, scales = any_of(rng, ROWS), any_of(rng, WIDTHS[:9])
    group_ends = ends(rng, m)
    blocked = codes(rng, *_blocked_shape(m, scales, len(group_ends)))
    return [blocked, group_ends], {"num_rows": m, "num_scales": scales}


def slots_of(rng: Rng, d: int) -> list[Array]:
    """dy, rows, slots, order, probs."""
    tokens, top_k = any_of(rng, ROWS), int(rng.integers(1, 6))
    filled = np.flatnonzero(rng.random(tokens * top_k) < any_of(rng, (0.0, 0.8, 1.0)))
    order = rng.permutation(np.concatenate([filled, np.full(any_of(rng, (0, 1, 40)), -1)])).astype(np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    probs = numbers(rng, tokens, top_k, dtype=F32) if flip(rng) else np.zeros(0, F32)
    return [numbers(rng, tokens, d), numbers(rng, len(order), d), slots.reshape(tokens, top_k), order, probs]


def combine(rng: Rng) -> Drawn:
    _, rows, slots, _, probs = slots_of(rng, any_of(rng, WIDTHS))
    return [rows, slots, probs], {"out_dtype": any_of(rng, ("bfloat16", "float32"))}


def combine_bwd(rng: Rng) -> Drawn:
    return slots_of(rng, any_of(rng, WIDTHS)), {}


def combine_bwd_row(rng: Rng) -> Drawn:
    return slots_of(rng, blocks(rng)), scale_options(rng)


def swiglu(arrays: int, *, rows: bool = False, columns: bool = False, given: str = "") -> Callable[[Rng], Drawn]:
    """arrays: gate and up, or dh too. rows, columns: whether results are quantized along them. given: "ends", "blocks"
    (ends that are multiples of 32) or "optional"."""

    def draw(rng: Rng) -> Drawn:
        m = blocks(rng, ROW_BLOCKS) if columns else any_of(rng, ROWS)
        f = blocks(rng) if rows or columns else any_of(rng, WIDTHS)
        inputs = [numbers(rng, m, f, dtype=BF16) for _ in range(arrays)]
        inputs.append(numbers(rng, m if flip(rng) else 0, dtype=F32))
        inputs += [ends(rng, m, 32)] if given == "blocks" else optional(rng, m) if given else []
        options = scale_options(rng) if rows or columns else {}
        if flip(rng):
            options["alpha"] = any_of(rng, (1.702, 64.0, 1 / 64))
            options["limit"] = any_of(rng, (0.0, 7.0, 2.0**-126))
            options["offset"] = any_of(rng, (1.0, -(2.0**127)))
        return inputs, options

    return draw


def swiglu_blockwise(arrays: int) -> Callable[[Rng], Drawn]:
    def draw(rng: Rng) -> Drawn:
        inputs, options = swiglu(arrays, given="optional")(rng)
        return inputs, {"power_of_two": flip(rng), **options}

    return draw


DRAWS: dict[str, Callable[[Rng], Drawn]] = {
    "quantize_row": of_values(ROWS, 32),
    "quantize_row_packed": of_values(ROWS, 32, leading=False),
    "quantize_col": of_values([32 * n for n in ROW_BLOCKS], 1),
    "quantize_both": of_values([32 * n for n in ROW_BLOCKS], 32),
    "dequantize": dequantize,
    "quantize_rowwise": of_rows,
    "quantize_blockwise": blockwise,
    "quantize_squares": squares,
    "quantize_squares_both": squares,
    "permute_rows": permute_rows,
    "permute_mx": permute_mx,
    "route": route,
    "route_bwd": route_bwd,
    "sort_by_expert": sort_ids,
    "row_map": map_rows,
    "slot_map": map_slots,
    "fold_rows": fold_rows,
    "quantize_row_fold": of_rows_fold,
    "fold_groups": fold_groups,
    "quantize_both_fold": both_fold,
    "quantize_blockwise_fold": lambda rng: (both_fold(rng)[0], {"power_of_two": flip(rng)}),
    "quantize_matrix_fold": of_values([32 * n for n in ROW_BLOCKS], 32),
    "quantize_matrix_fold_t": of_values([32 * n for n in ROW_BLOCKS], 32),
    "requantize_col_fold": requantize_col_fold,
    "permute_mx_fold": permute_mx_fold,
    "permute_mx_col_fold": permute_mx_col_fold,
    "block_scales": block_scales,
    "unblock_scales": unblock_scales,
    "combine": combine,
    "combine_bwd": combine_bwd,
    "combine_bwd_row": combine_bwd_row,
    "swiglu": swiglu(2, given="optional"),
    "swiglu_row": swiglu(2, rows=True),
    "swiglu_col": swiglu(2, columns=True),
    "swiglu_row_fold": swiglu(2, rows=True, given="optional"),
    "swiglu_blockwise": swiglu_blockwise(2),
    "swiglu_blockwise_bwd": swiglu_blockwise(3),
    "swiglu_bwd": swiglu(3, given="optional"),
    "swiglu_bwd_row": swiglu(3, rows=True),
    "swiglu_bwd_col": swiglu(3, columns=True),
    "swiglu_bwd_both": swiglu(3, rows=True, columns=True),
    "swiglu_bwd_all": swiglu(3, rows=True, columns=True),
    "swiglu_bwd_fold": swiglu(3, rows=True, columns=True, given="blocks"),
}
