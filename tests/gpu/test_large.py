"""Ops on arrays of more than 2^31 elements: 300000 x 8192, its permutation, its SwiGLU and its combine.

The test compares bytes of slices with C++ on the CPU: the first, the middle and the last rows, and the rows around
element 2^31; of transposed outputs, the columns of these rows. Inputs and slices are the benchmark's.
"""

import pytest
import torch

from benchmarks.cases import families
from benchmarks.cases.byte_check import check
from benchmarks.cases.calls import torch_call
from benchmarks.cases.shapes import Layer

from .cases import DEVICE

LARGE = Layer(300_000, 8192, (8192,), num_experts=16, top_k=2, local_experts=4)


@pytest.mark.parametrize("name", families.NAMES)
def test_more_than_2_to_the_31_elements(name: str) -> None:
    for case in families.cases(LARGE, torch_call, DEVICE, (name,)):
        outputs = case.program(torch_call, *case.inputs)
        if name not in ("routing", "quantize_weights"):
            assert max(x.numel() for x in outputs) > 2**31
        check(case, outputs)
        del case, outputs
    torch.cuda.empty_cache()
