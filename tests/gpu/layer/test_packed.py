"""On a GPU: the feed-forward is bitwise equal with packed and separate weights, and with transposed and stored ones."""

import pytest
import torch
from mxep.torch_frontend import Recipe, grouped_mm

from ...compare import same_bytes
from ...torch_frontend.integrations.packed import (
    ALL,
    ENDS,
    JOINED,
    NEEDS,
    ROWS,
    D,
    E,
    F,
    both,
    fused_and_composed,
    randn,
)


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("mx", [False, True], ids=["", "mx"])
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_the_bytes_of_packed_weights(recipe: Recipe, mx: bool, times: int) -> None:
    for needs in NEEDS:
        got, want = both(recipe, torch.bfloat16, mx, needs, "cuda", times, weighted=True)
        same_bytes([g for g in got if g is not None], [w for w in want if w is not None])


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("layout", JOINED)
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_the_bytes_of_one_product_of_gate_and_up(recipe: Recipe, layout: str, times: int) -> None:
    for dtype, mx, needs in [(torch.float32, False, NEEDS[0]), (torch.bfloat16, True, NEEDS[0])]:
        got, want, bound = fused_and_composed(JOINED[layout], recipe, dtype, mx, needs, "cuda", times)
        assert {name for name in got if got[name] is None} == {name for name in want if want[name] is None}
        if bound is not None:
            assert ((got.pop("prob").double() - want.pop("prob")).abs() <= bound).all()
        names = [name for name in got if got[name] is not None]
        same_bytes([got[name] for name in names], [want[name] for name in names])


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_the_bytes_of_transposed_weights(recipe: Recipe, times: int) -> None:
    x = randn(ROWS * times, D * times, seed=0, dtype=torch.bfloat16).cuda().requires_grad_()
    w = randn(E, F * times, D * times, seed=1, dtype=torch.bfloat16).cuda().requires_grad_()
    dout = randn(ROWS * times, F * times, seed=2, dtype=torch.bfloat16).cuda()
    stored, results = w.detach().mT.contiguous().requires_grad_(), []
    for weight, leaf in ((w, w), (stored.mT, stored)):
        out = grouped_mm(x, weight, (ENDS * times).cuda(), recipe=recipe)
        dx, dw = torch.autograd.grad(out, [x, leaf], dout)
        results.append((out, dx, dw if leaf is w else dw.mT.contiguous()))
    same_bytes(*results)
