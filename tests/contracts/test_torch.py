"""The contracts of docs/determinism.md of one process in PyTorch on a CPU, and their exceptions there."""

import pytest
import torch
from mxep.torch_frontend import grouped_swiglu_ffn
from mxep.torch_frontend.routing.router import router_logits

from .table import RECIPES, Row
from .torch_cases import batch_invariance, rollout
from .torch_layers import inputs, layer_of, near, same, step, tokens

ROW: Row = {"recipe": "mxfp8", "prob_in": "combine", "extras": "biases", "dtype": "float32"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_batch_invariance(recipe: str) -> None:
    batch_invariance({**ROW, "recipe": recipe}, "cpu")


@pytest.mark.parametrize("prob_in", ["swiglu", "input"])
def test_batch_invariance_with_a_shared_expert(prob_in: str) -> None:
    batch_invariance({**ROW, "prob_in": prob_in, "extras": "shared", "dtype": "bfloat16"}, "cpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_rollout(recipe: str) -> None:
    rollout(recipe, "cpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads(recipe: str) -> None:
    """Outputs and gradients of one and of two threads."""
    row, before, found = {**ROW, "recipe": recipe}, torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(step(layer_of(row, "cpu"), *inputs(row, "cpu")))
    finally:
        torch.set_num_threads(before)
    same(found[1], found[0], recipe)


def test_exception_of_one_row_of_the_router() -> None:
    """A product of one row is a matrix times a vector, which adds in another order. Measured: 3.3e-7."""
    rng = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 256, generator=rng), torch.randn(8, 256, generator=rng) / 16
    together = router_logits(x, w, None)
    for i in range(len(x)):
        near(router_logits(x[i : i + 1], w, None), together[i : i + 1], 1e-6, i)


def test_exception_of_the_gate_of_a_shared_expert() -> None:
    """A product with one column is such a product for any number of rows. Measured: 5.0e-8."""
    row = {**ROW, "extras": "gated"}
    moe, rng = layer_of(row, "cpu"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        moe.get_parameter("shared_gate.weight").normal_(generator=rng)
        x = tokens(row, "cpu") + torch.randn(1, generator=rng)
        for number in (2, 5, 17, 33):
            near(moe(x[:number])[0], moe(x)[0][:number], 1e-6, number)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise"])
def test_exception_of_long_sums(recipe: str) -> None:
    """fp32 sums of 1024 products are not exact, and MKL adds them in an order that depends on the number of rows: with
    two threads one value in thousands rounds to another bf16 value. Measured: 4.3e-5 of the largest."""
    rng = torch.Generator().manual_seed(1)
    w1, w3, w2 = (torch.randn(1, *of, generator=rng) / 32 for of in ((512, 1024), (512, 1024), (1024, 512)))
    x = torch.randn(256, 1024, generator=rng).bfloat16()

    def run(number: int) -> torch.Tensor:
        return grouped_swiglu_ffn(x[:number], w1, w3, w2, torch.tensor([number], dtype=torch.int32), recipe=recipe)

    want = run(256)
    for number in (3, 7, 9):
        near(run(number).float(), want[:number].float(), 2**-7, number)
