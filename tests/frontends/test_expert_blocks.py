"""The MoE blocks of Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, DeepSeek-V3, Llama 4 and GPT-OSS as configurations of a
layer: output and every gradient against the installed transformers in fp64; and the layouts of packed weights."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mxep import jax_frontend as mxep_jax
from mxep import torch_frontend as mxep_torch
from mxep.jax_frontend.integrations import layouts as jax_layouts
from mxep.torch_frontend.integrations import layouts as torch_layouts
from torch import Tensor

from ..compare import sqnr_db
from ..layer_options import layer_options
from .expert_blocks import BLOCKS, HIDDEN, Block, D, E

# Measured, the worst of all results: bf16 45.7 dB, MXFP8 22.7; of the router's gradients, which sum few values: bf16
# 45.4 dB, MXFP8 21.2. Less 0.7 to 1.
FLOORS_DB = {"bf16": 44.7, "mxfp8": 22.0}
ROUTER_FLOORS_DB = {"bf16": 44.4, "mxfp8": 20.2}
PREFIXES = {"router": "router.weight", "router_bias": "router.bias", "shared_gate": "shared_gate.weight"}


def name_in_torch(name: str) -> str:
    """The parameter of MoE with a block's weight."""
    if name in PREFIXES:
        return PREFIXES[name]
    return f"shared_expert.{name.removeprefix('shared_')}" if name.startswith("shared_") else f"experts.{name}"


def torch_block(block: Block, recipe: str, **changes: str) -> dict[str, Tensor]:
    biased, options = block.selection_bias is not None, block.options | changes
    options |= {"activation": mxep_torch.SwiGLU(**block.numbers), "selection_bias": biased, "recipe": recipe}
    moe = mxep_torch.MoE(D, HIDDEN, E, **layer_options(block.top_k, **options))
    weights = block.weights()
    state = {name_in_torch(name): w for name, w in weights.items()}
    moe.load_state_dict(state | ({"selection_bias": block.selection_bias} if biased else {}))
    x = block.x.requires_grad_()
    y, _ = moe(x)
    y.backward(block.dy)
    assert x.grad is not None
    grads = {name: moe.get_parameter(name_in_torch(name)).grad for name in weights}
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("recipe", FLOORS_DB)
@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in BLOCKS), *((name, {"prob_in": "combine"}) for name in ("mixtral", "gpt_oss"))],
    ids=lambda value: value if isinstance(value, str) else value.get("prob_in", ""),
)
def test_torch(name: str, changes: dict[str, str], recipe: str) -> None:
    close_to_the_library(torch_block(BLOCKS[name], recipe, **changes), BLOCKS[name], recipe)


def close_to_the_library(got: dict[str, Any], block: Block, recipe: str) -> None:
    assert got.keys() == block.reference.keys()
    decibels = {key: sqnr_db(got[key], value) for key, value in block.reference.items()}
    for key, value in decibels.items():
        assert value > (ROUTER_FLOORS_DB if key.startswith("router") else FLOORS_DB)[recipe], decibels


def jax_params(block: Block) -> mxep_jax.moe.Params:
    params: mxep_jax.moe.Params = {"experts": {}}
    for name, w in block.weights().items():
        shared = name.startswith("shared_w")
        holder = params.setdefault("shared_expert", {}) if shared else params["experts"]
        holder = params if name in PREFIXES else holder
        holder[name.removeprefix("shared_") if shared else name] = jnp.asarray(w.numpy())
    return params


@pytest.mark.parametrize("name", ["llama4", "qwen2_moe", "gpt_oss"])
def test_jax(name: str) -> None:
    block = BLOCKS[name]
    options = block.options | {"activation": mxep_jax.SwiGLU(**block.numbers), "recipe": "mxfp8"}
    config = mxep_jax.MoEConfig(D, HIDDEN, E, **layer_options(block.top_k, **options))

    @jax.jit
    def run(params, x, dy):
        y, backward = jax.vjp(lambda *arguments: mxep_jax.moe.apply(*arguments, config)[0], params, x)
        return y, backward(dy)

    y, (grads, dx) = run(jax_params(block), jnp.asarray(block.x.numpy()), jnp.asarray(block.dy.numpy()))
    got = {"y": y, "x": dx, **grads.pop("experts")}
    got |= {f"shared_{key}": value for key, value in grads.pop("shared_expert", {}).items()} | grads
    close_to_the_library(got, block, "mxfp8")


# --- layouts -----------------------------------------------------------------------------------------------


def packed_weights(transposed: bool = False, bias: bool = False) -> dict[str, Tensor]:
    """Random values of gate_up and down, and of both biases or none."""
    shapes = {"gate_up": (E, 2 * HIDDEN, D), "down": (E, D, HIDDEN)}
    shapes |= {"gate_up_bias": (E, 2 * HIDDEN), "down_bias": (E, D)} if bias else {}
    packed = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}
    return {name: w.mT.contiguous() if transposed and w.dim() == 3 else w for name, w in packed.items()}


