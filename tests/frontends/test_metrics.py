"""Both frontends describe the same statistics by the same numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.policy.metrics import MoEMetrics


@pytest.mark.parametrize("recipe", sorted(torch_frontend.RECIPES))
def test_the_frontends_agree(recipe: str) -> None:
    counts = np.array([3, 0, 8, 1], np.int32)
    in_torch = torch_frontend.MoEStats(torch.from_numpy(counts), torch.tensor(1.0), torch.tensor(2))
    in_jax = jax_frontend.MoEStats(jnp.asarray(counts), jnp.asarray(1.0), jnp.asarray(2))
    options = {"recipe": recipe, "ranks": 2, "prob_in": "swiglu"}
    found = in_torch.metrics(64, **options)
    assert found == in_jax.metrics(64, **options)
    assert set(found) == set(MoEMetrics.__annotations__)
    assert (found["imbalance"], found["dead_experts"], found["overflow"]) == (8 * 4 / 12, 1, 2)


@pytest.mark.parametrize("ranks", [3, 8])
def test_ranks_that_cannot_share_the_experts(ranks: int) -> None:
    in_torch = torch_frontend.MoEStats(torch.ones(4, dtype=torch.int32), torch.tensor(1.0), torch.tensor(0))
    in_jax = jax_frontend.MoEStats(jnp.ones(4, int), jnp.asarray(1.0), jnp.asarray(0))
    for stats in (in_torch, in_jax):
        with pytest.raises(ValueError, match=f"MoEStats.metrics: ranks: got {ranks}; allowed: divisors of 4, the exp"):
            stats.metrics(32, ranks=ranks)
