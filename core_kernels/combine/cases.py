"""Cases of the family `combine`."""

from dataclasses import dataclass

import numpy as np

from ..cases import BF16, F32, MODES, OUT_DTYPES, Array, Arrays, Case, Rng, finite, fixed, seeded, student_t, timed


def gradients(rng: Rng, m: int, width: int = 72) -> Arrays:
    """m tokens with two slots each. Some slots are empty, and some rows are padding."""
    num_rows = 2 * m + 5
    slots = rng.permutation(num_rows)[: 2 * m]
    slots[rng.random(2 * m, F32) < 0.2] = -1
    order = np.full(num_rows, -1)
    order[slots[slots >= 0]] = np.flatnonzero(slots >= 0)
    probs = rng.random((m, 2), F32)
    dy, rows = (finite(rng, n, 72)[:, :width] for n in (m, num_rows))
    return dy, rows, slots.reshape(m, 2).astype(np.int32), order.astype(np.int32), probs


def forward(rng: Rng, m: int) -> Arrays:
    _, rows, slots, _, probs = gradients(rng, m)
    return rows, slots, probs


def unweighted(arrays: Arrays) -> Arrays:
    return *arrays[:-1], np.zeros(0, F32)


CASES = {
    "combine": Case("combine", forward),
    "combine_unweighted_fp32": Case("combine", lambda *of: unweighted(forward(*of)), {"out_dtype": "float32"}),
    "combine_bwd": Case("combine_bwd", gradients),
    "combine_bwd_row": Case("combine_bwd_row", lambda rng, m: gradients(rng, m, 64)),
    "combine_bwd_unweighted": Case("combine_bwd", lambda *of: unweighted(gradients(*of))),
}
TIMED = (
    timed("combine", "M K top_k", direction="fwd"),
    timed("combine", "M K top_k", "combine_bwd", direction="bwd"),
    timed("combine", "M K top_k", "combine_bwd_row", direction="bwd", to="row"),
)


# --- fixed values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Combine:
    """rows (R, D), NaN and infinity where `order` is -1; probs NaN where `slots` (T, K) is -1, or of shape (0,)."""

    rows: Array
    slots: Array
    order: Array
    probs: Array
    dy: Array

    @property
    def inputs(self) -> tuple[Array, ...]:
        return self.rows, self.slots, self.probs

    @property
    def bwd_inputs(self) -> tuple[Array, ...]:
        return self.dy, self.rows, self.slots, self.order, self.probs


def _combine(
    name: str, tokens: int, top_k: int, dim: int, *, empty: float = 0.0, padding: int = 0,
    rows: np.dtype = BF16, dy: np.dtype = BF16, weighted: bool = True,
) -> Combine:  # fmt: skip
    """`empty` of the slots have no row, `padding` of the rows no slot."""
    rng = seeded(name)
    filled = np.flatnonzero(rng.random(tokens * top_k) >= empty)
    order = rng.permutation(np.concatenate([filled, np.full(padding, -1)])).astype(np.int32)
    slots = np.full(tokens * top_k, -1, np.int32)
    slots[order[order >= 0]] = np.flatnonzero(order >= 0)
    x = student_t(rng, (len(order), dim))
    x[order < 0] = rng.choice([np.nan, np.inf], (padding, 1))
    probs = np.where(slots < 0, np.nan, rng.random(slots.shape)).astype(np.float32)
    shape = (tokens, top_k)
    return Combine(
        x.astype(rows), slots.reshape(shape), order, probs.reshape(shape) if weighted else np.zeros(0, np.float32),
        student_t(rng, (tokens, dim)).astype(dy),
    )  # fmt: skip


def _combine_cases() -> dict[str, Combine]:
    cases = {
        "top_1": _combine("top_1", 70, 1, 64),
        "top_8": _combine("top_8", 37, 8, 160),
        "top_3_of_odd_width": _combine("top_3", 37, 3, 33),
        "top_11": _combine("top_11", 5, 11, 40),
        "padding": _combine("padding", 40, 6, 72, empty=0.3, padding=77),
        "fp32": _combine("fp32", 40, 6, 72, empty=0.3, padding=77, rows=F32, dy=F32),
        "bf16_rows_fp32_gradient": _combine("mixed", 40, 6, 72, empty=0.3, padding=77, dy=F32),
        "fp32_rows_bf16_gradient": _combine("mixed too", 40, 6, 72, padding=77, rows=F32),
        "unweighted": _combine("unweighted", 40, 6, 72, empty=0.3, padding=77, weighted=False),
        "unweighted_fp32": _combine("plain", 40, 6, 72, rows=F32, dy=F32, weighted=False),
        "no_tokens": _combine("no_tokens", 0, 8, 64, padding=9),
        "no_rows": _combine("no_rows", 9, 8, 64, empty=1.0),
        "one_of_everything": _combine("one", 1, 1, 1),
        "more_columns_than_a_tile": _combine("columns", 3, 2, 1500, padding=2),
    }
    special = _combine("special", 40, 4, 64, empty=0.3)
    x, p, dy = special.rows, special.probs, special.dy
    x[0, 5], x[1, :9], x[2] = np.nan, np.inf, BF16.type(2.0**-133)
    dy[3, 4], dy[4, :7], dy[5] = np.nan, -np.inf, BF16.type(2.0**-130)
    p[6], p[7], p[8], p[9], p[10] = 0.0, -0.0, -1.5, 2.0**-140, 3e38
    return cases | {"nan_inf_and_subnormals": Combine(x, special.slots, special.order, p, dy)}


COMBINES = _combine_cases()


def _in_blocks(case: Combine) -> Arrays:
    """Columns repeat up to a multiple of 32."""
    dy, rows, *maps = case.bwd_inputs
    columns = np.arange(-(-rows.shape[1] // 32) * 32) % max(rows.shape[1], 1)
    return dy[:, columns], rows[:, columns], *maps


CONFORMANCE = {
    **{
        f"combine-{name}-{dtype}": fixed("combine", *case.inputs, out_dtype=dtype)
        for name, case in COMBINES.items()
        for dtype in OUT_DTYPES
    },
    **{f"combine_bwd-{name}": fixed("combine_bwd", *case.bwd_inputs) for name, case in COMBINES.items()},
    **{
        f"combine_bwd_row-{name}-{mode}": fixed("combine_bwd_row", *_in_blocks(case), **MODES[mode])
        for name, case in COMBINES.items()
        for mode in ("rceil", "floor_satfinite")
    },
}
