"""What `Recipe.mxfp8_all_to_all` costs: the table of docs/results/expert_parallel.md, and refused names."""

import re
from pathlib import Path

import pytest
import torch
from mxep.core_kernels.policy.recipe import Recipe, TransferName
from mxep.torch_frontend import TokenReplicas, combine, dispatch, grouped_swiglu_ffn, sort_by_expert
from torch import Tensor

PAGE = Path(__file__).parents[3] / "docs" / "results" / "expert_parallel.md"
T, D, F, E, K = 512, 256, 256, 4, 2
TRANSFERS: tuple[TransferName, ...] = ("dispatch", "dispatch_grad", "combine", "combine_grad")
MARGIN_DB = 0.2


def values() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (T, D), (E, F, D), (E, F, D), (E, D, F)
    x, *weights = (torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes)
    return (x * D**0.5).bfloat16(), *weights, torch.rand(T, K, generator=generator)


CHOSEN = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]).int()
DY = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).bfloat16()


def layer(recipe: Recipe) -> list[Tensor]:
    """y and the gradients of x, w1, w2 and the probabilities."""
    x, w1, w3, w2, probs = (value.requires_grad_() for value in values())
    order, inverse, counts = sort_by_expert(CHOSEN, E)
    groups, _, route = dispatch(TokenReplicas(x, order, inverse, K), counts, recipe=recipe)
    out = grouped_swiglu_ffn(groups, w1, w3, w2, route.group_ends, recipe=recipe, pad_token_groups=False)
    y = combine(out, route, probs)
    return [y, *torch.autograd.grad(y, (x, w1, w2, probs), DY)]


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    """The layer in fp64."""
    x, w1, w3, w2, probs = (value.double().requires_grad_() for value in values())
    y = torch.zeros(T, D, dtype=torch.float64)
    for k in range(K):
        for e in range(E):
            rows = (CHOSEN[:, k] == e).nonzero().squeeze(1)
            h = torch.nn.functional.silu(x[rows] @ w1[e].T) * (x[rows] @ w3[e].T)
            y = y.index_add(0, rows, probs[rows, k, None] * (h @ w2[e].T))
    return [y, *torch.autograd.grad(y, (x, w1, w2, probs), DY.double())]


def sqnr_db(got: Tensor, want: Tensor) -> float:
    return (10 * torch.log10(want.square().sum() / (got.double() - want).square().sum())).item()


def rows_of_the_page() -> list[tuple[str, str, list[float]]]:
    found = re.findall(r"^\| `([\w]+)` \| ([\w, `]+) \| ((?:[\d.]+ \|? ?)+)$", PAGE.read_text(), re.MULTILINE)
    return [
        (recipe, transfers, [float(db) for db in re.findall(r"[\d.]+", figures)])
        for recipe, transfers, figures in found
    ]


@pytest.mark.parametrize(("recipe", "transfers", "figures"), rows_of_the_page())
def test_the_page_has_what_is_measured(exact: list[Tensor], recipe: str, transfers: str, figures: list[float]) -> None:
    names = TRANSFERS if transfers == "all" else tuple(re.findall(r"`(\w+)`", transfers))
    got = layer(Recipe.parse(recipe, mxfp8_all_to_all=names))
    measured = [sqnr_db(one, other) for one, other in zip(got, exact, strict=True)]
    print(recipe, transfers, " | ".join(f"{db:.1f}" for db in measured))
    assert len(figures) == len(measured)
    assert all(abs(db - figure) <= MARGIN_DB for db, figure in zip(measured, figures, strict=True)), measured


def test_the_page_has_rows() -> None:
    assert len(rows_of_the_page()) == 10


def test_recipes_that_say_the_same_are_equal() -> None:
    """As all ranks of a layer must be."""
    given = (("combine", "dispatch"), ("dispatch", "combine", "dispatch"))
    one, other = (Recipe.parse("mxfp8", mxfp8_all_to_all=transfers) for transfers in given)
    assert one == other


@pytest.mark.parametrize("transfers", ["dispatch", ("there",), ["dispatch"], ({},)])
def test_other_names_are_refused(transfers: object) -> None:
    with pytest.raises(ValueError, match=r"Recipe: mxfp8_all_to_all: got .*; allowed: None or a tuple of 'dispatch'"):
        Recipe.parse("mxfp8", mxfp8_all_to_all=transfers)
