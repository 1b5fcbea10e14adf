"""torchao's MXFP8 on a CPU: to_mx in its modes RCEIL and FLOOR, to_dtype, and the layout of scales."""

import ml_dtypes
import numpy as np
import torch
from mxep.core_kernels.formats import Rounding
from torchao.prototype.mx_formats import mx_tensor, utils
from torchao.prototype.mx_formats.config import ScaleCalculationMode

PACKAGES = ("torchao", "torch")


def quantize_row(x, rounding=0):
    values = torch.from_numpy(x if x.dtype == np.float32 else x.view(np.int16))
    values = values if x.dtype == np.float32 else values.view(torch.bfloat16)
    mode = ScaleCalculationMode[Rounding(rounding).name]
    sf, q = mx_tensor.to_mx(values, torch.float8_e4m3fn, 32, mode)
    return q.view(torch.uint8).numpy(), sf.view(torch.uint8).numpy()


def dequantize(q, sf, out_dtype="bfloat16"):
    q, sf = torch.from_numpy(q).view(torch.float8_e4m3fn), torch.from_numpy(sf).view(torch.float8_e8m0fnu)
    out = mx_tensor.to_dtype(q, sf, torch.float8_e4m3fn, 32, getattr(torch, out_dtype))
    return out.float().numpy().astype(ml_dtypes.bfloat16 if out_dtype == "bfloat16" else np.float32)


def block_scales(sf, group_ends):
    if len(group_ends) > 1 or group_ends[-1] < len(sf):
        raise NotImplementedError("one group of all rows alone")
    columns = -(-sf.shape[1] // 4) * 4
    return utils.to_blocked(torch.from_numpy(sf)).numpy().reshape(-1, columns)
