"""quantize_rowwise between guards, in C++ and in Triton's interpreter: no byte outside is read or written."""

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels.quantize import oracle
from mxep.core_kernels.quantize import plan as quantize


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (65, 544), (2, 33, 160), (0, 64)], ids=str)
def test_quantize_rowwise(guarded_op, shape, dtype):
    x = np.random.default_rng(shape).standard_normal(shape).astype(dtype)
    for g, w in zip(guarded_op(quantize.quantize_rowwise, x), oracle.quantize_rowwise(x), strict=True):
        np.testing.assert_array_equal(g, w)
