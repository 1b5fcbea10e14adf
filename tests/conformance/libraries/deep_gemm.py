"""DeepGEMM's per_token_cast_to_fp8 with use_ue8m0 and gran_k=32, transcribed by us: the formula, not the library.

The last cast is PyTorch's since 2.12: it saturates, and a NaN keeps its sign.
"""

import numpy as np
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.oracle_math import to_e4m3

SOURCE = "deepseek-ai/DeepGEMM 54e2261, deep_gemm/utils/math.py; the cast to float8_e4m3fn of PyTorch 2.13"


def ceil_to_ue8m0(x):
    bits = x.view(np.uint32)
    exponent = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF > 0)
    return np.clip(exponent, 1, 254).astype(np.uint32) << np.uint32(23)


def quantize_row(x):
    if x.ndim != 2:
        raise NotImplementedError("two dims alone")
    blocks = x.astype(np.float32).reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        amax = np.maximum(np.abs(blocks).max(-1), np.float32(1e-4))
        sf = ceil_to_ue8m0(amax / np.float32(448))
        scaled = blocks * (np.float32(1) / sf.view(np.float32))[..., None]
    sign = np.where(np.isnan(blocks) & np.signbit(blocks), 0x80, 0).astype(np.uint8)
    return (to_e4m3(scaled.astype(np.float64)) | sign).reshape(x.shape), (sf >> np.uint32(23)).astype(np.uint8)
