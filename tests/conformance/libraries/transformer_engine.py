"""TransformerEngine's MXFP8 cast, transcribed by us from its CUDA C++ sources: the formula, not the library.

amax       the maximum of |x| by fmaxf, which ignores a NaN
scale      float_to_e8m0(amax * fp32(1 / 448))            an infinity is byte 254
elements   x * exp2f_rcp(scale), cvt.rn.satfinite.e4m3    a NaN is 0x7F
"""

import numpy as np
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.oracle_math import to_e4m3

SOURCE = (
    "NVIDIA/TransformerEngine d0067d0, common/cast/mxfp8/quantize_mxfp8.cuh, common/util/ptx_arch_spec.cuh, ptx.cuh"
)


def float_to_e8m0(value):
    bits = value.view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.where(np.isinf(value), 0xFE, exponent + up).astype(np.uint8)


def exp2f_rcp(byte):
    bits = np.where(byte == 254, 0x00400000, (254 - byte.astype(np.int32)) << 23)
    return bits.astype(np.uint32).view(np.float32)


def quantize_row(x):
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK) if x.size else np.zeros((0, 2, BLOCK), np.float32)
    amax = np.fmax.reduce(np.abs(blocks), axis=-1, initial=0)
    sf = float_to_e8m0(amax * np.float32(1 / 448))
    with np.errstate(all="ignore"):
        return to_e4m3((blocks * exp2f_rcp(sf)[..., None]).astype(np.float64)).reshape(x.shape), sf
