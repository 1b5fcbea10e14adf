"""`force_implementation("triton")` on a CPU runs ops in Triton's interpreter, where it is selected."""

from collections.abc import Callable

import pytest
import torch
from mxep.torch_frontend import capabilities, force_implementation, ops

X = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
IDS = torch.tensor([2, 0, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    "run",
    [
        lambda: ops.quantize_row(X),
        lambda: ops.sort_by_expert(IDS, 3),
        lambda: (ops.permute_rows(X, IDS),),
        lambda: ops.quantize_both_fold(X[:32], IDS[1:2] + 32),
    ],
    ids=["quantize_row", "sort_by_expert", "permute_rows", "quantize_both_fold"],
)
def test_a_forced_interpreter_has_the_bytes_of_cpp(run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    want = run()
    with force_implementation("triton"):
        assert capabilities()["quantize_row"].uses == "triton, interpreter"
        assert capabilities()["quantize_both_fold"].uses == "quantize_row_fold, quantize_col, fold_groups"
        assert all(torch.equal(g, w) for g, w in zip(run(), want, strict=True))
