"""Cases of the family `scale_layout`."""

import numpy as np

from ..cases import Arrays, Case, K, Rng, fixed, floats, group_ends, seeded
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


# --- fixed values ---------------------------------------------------------------------------------------

# ends, rows, scales per row
_LAYOUTS = {
    "one_tile": ([128], 128, 4),
    "one_byte": ([1], 1, 1),
    "ragged": ([5, 134, 134, 300], 333, 7),
    "empty_groups": ([0, 0, 128, 128, 129], 129, 5),
    "every_row_past_the_end": ([0, 0], 200, 3),
    "aligned": ([128, 384], 384, 24),
    "no_rows": ([0, 0], 0, 8),
    "wide": ([40, 300], 300, 70),
}
LAYOUTS = {
    name: (seeded(name).integers(1, 256, shape, np.uint8), np.array(ends, np.int32))
    for name, (ends, *shape) in _LAYOUTS.items()
}


def _conformance(name: str) -> dict[str, Case]:
    """Padding in a blocked layout is 0, or any bytes, which are not read."""
    sf, ends = LAYOUTS[name]
    blocked, options = block_scales(sf, ends), {"num_rows": sf.shape[0], "num_scales": sf.shape[1]}
    noise = seeded("noise").integers(0, 256, blocked.shape, np.uint8)
    return {
        f"block_scales-{name}": fixed("block_scales", sf, ends),
        f"unblock_scales-{name}": fixed("unblock_scales", blocked, ends, **options),
        f"unblock_scales-{name}-noise": fixed("unblock_scales", noise, ends, **options),
    }


CONFORMANCE = {name: case for layout in LAYOUTS for name, case in _conformance(layout).items()}
