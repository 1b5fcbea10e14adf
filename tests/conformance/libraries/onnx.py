"""ONNX's reference evaluator: a graph of Div and Cast, with round_mode "up" for RCEIL and "down" for FLOOR."""

import numpy as np
from mxep.core_kernels.formats import BLOCK, Rounding

from ..test_references import onnx_quantizer

PACKAGES = ("onnx",)


def quantize_row(x, rounding=0):
    divisor, round_mode = ((448.0, "up"), (256.0, "down"))[Rounding(rounding)]
    blocks = x.astype(np.float32).reshape(-1, BLOCK)
    with np.errstate(all="ignore"):
        sf, q = onnx_quantizer(divisor, round_mode).run(None, {"x": blocks})
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
    return np.asarray(q).view(np.uint8).reshape(x.shape), np.asarray(sf).view(np.uint8).reshape(shape)
