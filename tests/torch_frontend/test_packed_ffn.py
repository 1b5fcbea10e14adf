"""The feed-forward of packed weights gives the bytes of `grouped_swiglu_ffn` with the weights apart."""

import pytest
import torch
from mxep.torch_frontend import RECIPES, Recipe, SwiGLU
from mxep.torch_frontend.packed_ffn import packed_ffn
from torch import Tensor

from ..compare import same_bytes
from .packed import ALL, ENDS, NEEDS, ROWS, D, E, F, both, randn


@pytest.mark.parametrize("mx", [False, True], ids=["", "mx"])
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_the_bytes_are_those_of_weights_apart(recipe: Recipe, mx: bool) -> None:
    for dtype, needs in [(torch.float32, NEEDS[0]), *((torch.bfloat16, needs) for needs in NEEDS)]:
        got, want = both(recipe, dtype, mx, needs)
        assert [g is None for g in got] == [w is None for w in want] == [False, *(not need for need in needs)]
        same_bytes([g for g in got if g is not None], [w for w in want if w is not None])


def test_a_written_weight_is_quantized_once_in_the_forward() -> None:
    """A leaf with a version above 0 keeps its bytes for the backward; another leaf is quantized again. Same bytes."""
    results = []
    for written in (False, True):
        gate_up = randn(E, 2 * F, D, seed=1, dtype=torch.bfloat16).requires_grad_()
        if written:
            with torch.no_grad():
                gate_up.mul_(1)
        x = randn(ROWS, D, seed=0, dtype=torch.bfloat16).requires_grad_()
        down = randn(E, D, F, seed=2, dtype=torch.bfloat16)
        packed_ffn("test", x, gate_up, down, ENDS, RECIPES["mxfp8"], SwiGLU()).sum().backward()
        results.append((x.grad, gate_up.grad))
    same_bytes(*results)


GATE_UP, DOWN = randn(E, 2 * F, D, seed=1, dtype=torch.float32), randn(E, D, F, seed=2, dtype=torch.float32)
X = randn(ROWS, D, seed=0, dtype=torch.float32)
BAD: dict[str, tuple[type[Exception], str, tuple[Tensor, Tensor, Tensor, Tensor]]] = {
    "dtype": (TypeError, "gate_up_proj: got dtype", (X, GATE_UP.half(), DOWN, ENDS)),
    "strides": (ValueError, "down_proj: got strides", (X, GATE_UP, DOWN.mT.contiguous().mT, ENDS)),
    "shapes": (ValueError, "gate_up_proj: got shape", (X, GATE_UP[:, 1:].contiguous(), DOWN, ENDS)),
    "rows": (ValueError, "hidden_states: got shape", (X[:, :32], GATE_UP, DOWN, ENDS)),
    "sizes": (ValueError, "F = 48", (X, GATE_UP[:, :96].contiguous(), DOWN[..., :48].contiguous(), ENDS)),
    "groups": (ValueError, "group_ends: got", (X, GATE_UP, DOWN, ENDS[:2])),
    "blocks": (ValueError, "group_ends: got", (X, GATE_UP.clone().requires_grad_(), DOWN, ENDS + 1)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    error, message, tensors = BAD[name]
    with pytest.raises(error, match=message):
        packed_ffn("test", *tensors, RECIPES["mxfp8"], SwiGLU())
