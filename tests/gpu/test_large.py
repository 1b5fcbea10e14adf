"""Ops on arrays of more than 2^31 elements: 300000 x 8192, its permutation, its SwiGLU, its combine; weights; groups.

The first test compares bytes of slices with C++ on the CPU: the first, the middle and the last rows, and the rows
around element 2^31; of transposed outputs, the columns of these rows. Inputs and slices are the benchmark's.
"""

import pytest
import torch
from mxep.torch_frontend import ops

from benchmarks.cases.byte_check import check
from benchmarks.cases.calls import torch_call
from benchmarks.cases.ops import families
from benchmarks.cases.shapes import Layer

from .cases import DEVICE, same_bytes

LARGE = Layer(300_000, 8192, (8192,), num_experts=16, top_k=2, local_experts=4)


@pytest.mark.parametrize("name", families.NAMES)
def test_more_than_2_to_the_31_elements(name: str) -> None:
    for case in families.cases(LARGE, torch_call, DEVICE, (name,)):
        outputs = case.program(torch_call, *case.inputs)
        if name not in ("routing", "route", "route_bwd", "quantize_weights") and "matrix_fold" not in name:
            assert max(x.numel() for x in outputs) > 2**31
        check(case, outputs)
        del case, outputs
    torch.cuda.empty_cache()


def test_groups_of_more_than_2_to_the_31_elements() -> None:
    """66000 rows of eight groups. The row that element 2^31 is in, and others, have the bytes that they have alone."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    q = torch.randint(256, (66_000, 33_024), generator=rng, dtype=torch.uint8, device=DEVICE)
    sf = torch.randint(110, 140, (66_000, 33_024 // 32), generator=rng, dtype=torch.uint8, device=DEVICE)
    ends = 4128 * torch.arange(1, 9, dtype=torch.int32, device=DEVICE)
    qf, span_sf = ops.fold_groups(q, sf, ends)
    for first in (0, 65_012, 65_966):
        rows = slice(first, first + 34)
        same_bytes((qf[rows], span_sf[:, rows]), ops.fold_groups(q[rows], sf[rows], ends))
    del q, sf, qf, span_sf
    torch.cuda.empty_cache()


def test_weights_of_more_than_2_to_the_31_elements() -> None:
    """33 matrices of 8192 x 8192. Each has the bytes that it has alone, and transposed alone."""
    x = torch.randn(33, 8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    outputs = ops.quantize_matrix_fold(x)
    for i in (0, 31, 32):
        same_bytes([out[i] for out in outputs], ops.quantize_matrix_fold(x[i]))
    same_bytes(outputs[2:], ops.quantize_matrix_fold_t(x))
    del x, outputs
    torch.cuda.empty_cache()
