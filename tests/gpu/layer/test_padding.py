"""The tests of padding of both frontends, on a GPU: CUDA C++ and Triton in place of C++."""

from typing import Any

import pytest

from ...jax_frontend.products import test_padding as of_jax
from ...torch_frontend.products import test_padding as of_torch

RECIPES = sorted(of_jax.RECIPES)
recipes = pytest.mark.parametrize("recipe", RECIPES)
no_warning = pytest.mark.filterwarnings("ignore:.*the last end is")


@no_warning
@pytest.mark.parametrize("kind", ["bf16", "gathered"])
@recipes
def test_torch(recipe: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for biased in (False, True):
        of_torch.test_a_feed_forward(recipe, kind, biased, monkeypatch)
    of_torch.test_a_product(recipe, kind, monkeypatch)
    of_torch.test_a_layer(recipe, "swiglu", monkeypatch)


@no_warning
@recipes
def test_jax(recipe: str) -> None:
    none: Any = None  # the products of a GPU write no zeros
    of_jax.test_a_feed_forward(recipe, "bf16", False, none)
    if of_jax.RECIPES[recipe].mx:
        of_jax.test_a_feed_forward(recipe, "gathered", False, none)
    of_jax.test_a_public_feed_forward(recipe)
    of_jax.test_a_layer(recipe, none)
