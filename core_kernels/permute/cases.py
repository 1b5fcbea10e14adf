"""Cases of the family `permute`."""

import numpy as np

from ..cases import BF16, F32, Array, Arrays, Case, K, Rng, floats, row_map, seeded, timed
from ..quantize.oracle import quantize_row_packed
from ..routing import oracle as routing_oracle
from ..routing.cases import MAPS
from .oracle import permute_rows


def rows_and_map(rng: Rng, m: int) -> Arrays:
    return floats(rng, m, K), row_map(rng, m)


def packed_and_map(rng: Rng, m: int) -> Arrays:
    return quantize_row_packed(floats(rng, m, K)), row_map(rng, m)


CASES = {"permute_rows": Case("permute_rows", rows_and_map), "permute_mx": Case("permute_mx", packed_and_map)}
_RECEIVED = {"sizes": "M K G ranks", "routing": "skewed"}
TIMED = (
    timed("permute_mx", **_RECEIVED),
    timed("permute_mx_fold", **_RECEIVED),
    timed("unpermute", op="permute_rows", **_RECEIVED),
)


U8 = np.dtype(np.uint8)


def _bytes(name: str, width: int, dtype: np.dtype) -> Array:
    """Rows of any bits, NaN patterns among them: a gather copies bits."""
    return seeded(name).integers(0, 256, (MAPS[name].num_rows, width * dtype.itemsize), np.uint8).view(dtype)


def _there(name: str, width: int, dtype: np.dtype = U8) -> Arrays:
    return _bytes(name, width, dtype), routing_oracle.row_map(MAPS[name].flat, **MAPS[name].options)[0]


def _back(name: str, width: int, dtype: np.dtype) -> Arrays:
    inverse = routing_oracle.row_map(MAPS[name].flat, **MAPS[name].options)[1]
    return permute_rows(*_there(name, width, dtype)), inverse


CONFORMANCE = {
    **{
        f"permute_rows-{name}-{dtype}-{way.__name__}": Case(
            "permute_rows", lambda *_, of=(name, width, dtype), way=way: way(*of)
        )
        for name in MAPS
        for width, dtype in ((40, BF16), (40, F32), (33, U8))
        for way in (_there, _back)
    },
    **{
        f"permute_mx-{name}-{k}": Case("permute_mx", lambda *_, of=(name, k + k // 32): _there(*of))
        for name in MAPS
        for k in (32, 160)
    },
}
