"""The products of core_kernels/swiglu/folded/rows.cuh, which leave zeros below an fp32 number: all finite values and
scales."""

import numpy as np
from mxep.core_kernels.oracle_math import e8m0_value, round_to


def test_scaled_values() -> None:
    """A value times (factor, 0) plus (-0, 0): the rounded product with its sign, above zero."""
    finite = (np.arange(0x10000, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    finite = finite[np.isfinite(finite)].astype(np.float64)
    np.testing.assert_array_equal(round_to(finite * 0.0 + 0.0, "bfloat16").view(np.uint16), 0)
    for byte in range(254):  # the kernel does not take this path for 254; 255 is NaN
        product = finite / e8m0_value(np.uint8(byte))
        want, got = (round_to(x, "bfloat16").view(np.uint16) for x in (product, product + -0.0))
        np.testing.assert_array_equal(got, want)
