"""gfloat: compute_scale_amax and encode_block, value by value; no block with a NaN."""

import gfloat
import numpy as np
from gfloat.formats import format_info_mxfp8_e4m3, format_info_ocp_e4m3
from mxep.core_kernels.formats import BLOCK

PACKAGES = ("gfloat",)


def quantize_row(x):
    blocks = x.astype(np.float64).reshape(-1, BLOCK)
    if np.isnan(blocks).any():
        raise NotImplementedError("encode_block refuses the scale of a block with a NaN")
    out = np.empty((len(blocks), 1 + BLOCK), np.uint8)
    for row, values in zip(out, blocks, strict=True):
        scale = gfloat.compute_scale_amax(format_info_ocp_e4m3.emax, values)
        row[:] = list(gfloat.encode_block(format_info_mxfp8_e4m3, scale, values / scale))
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return np.ascontiguousarray(out[:, 1:]).reshape(x.shape), np.ascontiguousarray(out[:, 0]).reshape(shape)
