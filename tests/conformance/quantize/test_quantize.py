"""quantize_row of a known value."""

from collections.abc import Callable, Mapping

import numpy as np
from mxep.core_kernels.formats import BLOCK, Rounding

Ops = Mapping[str, Callable]


def test_the_one_magnitude_whose_quotient_rounds_down_to_a_power_of_two(ops: Ops) -> None:
    """In docs/concepts/recipes.md: 0x1.c00002p-119 / 448 is 2^-127 in fp32. Its neighbours have scales of their own."""
    x = np.zeros((1, 3 * BLOCK), np.float32)
    x[0, ::BLOCK] = np.array(
        [float.fromhex("0x1.cp-119"), float.fromhex("0x1.c00002p-119"), float.fromhex("0x1.c00004p-119")]
    )
    q, sf = ops["quantize_row"](x, rounding=Rounding.RCEIL)
    assert np.asarray(sf).tolist() == [[0, 0, 1]]
    assert np.asarray(q)[0, ::BLOCK].tolist() == [0x7E, 0x7E, 0x76]
