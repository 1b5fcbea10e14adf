"""Both frontends describe the same statistics by the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mxep import jax_frontend, torch_frontend


@pytest.mark.parametrize("recipe", sorted(torch_frontend.RECIPES))
def test_the_frontends_agree(recipe: str) -> None:
    counts = np.array([3, 0, 8, 1], np.int32)
    in_torch = torch_frontend.MoEStats(torch.from_numpy(counts), torch.tensor(1.0), torch.tensor(2))
    in_jax = jax_frontend.MoEStats(jnp.asarray(counts), jnp.asarray(1.0), jnp.asarray(2))
    options = {"recipe": recipe, "ranks": 2, "prob_in": "swiglu"}
    found = torch_frontend.moe_metrics(in_torch, 64, **options)
    assert found == jax_frontend.moe_metrics(in_jax, 64, **options)
    assert set(found) == set(torch_frontend.MoEMetrics.__annotations__)
    assert (found["imbalance"], found["dead_experts"], found["overflow"]) == (8 * 4 / 12, 1, 2)
