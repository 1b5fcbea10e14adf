"""The row gathers against the oracle, byte for byte, in Triton's interpreter."""

import ml_dtypes
import numpy as np
import pytest
import torch
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.permute import oracle
from mxep.core_kernels.permute import plan as permute


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.uint8], ids=["bf16", "f32", "u8"])
@pytest.mark.parametrize(("rows", "out_rows", "width"), [(5, 7, 3), (64, 130, 64), (40, 65, 200), (1, 1, 1)])
def test_permute_rows(triton_op, rows, out_rows, width, dtype):
    rng = np.random.default_rng(rows)
    x = rng.integers(0, 256, (rows, width * np.dtype(dtype).itemsize), np.uint8).view(dtype)
    row_map = rng.integers(-1, rows, out_rows, np.int32)
    row_map[0] = rows - 1
    (got,) = triton_op(permute.permute_rows, x, row_map)
    np.testing.assert_array_equal(got.view(np.uint8), oracle.permute_rows(x, row_map).view(np.uint8))


@pytest.mark.parametrize(("rows", "out_rows", "k"), [(5, 7, 32), (64, 130, 64), (40, 65, 224), (1, 1, 32)])
def test_permute_mx(triton_op, rows, out_rows, k):
    rng = np.random.default_rng(k)
    packed = rng.integers(0, 256, (rows, k + k // 32), np.uint8)
    row_map = rng.integers(-1, rows, out_rows, np.int32)
    for got, want in zip(
        triton_op(permute.permute_mx, packed, row_map), oracle.permute_mx(packed, row_map), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("rows", "out_rows", "k"), [(0, 3, 32), (3, 0, 32), (3, 4, 0), (0, 0, 0)])
def test_nothing_to_gather(triton_op, rows, out_rows, k):
    row_map = np.full(out_rows, -1, np.int32)
    (got,) = triton_op(permute.permute_rows, np.ones((rows, k), np.float32), row_map)
    np.testing.assert_array_equal(got, np.zeros((out_rows, k), np.float32))
    for got in triton_op(permute.permute_mx, np.ones((rows, k + k // 32), np.uint8), row_map):
        assert not got.any()


def test_past_2_31_elements():
    """Two rows of an input whose last byte has an index above 2^31; the other rows are not accessed."""
    rows, k = 1 << 25, 64
    packed = torch.zeros(rows, k + k // 32, dtype=torch.uint8)
    packed[-1] = 7
    row_map = torch.tensor([rows - 1, 0], dtype=torch.int32)
    op = permute.permute_mx
    launch = op.launch(ArrayType(tuple(packed.shape), "uint8"), ArrayType((2,), "int32"), arch="interpreter")
    q, sf = (torch.full(a.shape, 1, dtype=torch.uint8) for a in launch.out)
    op.triton_kernel()[launch.grid](packed, row_map, *launch.scalars.values(), q, sf, **launch.meta)
    for out in (q, sf):
        assert (out == torch.tensor([[7], [0]], dtype=torch.uint8)).all()
