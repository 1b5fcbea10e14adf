"""The layer of bf16 tokens has the same bytes in PyTorch and under `jax.jit`, which may drop roundings to bf16.

The frameworks' matrix products add in orders of their own: of fp32 sums the last bit may differ, of their roundings to
bf16 few. The tests allow that share of all values."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from mxep import jax_frontend, torch_frontend
from mxep.jax_frontend import SharedExpert, moe

from ..compare import to_numpy
from ..layer_options import layer_options
from .test_expert_blocks import name_in_torch

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 96, 64, 96, 8, 2
RNG = np.random.default_rng(0)
X, DY = (RNG.standard_normal((TOKENS, DIM)).astype(ml_dtypes.bfloat16) for _ in range(2))


def tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)


def named(params: moe.Params) -> dict[str, Any]:
    """By the names of PyTorch."""
    shared = {f"shared_{name}": w for name, w in params.get("shared_expert", {}).items()}
    others = {name: w for name, w in params.items() if name not in ("experts", "shared_expert")}
    return {name_in_torch(name): w for name, w in (params["experts"] | shared | others).items()}


def of_torch(params: moe.Params, options: dict[str, Any]) -> dict[str, Any]:
    layer = torch_frontend.MoE(DIM, HIDDEN, EXPERTS, dtype=torch.bfloat16, **layer_options(TOP_K, **options))
    layer.load_state_dict({name: tensor(w) for name, w in named(params).items()})
    x = tensor(X).requires_grad_()
    y, _ = layer(x)
    y.backward(tensor(DY))
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize(
    "options",
    [
        {"shared": SharedExpert(64, gate=True)},
        {"shared": SharedExpert(64), "prob_in": "input"},
        {"router_bias": True, "score_func": "softmax_of_chosen"},
    ],
    ids=["Qwen2-MoE", "Llama 4", "GPT-OSS"],
)
def test_a_layer_of_bf16(options: dict[str, Any]) -> None:
    """Measured: no value differs. With the roundings that jit dropped 4 and 16% of y did, with a second rounding of
    dx in PyTorch 16% of dx."""
    config = jax_frontend.MoEConfig(DIM, HIDDEN, EXPERTS, **layer_options(TOP_K, **options))
    params = moe.init(jax.random.key(0), config, jnp.bfloat16)
    if "router_bias" in params:
        params["router_bias"] = jax.random.normal(jax.random.key(1), (EXPERTS,), jnp.bfloat16)

    def run(params: moe.Params, x: jax.Array) -> dict[str, Any]:
        y, backward, _ = jax.vjp(lambda *args: moe.apply(*args, config), params, x, has_aux=True)
        dparams, dx = backward(jnp.asarray(DY))
        return {"y": y, "x": dx, **named(dparams)}

    traced = jax.jit(run)(params, X)
    for name, want in of_torch(params, options).items():
        assert (to_numpy(traced[name]) != to_numpy(want)).mean() < 0.002, name
