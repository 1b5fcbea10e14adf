"""The expert blocks of Mixtral, Qwen3-MoE, DeepSeek-V3, Llama 4 and GPT-OSS as configurations: output and gradients
against expert_blocks.py, with packed weights unpacked and gradients packed again. The choice of experts is given."""

import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from mxep import jax_frontend as mxep_jax
from mxep import torch_frontend as mxep_torch
from torch import Tensor

from .compare import sqnr_db
from .expert_blocks import BLOCKS, HIDDEN, Block, D, E, T

# Measured, the worst of all results: bf16 45.7 dB, MXFP8 23.0 dB. Less 1.
FLOORS_DB = {"bf16": 44.7, "mxfp8": 22.0}


@cache
def reference(name: str) -> dict[str, Tensor]:
    return BLOCKS[name].reference()


def experts_of(block: Block, packed: dict[str, Tensor], num_experts: int, recipe: str) -> mxep_torch.GroupedExperts:
    activation = mxep_torch.SwiGLU(**block.numbers)
    biased = "gate_up_bias" in packed
    experts = mxep_torch.GroupedExperts(D, HIDDEN, num_experts, recipe, bias=biased, activation=activation)
    experts.load_state_dict(mxep_torch.unpack_expert_weights(**packed, **block.layout))
    return experts


def packed_gradients(block: Block, experts: mxep_torch.GroupedExperts) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in experts.named_parameters() if p.grad is not None}
    return mxep_torch.pack_expert_weights(grads, **block.layout)


def torch_block(block: Block, recipe: str, prob_in: str) -> dict[str, Tensor]:
    inputs, packed = block.inputs(), block.parameters()
    shared = {name.removeprefix("shared_"): packed.pop(name) for name in list(packed) if name.startswith("shared_")}
    experts = experts_of(block, packed, E, recipe)
    x, weights = (inputs[name].requires_grad_() for name in ("x", "weights"))
    order, inverse, counts = mxep_torch.sort_by_expert(inputs["experts"], E)
    rows = (x * weights if block.weigh_input else x).bfloat16()
    tokens = mxep_torch.TokenReplicas(rows, order, inverse, block.top_k)
    groups, padded_counts, route = mxep_torch.dispatch(tokens, counts, recipe=recipe)
    inside = (mxep_torch.dispatch_probs(weights, route),) if prob_in == "swiglu" else ()
    out = experts(groups, padded_counts, *inside)
    outside = None if inside or block.weigh_input else weights
    y = mxep_torch.combine(out, route, outside, out_dtype=torch.float32)
    if shared:
        one = experts_of(block, shared, 1, recipe)
        y = y + one(x, torch.tensor([T]))
    y.backward(inputs["dy"])
    results = {"y": y.detach(), "x": x.grad, "weights": weights.grad} | packed_gradients(block, experts)
    if shared:
        results |= {f"shared_{name}": grad for name, grad in packed_gradients(block, one).items()}
    return results


@pytest.mark.parametrize("recipe", FLOORS_DB)
@pytest.mark.parametrize(
    ("name", "prob_in"), [*((name, "combine") for name in BLOCKS), ("mixtral", "swiglu"), ("gpt_oss", "swiglu")]
)
def test_torch(name: str, prob_in: str, recipe: str) -> None:
    got, want = torch_block(BLOCKS[name], recipe, prob_in), reference(name)
    assert got.keys() == want.keys()
    decibels = {key: sqnr_db(got[key], value) for key, value in want.items()}
    assert min(decibels.values()) > FLOORS_DB[recipe], decibels


@pytest.mark.parametrize("name", ["llama4", "gpt_oss"])
def test_jax(name: str) -> None:
    """The rows of experts, sorted and weighed by hand."""
    block, want = BLOCKS[name], reference(name)
    inputs = {key: jnp.asarray(value.numpy()) for key, value in block.inputs().items()}
    packed = {key: jnp.asarray(value.numpy()) for key, value in block.parameters().items() if "shared" not in key}
    activation, slot = mxep_jax.SwiGLU(**block.numbers), jnp.argsort(inputs["experts"].reshape(-1), stable=True)
    ends = jnp.cumsum(jnp.bincount(inputs["experts"].reshape(-1), length=E))

    def layer(x, weights, packed):
        parts = mxep_jax.unpack_expert_weights(**packed, **block.layout)
        token, weight = slot // block.top_k, weights.reshape(-1)[slot]
        rows = x[token] * weight[:, None] if block.weigh_input else x[token]
        prob = None if block.weigh_input else weight
        ffn = partial(mxep_jax.grouped_swiglu_ffn, group_ends=ends, prob=prob, activation=activation, recipe="mxfp8")
        return jnp.zeros((T, D)).at[token].add(ffn(rows, **parts).astype(jnp.float32))

    @jax.jit
    def run(x, weights, packed, dy):
        y, backward = jax.vjp(layer, x, weights, packed)
        return y, backward(dy)

    y, (dx, dweights, dpacked) = run(inputs["x"], inputs["weights"], packed, inputs["dy"])
    got = {"y": y, "x": dx, "weights": dweights, **dpacked}
    shared = _without_shared(block) if block.shared else want
    for key, value in got.items():
        assert sqnr_db(np.asarray(value), shared[key]) > FLOORS_DB["mxfp8"], key


def _without_shared(block: Block) -> dict[str, Tensor]:
    return Block(**{**vars(block), "shared": False}).reference()


LAYOUTS = [{"interleaved": i, "transposed": t} for i in (False, True) for t in (False, True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_packing_is_the_inverse_of_unpacking(layout: dict[str, bool], bias: bool) -> None:
    packed = Block(BLOCKS["mixtral"].route, 2, layout, bias=bias).parameters()
    parts = mxep_torch.unpack_expert_weights(**packed, **layout)
    again = mxep_torch.pack_expert_weights(parts, **layout)
    assert again.keys() == packed.keys()
    by_jax = mxep_jax.unpack_expert_weights(**{k: jnp.asarray(v.numpy()) for k, v in packed.items()}, **layout)
    again_by_jax = mxep_jax.pack_expert_weights(by_jax, **layout)
    for name, value in packed.items():
        assert torch.equal(again[name], value)
        assert again[name].is_contiguous()
        np.testing.assert_array_equal(again_by_jax[name], value.numpy())
    for name, value in parts.items():
        np.testing.assert_array_equal(by_jax[name], value.numpy())


def test_the_program_of_the_page_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(program, "docs/models.md", "exec"), {})


W = BLOCKS["mixtral"].parameters()
GATE_UP, DOWN = W["gate_up"], W["down"]
PARTS = mxep_torch.unpack_expert_weights(GATE_UP, DOWN)
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


@pytest.mark.parametrize("frontend", [mxep_torch, mxep_jax], ids=["torch", "jax"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_layout_is_named(name: str, frontend) -> None:
    error, message, call = BAD[name]
    array = (lambda t: t) if frontend is mxep_torch else (lambda t: jnp.asarray(t.numpy()))
    with pytest.raises(error, match=message):
        call(frontend, array)
