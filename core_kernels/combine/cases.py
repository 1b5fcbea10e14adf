"""Cases of the family `combine`."""

import numpy as np

from ..cases import F32, Arrays, Case, Rng, finite


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
