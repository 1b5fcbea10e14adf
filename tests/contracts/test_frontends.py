"""PyTorch and JAX on a CPU: the bits of a whole layer, and the first op that differs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mxep.core_kernels.policy.router import RouterConfig
from mxep.jax_frontend.routing import router as jax_router
from mxep.torch_frontend.routing import router as torch_router

from ..compare import same_bytes, to_numpy
from . import jax_layers, torch_layers
from .table import Row

SEEDS = range(20)
ROW: Row = {"exchange": "one device", "prob_in": "swiglu", "extras": "plain", "dtype": "float32"}


def tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def both(recipe: str) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Of each seed the results in PyTorch and in JAX, of the same arrays."""
    row = {**ROW, "recipe": recipe}
    config = jax_layers.config_of(row)
    moe, step = torch_layers.layer_of(row, "cpu"), jax_layers.step_of(jax_layers.layer_of(config, "one device", 1))
    found = []
    for seed in SEEDS:
        x = torch_layers.tokens(row, "cpu", seed)
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for p in moe.experts.parameters():
                p.normal_(std=p.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(seed))
        of_torch = {name: to_numpy(t) for name, t in torch_layers.step(moe, x, dy).items()}
        named = {name: jnp.asarray(to_numpy(p)) for name, p in moe.named_parameters()}
        experts = {name: named[f"experts.{name}"] for name in ("w1", "w3", "w2")}
        got = step({"router": named["router.weight"], "experts": experts}, to_numpy(x), to_numpy(dy))
        params = {f"experts.{name}": grad for name, grad in got["params"]["experts"].items()}
        of_jax = {name: got[name] for name in ("y", "counts", "aux_loss", "x")} | params
        of_jax["router.weight"] = got["params"]["router"]
        found.append((of_torch, {name: np.asarray(value) for name, value in of_jax.items()}))
    return found


def share(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(got.astype(np.float64) - want).max() / np.abs(want.astype(np.float64)).max())


@pytest.mark.parametrize(
    ("recipe", "exact"),
    [("mxfp8", {"y", "counts"}), ("fp8_rowwise", {"y", "counts"}), ("bf16", {"counts"})],
    ids=["mxfp8", "fp8_rowwise", "bf16"],
)
def test_a_layer_of_equal_logits(recipe: str, exact: set[str]) -> None:
    """20 layers. Sums of MXFP8 products of 64 and 96 values fit into fp32 in any order, or are rounded to bf16."""
    for of_torch, of_jax in both(recipe):
        assert of_torch.keys() == of_jax.keys()
        for name, want in of_torch.items():
            if name in exact:
                np.testing.assert_array_equal(of_jax[name], want, err_msg=name)
            else:
                assert share(of_jax[name], want) < BOUND[recipe], (name, share(of_jax[name], want))


BOUND = {"mxfp8": 1e-6, "fp8_rowwise": 1e-6, "bf16": 2**-7}


def test_the_first_op_that_differs_is_the_product_of_the_router() -> None:
    """MKL and Eigen add in orders of their own: two thirds of the logits differ. The choice is equal."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((96, 64)).astype(np.float32), (rng.standard_normal((8, 64)) / 8).astype(np.float32)
    of_torch = to_numpy(torch_router.router_logits(tensor(x), tensor(w), None))
    of_jax = np.asarray(jax.jit(lambda x, w: jax_router.tokens_and_logits(x, w, None)[1])(x, w))
    assert (np.abs(of_torch - of_jax) <= 64 * 2**-24 * (np.abs(x) @ np.abs(w).T)).all()
    config = RouterConfig(2)
    chosen, of_same = torch_router.route(tensor(of_jax), config), jax_router.route(jnp.asarray(of_jax), config)
    for got, want in zip(chosen[:2], of_same[:2], strict=True):
        same_bytes(got, want)
