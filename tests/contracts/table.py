"""Pairs of values: each value of a factor meets each value of every other factor in at least one row.

    FACTORS   name -> values;   allowed(row)   --pairwise--> rows
                                               --product---> all allowed rows

It imports no framework. Rows are chosen greedily, the same in every run: of the rows that have the first pair without a
row, the one with the most such pairs, and of these the one with the least used values.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = Mapping[str, str]
Factors = Mapping[str, Sequence[str]]
Allowed = Callable[[Row], bool]
Pair = frozenset[tuple[str, str]]


def all_rows(factors: Factors, allowed: Allowed) -> list[Row]:
    """The product of all factors without the rows that are not allowed."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if allowed(row)]


def pairs_of(row: Row) -> Iterator[Pair]:
    yield from map(frozenset, combinations(row.items(), 2))


def pairwise(factors: Factors, allowed: Allowed) -> list[Row]:
    """Few rows with every pair that an allowed row has."""
    rows = all_rows(factors, allowed)
    missing = dict.fromkeys(pair for row in rows for pair in pairs_of(row))  # ordered
    chosen: list[Row] = []
    used: Counter[tuple[str, str]] = Counter()

    def worth(row: Row) -> tuple[int, int]:
        return sum(pair in missing for pair in pairs_of(row)), -sum(used[item] for item in row.items())

    while missing:
        first = next(iter(missing))
        best = max((row for row in rows if first <= row.items()), key=worth)
        chosen.append(best)
        used.update(best.items())
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return chosen


def name_of(row: Row) -> str:
    return "-".join(row.values())


# --- the layers -----------------------------------------------------------------------------------------------

RECIPES = ("bf16", "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise", "folded")
PROB_IN = ("combine", "swiglu", "input")
EXTRAS = ("plain", "biases", "shared", "gated")
"""Of the layer: biases of experts and router; a shared expert; a shared expert with a gate."""
DTYPES = ("float32", "bfloat16")

TORCH: Factors = {
    "exchange": ("one process", "all-to-all", "deduplicate dispatch", "deduplicate both"),
    "recipe": RECIPES,
    "prob_in": PROB_IN,
    "replay": ("recompute", "checkpoint", "selective"),
    "extras": EXTRAS,
    "dtype": DTYPES,
}
"""On GPUs with `ON_GPUS` exchanges too; PeerMemory on a CPU: tests/torch_frontend/overlap/peer_ranks.py."""
ON_GPUS: Factors = {**TORCH, "exchange": (*TORCH["exchange"], "PeerMemory")}
JAX: Factors = {
    "exchange": ("one device", "all-to-all", "capacity", "deduplicate dispatch", "deduplicate both", "peer memory"),
    "recipe": RECIPES,
    "prob_in": PROB_IN,
    "replay": ("checkpoint", "save_mx_rows", "names"),
    "extras": EXTRAS,
    "dtype": DTYPES,
}
JAX_OFTEN: Factors = {**JAX, "recipe": tuple(name for name in RECIPES if name != "fp8_blockwise")}
"""Without a recipe that differs from "fp8_rowwise" in its GEMMs alone: a row compiles for two seconds."""
JAX_PRODUCT: Factors = {**JAX, "recipe": ("mxfp8",), "extras": ("gated",)}
"""All of `JAX` would compile for two hours."""


def allowed(row: Row) -> bool:
    """A row per replica is sent once for each expert; PeerMemory takes no "combine"."""
    exchange, prob_in = row["exchange"], row["prob_in"]
    return not (exchange.startswith("deduplicate") and prob_in == "input") and (
        (exchange, prob_in) != ("PeerMemory", "combine")
    )