LAYOUTS = [{"interleaved": i, "transposed": t} for i in (False, True) for t in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packing_is_the_inverse_of_unpacking(layout: dict[str, bool], bias: bool) -> None:
    packed = packed_weights(layout["transposed"], bias)
    parts = torch_layouts.unpack_expert_weights(**packed, **layout)
    again = torch_layouts.pack_expert_weights(parts, **layout)
    assert again.keys() == packed.keys()
    by_jax = jax_layouts.unpack_expert_weights(**{k: jnp.asarray(v.numpy()) for k, v in packed.items()}, **layout)
    again_by_jax = jax_layouts.pack_expert_weights(by_jax, **layout)
    for name, value in packed.items():
        assert torch.equal(again[name], value)
        assert again[name].is_contiguous()
        np.testing.assert_array_equal(again_by_jax[name], value.numpy())
    for name, value in parts.items():
        np.testing.assert_array_equal(by_jax[name], value.numpy())


def test_the_program_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "models.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(program, "docs/guides/models.md", "exec"), {})


W = packed_weights()
GATE_UP, DOWN = W["gate_up"], W["down"]
PARTS = torch_layouts.unpack_expert_weights(GATE_UP, DOWN)
BAD = {
    "2 dims": (ValueError, "down: got shape", lambda f, a: f.unpack_expert_weights(a(GATE_UP), a(DOWN[0]))),
    "transposed": (ValueError, "or pass transposed", lambda f, a: f.unpack_expert_weights(a(GATE_UP.mT), a(DOWN.mT))),
    "one bias": (ValueError, "both or neither", lambda f, a: f.unpack_expert_weights(a(GATE_UP), a(DOWN), a(DOWN[0]))),
    "bias": (
        ValueError, r"gate_up_bias: got shape \(64, 96\); allowed: \(8, 192\)",
        lambda f, a: f.unpack_expert_weights(a(GATE_UP), a(DOWN), a(DOWN[0]), a(DOWN[0])),
    ),
    "list": (TypeError, "gate_up: got", lambda f, a: f.unpack_expert_weights([1], a(DOWN))),
    "flag": (TypeError, "interleaved: got", lambda f, a: f.unpack_expert_weights(a(GATE_UP), a(DOWN), interleaved=1)),
    "no w3": (ValueError, "no 'w3'", lambda f, a: f.pack_expert_weights({"w1": a(PARTS["w1"]), "w2": a(PARTS["w2"])})),
    "no b2": (
        ValueError, "no 'b3'",
        lambda f, a: f.pack_expert_weights({**{k: a(v) for k, v in PARTS.items()}, "b1": a(DOWN[0])}),
    ),
    "shape": (
        ValueError, r"w1: got shape \(8, 64, 96\); allowed: \(8, 96, 64\)",
        lambda f, a: f.pack_expert_weights({k: a(v) for k, v in (PARTS | {"w1": PARTS["w2"]}).items()}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("frontend", [torch_layouts, jax_layouts], ids=["torch", "jax"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_layout_is_named(name: str, frontend) -> None:
    error, message, call = BAD[name]
    array = (lambda t: t) if frontend is torch_layouts else (lambda t: jnp.asarray(t.numpy()))
    with pytest.raises(error, match=message):
        call(frontend, array)


OTHER_DTYPES = ("complex64", "bool", "int32")
FLOAT4 = "float4_e2m1fn_x2"
"""Of PyTorch alone. An element is two values."""


@pytest.mark.parametrize(
    ("frontend", "dtype"),
    [*((torch_layouts, dtype) for dtype in (*OTHER_DTYPES, FLOAT4)), *((jax_layouts, dtype) for dtype in OTHER_DTYPES)],
)
def test_the_elements_are_floats(frontend, dtype: str) -> None:
    def array(x: torch.Tensor):
        return x if frontend is torch_layouts else jnp.asarray(x.numpy())

    def wrong(x: torch.Tensor):
        if dtype == FLOAT4:
            return torch.zeros(x.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        return array(x.to(getattr(torch, dtype)))

    got = rf"got dtype (torch\.)?{dtype}; allowed: floating-point dtypes"
    parts = {name: array(x) for name, x in PARTS.items()}
    for name in PARTS:
        with pytest.raises(TypeError, match=f"pack_expert_weights: {name}: {got}"):
            frontend.pack_expert_weights(parts | {name: wrong(PARTS[name])})
    biases = {"gate_up_bias": GATE_UP[:, :, 0], "down_bias": DOWN[:, :, 0]}
    packed = {"gate_up": GATE_UP, "down": DOWN, **biases}
    for name, x in packed.items():
        given = {key: array(value) for key, value in packed.items()} | {name: wrong(x)}
        with pytest.raises(TypeError, match=f"unpack_expert_weights: {name}: {got}"):
            frontend.unpack_expert_weights(**given)
