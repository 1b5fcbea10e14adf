"""microxcaling's _quantize_mx for fp8_e4m3 with its default rounding, transcribed by us: the formula, not the library.

It returns values, of which these are the bytes: an element's code, and 127 plus the shared exponent. A NaN of either is
0x7F or 255. Its default rounds ties away from zero.
"""

import numpy as np
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.oracle_math import to_e4m3

SOURCE = "microsoft/microxcaling 7bc4195, mx/mx_ops.py _quantize_mx, mx/elemwise_ops.py _quantize_elemwise_core"
F32 = np.float32
EMAX, MAX_NORM, FRACTION, MIN_EXPONENT = F32(8), F32(448), 3, F32(-6)


def floor_log2(x):
    return np.floor(np.log2(x))


def quantize_row(x):
    blocks = x.astype(F32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(-1)
        shared = floor_log2(amax + np.finfo(F32).tiny * (amax == 0).astype(F32)) - EMAX
        shared = np.where(shared > 127, np.nan, np.where(shared < -127, F32(-127), shared)).astype(F32)
        scaled = blocks / np.exp2(shared)[..., None]
        private = np.maximum(floor_log2(np.abs(scaled) + (scaled == 0).astype(F32)), MIN_EXPONENT)
        steps = scaled / np.exp2(private) * F32(2**FRACTION)
        rounded = np.sign(steps) * np.floor(np.abs(steps) + F32(0.5)) / F32(2**FRACTION) * np.exp2(private)
        values = np.clip(rounded, -MAX_NORM, MAX_NORM)
        sf = np.where(np.isnan(shared), 255, shared + 127).astype(np.uint8)
    return to_e4m3(values.astype(np.float64)).reshape(x.shape), sf
