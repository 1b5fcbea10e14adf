"""The contracts of docs/determinism.md of one process on a GPU: the table, batches, rollout, streams."""

import pytest
import torch

from ...contracts.table import ON_GPUS, RECIPES, Row, all_rows, allowed, name_of
from ...contracts.torch_cases import batch_invariance, rollout
from ...contracts.torch_layers import contracts_alone, inputs, layer_of, same, step

ROW: Row = {"recipe": "mxfp8", "prob_in": "combine", "extras": "biases", "dtype": "float32"}
ALONE = all_rows({**ON_GPUS, "exchange": ("one process",)}, allowed)


@pytest.mark.parametrize("row", ALONE, ids=name_of)
def test_replay_and_forwards(row: Row) -> None:
    contracts_alone(row, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_batch_invariance(recipe: str) -> None:
    batch_invariance({**ROW, "recipe": recipe}, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_rollout(recipe: str) -> None:
    rollout(recipe, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_streams(recipe: str) -> None:
    row = {**ROW, "recipe": recipe}
    moe, (x, dy) = layer_of(row, "cuda"), inputs(row, "cuda")
    want = step(moe, x, dy)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = step(moe, x, dy)
    side.synchronize()
    same(got, want, recipe)
