"""Cases of the family `permute`."""

from ..cases import Arrays, Case, K, Rng, floats, row_map
from ..quantize.oracle import quantize_row_packed


def rows_and_map(rng: Rng, m: int) -> Arrays:
    return floats(rng, m, K), row_map(rng, m)


def packed_and_map(rng: Rng, m: int) -> Arrays:
    return quantize_row_packed(floats(rng, m, K)), row_map(rng, m)


CASES = {"permute_rows": Case("permute_rows", rows_and_map), "permute_mx": Case("permute_mx", packed_and_map)}
