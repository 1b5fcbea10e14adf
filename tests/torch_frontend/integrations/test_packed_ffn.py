"""The feed-forward of packed weights gives the bytes of `grouped_swiglu_ffn` with the weights apart, or of the
functions that it consists of."""

import pytest
import torch
from mxep.torch_frontend import RECIPES, Recipe, SwiGLU
from mxep.torch_frontend.integrations.packed_ffn import packed_ffn
from torch import Tensor

from ...compare import same_bytes
from .packed import ALL, ENDS, JOINED, NEEDS, ROWS, D, E, F, both, fused_and_composed, probabilities, randn


@pytest.mark.parametrize("mx", [False, True], ids=["", "mx"])
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_the_bytes_are_those_of_weights_apart(recipe: Recipe, mx: bool) -> None:
    for dtype, needs in [(torch.float32, NEEDS[0]), *((torch.bfloat16, needs) for needs in NEEDS)]:
        weighted = dtype == torch.float32 or needs == NEEDS[3]
        got, want = both(recipe, dtype, mx, needs, weighted=weighted)
        nones = [False, *(not need for need in needs), not weighted]
        assert [g is None for g in got] == [w is None for w in want] == nones
        same_bytes([g for g in got if g is not None], [w for w in want if w is not None])


RUNS = [(torch.float32, False, NEEDS[0]), (torch.bfloat16, True, NEEDS[0])]
"""dtype, mx, needs."""
FEWER = [(torch.bfloat16, False, needs) for needs in NEEDS[1:]]
CASES = [(recipe, layout) for recipe in ALL for layout in ("llama4", "gpt_oss")]
CASES += [(RECIPES["mxfp8"], layout) for layout in JOINED if layout not in ("llama4", "gpt_oss")]


@pytest.mark.parametrize(("recipe", "layout"), CASES, ids=lambda case: getattr(case, "name", case))
def test_the_bytes_of_one_product_are_those_of_the_functions(recipe: Recipe, layout: str) -> None:
    for dtype, mx, needs in RUNS + (FEWER if recipe.name == "mxfp8" else []):
        got, want, _ = fused_and_composed(JOINED[layout], recipe, dtype, mx, needs)
        names = {name for name in got if got[name] is not None}
        assert names == {name for name in want if want[name] is not None}
        same_bytes([got[name] for name in names], [want[name] for name in names])


def test_gate_and_up_are_saved_and_h_is_not() -> None:
    """Saved with the weights: x of two bytes in recipe "bf16", gate and up."""
    x = randn(ROWS, D, seed=0, dtype=torch.bfloat16).requires_grad_()
    gate_up = randn(E, D, 2 * F, seed=1, dtype=torch.bfloat16).requires_grad_()
    down = randn(E, F, D, seed=2, dtype=torch.bfloat16).requires_grad_()
    prob, sizes = probabilities(ROWS).requires_grad_(), {}
    given = {t.untyped_storage().data_ptr() for t in (x, gate_up, down, prob)}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in given:
            sizes[storage.data_ptr()] = storage.nbytes(), t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layout = {"transposed": True, "interleaved": True}
        packed_ffn("test", x, gate_up, down, ENDS, RECIPES["bf16"], SwiGLU(), prob=prob, **layout)
    assert sum(nbytes for nbytes, _ in sizes.values()) - ENDS.nbytes <= ROWS * 4 * F


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
