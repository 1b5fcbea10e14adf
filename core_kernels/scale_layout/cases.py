"""Cases of the family `scale_layout`."""

from ..cases import Arrays, Case, K, Rng, floats, group_ends
from ..quantize.oracle import quantize_row
from .oracle import block_scales


def scales(rng: Rng, m: int) -> Arrays:
    return quantize_row(floats(rng, m, K))[1], group_ends(rng, m)


def blocked_scales(rng: Rng, m: int) -> Arrays:
    sf, ends = scales(rng, m)
    return block_scales(sf, ends), ends


CASES = {
    "block_scales": Case("block_scales", scales),
    "unblock_scales": Case("unblock_scales", blocked_scales, lambda m: {"num_rows": m, "num_scales": K // 32}),
}
