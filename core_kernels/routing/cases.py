"""Cases of the family `routing`."""

from dataclasses import dataclass

import numpy as np

from ..cases import F32, GROUPS, Array, Arrays, Case, Rng, fixed, seeded, timed
from ..formats import BLOCK
from .oracle import sort_by_expert


def expert_ids(rng: Rng, m: int) -> Array:
    return np.array([1, 4, 6, 8], np.int32)[rng.integers(0, 4, m)]


def counts(rng: Rng, m: int) -> Arrays:
    """Token counts from two ranks for three experts; the last expert receives none."""
    pair = np.array([0, 1, 3, 4], np.int32)[rng.integers(0, 4, m)]
    return (np.bincount(pair, minlength=2 * GROUPS).astype(np.int32),)


def sorted_slots(rng: Rng, m: int) -> Arrays:
    order, _, counts = sort_by_expert(expert_ids(rng, m), 9)
    return counts, order, rng.random(m, F32)


CASES = {
    "sort_by_expert": Case("sort_by_expert", lambda rng, m: (expert_ids(rng, m),), {"num_experts": 9}),
    "row_map": Case("row_map", counts, lambda m: {"num_rows": m, "num_local_experts": GROUPS}),
    "slot_map": Case("slot_map", sorted_slots, lambda m: {"top_k": 1 if m % 3 else 3}),
}
TIMED = (timed("routing", "M top_k experts", "sort_by_expert row_map", routing="skewed"),)


# --- fixed values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowMap:
    """counts[rank][local expert]. rank_rows: rows of each rank's buffer; 0: the ranks' rows are contiguous."""

    counts: tuple[tuple[int, ...], ...]
    alignment: int = BLOCK
    rank_rows: int = 0
    slack: int = 0

    @property
    def flat(self) -> Array:
        return np.array(self.counts, np.int32).reshape(-1)

    @property
    def num_rows(self) -> int:
        return self.rank_rows * len(self.counts) if self.rank_rows else int(self.flat.sum()) + self.slack

    @property
    def options(self) -> dict[str, int]:
        return {
            "num_rows": self.num_rows,
            "num_local_experts": len(self.counts[0]),
            "alignment": self.alignment,
            "rank_rows": self.rank_rows,
        }


MAPS = {
    "drawn_in_routing": RowMap(((2, 1), (1, 2))),
    "no_multiple_of_32": RowMap(((5, 40, 33), (64, 1, 7))),
    "empty_experts": RowMap(((0, 9, 0, 3), (0, 0, 0, 4))),
    "empty_rank": RowMap(((0, 0), (17, 20), (0, 0), (3, 40))),
    "one_hot_expert": RowMap(((0, 70, 0), (0, 90, 0))),
    "one_token": RowMap(((0, 0), (1, 0))),
    "no_tokens": RowMap(((0, 0), (0, 0))),
    "exact_groups": RowMap(((32, 64), (32, 0))),
    "alignment_128": RowMap(((5, 130), (129, 0)), alignment=128),
    "alignment_96": RowMap(((5, 130), (129, 0)), alignment=96),
    "one_rank_one_expert": RowMap(((45,),)),
    "slack_at_the_end": RowMap(((5, 6), (7, 0)), slack=13),
    "fixed_capacity": RowMap(((5, 6), (7, 0), (0, 0), (0, 16)), rank_rows=16),
    "fixed_capacity_full": RowMap(((8, 8), (0, 16)), rank_rows=16),
    "many_experts": RowMap(tuple(tuple(row) for row in seeded("many").integers(0, 9, (4, 16)).tolist())),
}

SORTS: dict[str, tuple[Array, int]] = {
    "random": (seeded("sort").integers(0, 8, 300).astype(np.int32), 8),
    "all_to_one": (np.full(70, 3, np.int32), 8),
    "one_token": (np.array([2], np.int32), 4),
    "no_tokens": (np.array([], np.int32), 4),
    "one_expert": (np.zeros(50, np.int32), 1),
    "reversed": (np.arange(40, dtype=np.int32)[::-1].copy() // 5, 8),
    "empty_experts": (seeded("gaps").choice(np.array([1, 4, 6], np.int32), 100), 9),
    "many_experts": (seeded("256").integers(0, 256, 500).astype(np.int32), 256),
}


def _slots(expert_ids: Array, num_experts: int, top_k: int, weighted: bool) -> Arrays:
    order, _, counts = sort_by_expert(np.repeat(expert_ids, top_k), num_experts)
    return counts, order, np.arange(1, len(order) + 1, dtype=F32)[: None if weighted else 0]


CONFORMANCE = {
    **{f"sort_by_expert-{name}": fixed("sort_by_expert", ids, num_experts=n) for name, (ids, n) in SORTS.items()},
    **{f"row_map-{name}": fixed("row_map", case.flat, **case.options) for name, case in MAPS.items()},
    **{
        f"slot_map-{name}-{of}{'-weighted' * weighted}": fixed(
            "slot_map", *_slots(ids, n, options["top_k"], weighted), **options
        )
        for name, (ids, n) in SORTS.items()
        for of, options in (("rows", {"top_k": 1}), ("tokens", {"top_k": 3, "alignment": 96}))
        for weighted in (True, False)
    },
}
