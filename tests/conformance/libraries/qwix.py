"""qwix: qarray.quantize of qtype "mxfp8", on a CPU. Its scales are floats, here cast to E8M0: a NaN is byte 255."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from qwix._src.core.qarray import HowToQuantize, quantize

PACKAGES = ("qwix", "jax", "jaxlib")


def quantize_row(x):
    how = HowToQuantize(qtype="mxfp8", channelwise_axes=range(x.ndim - 1), tiled_axes={x.ndim - 1: 32})
    found = quantize(jnp.asarray(x), how)
    scales = np.asarray(found.scale).astype(np.float32).astype(ml_dtypes.float8_e8m0fnu)
    return np.asarray(found.qvalue).view(np.uint8).reshape(x.shape), scales.view(np.uint8)
