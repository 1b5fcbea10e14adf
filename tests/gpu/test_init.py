"""The initial weights of a layer, as a GPU draws them."""

import pytest
import torch
from mxep.torch_frontend import GroupedExperts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initial_weights_are_normal(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for w in GroupedExperts(7168, 512, 4, dtype=dtype, device="cuda").parameters():
        w = w.detach().float() * w.shape[-1] ** 0.5
        assert abs(w.std() - 1) < 0.01
        assert w.abs().max() < 6.5
        assert len(w.unique()) > 1000
