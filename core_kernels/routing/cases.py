"""Cases of the family `routing`."""

import numpy as np

from ..cases import F32, GROUPS, Array, Arrays, Case, Rng
from .oracle import sort_by_expert


def expert_ids(rng: Rng, m: int) -> Array:
    return np.int32([1, 4, 6, 8])[rng.integers(0, 4, m)]


def counts(rng: Rng, m: int) -> Arrays:
    """Token counts from two ranks for three experts; the last expert receives none."""
    pair = np.int32([0, 1, 3, 4])[rng.integers(0, 4, m)]
    return (np.bincount(pair, minlength=2 * GROUPS).astype(np.int32),)


def sorted_slots(rng: Rng, m: int) -> Arrays:
    order, _, counts = sort_by_expert(expert_ids(rng, m), 9)
    return counts, order, rng.random(m, F32)


CASES = {
    "sort_by_expert": Case("sort_by_expert", lambda rng, m: (expert_ids(rng, m),), {"num_experts": 9}),
    "row_map": Case("row_map", counts, lambda m: {"num_rows": m, "num_local_experts": GROUPS}),
    "slot_map": Case("slot_map", sorted_slots, lambda m: {"top_k": 1 if m % 3 else 3}),
}
