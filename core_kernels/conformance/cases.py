"""The cases of all families, and of a whole feed-forward."""

import numpy as np

from ..cases import BF16, F32, Arrays, Case, finite, fixed, seeded
from ..combine import cases as combine
from ..fold import cases as fold
from ..grouped_gemm import cases as grouped_gemm
from ..permute import cases as permute
from ..quantize import cases as quantize
from ..router import cases as router
from ..routing import cases as routing
from ..scale_layout import cases as scale_layout
from ..swiglu import cases as swiglu

TABLES = (quantize, permute, router, routing, fold, scale_layout, combine, swiglu, grouped_gemm)


def _drawn(name: str, ends: list[int], rows: int, weighted: bool = True) -> Arrays:
    """Rows past the last end hold NaN."""
    rng, groups, dim, hidden = seeded(name), len(ends), 64, 96
    x = finite(rng, rows, dim)
    x[ends[-1] :] = np.nan
    w1, w3 = (finite(rng, groups, hidden, dim) / BF16.type(8) for _ in range(2))
    prob = rng.random(rows, F32) if weighted else np.zeros(0, F32)
    return x, w1, w3, finite(rng, groups, dim, hidden) / BF16.type(8), np.array(ends, np.int32), prob


def _one_term() -> Arrays:
    """Each sum has one term that is not zero, so that the bytes do not depend on the order of a sum."""
    rng, ends, size = seeded("one term"), np.array([5, 5, 32], np.int32), 64
    x, w1, w3, w2 = (np.zeros(shape, BF16) for shape in ((40, size), *[(3, size, size)] * 3))
    x[np.arange(40), rng.integers(0, size, 40)] = rng.standard_normal(40).astype(BF16)
    column = np.arange(size)
    first, second = rng.permutation(size), rng.permutation(size)
    for w, row in ((w1, first), (w3, first), (w2, second)):  # gate and up of a row are in one column
        w[:, column, row] = (4 * rng.standard_normal((3, size))).astype(BF16)
    return x, w1, w3, w2, ends, rng.random(40, F32)


FEED_FORWARD = {
    "swiglu_ffn-one_term": fixed("swiglu_ffn", *_one_term()),
    "swiglu_ffn-normal": fixed("swiglu_ffn", *_drawn("feed-forward", [20, 20, 52, 90], 96)),
    "swiglu_ffn-without_prob": fixed("swiglu_ffn", *_drawn("no prob", [32, 64], 64, weighted=False)),
}
CONFORMANCE: dict[str, Case] = {
    name: case for table in TABLES for name, case in getattr(table, "CONFORMANCE", {}).items()
} | FEED_FORWARD
"""Name -> case."""
