"""The layer with biases and a clamped SwiGLU in both frontends: in parallel and in a report.

Its values: test_expert_blocks.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep import jax_frontend as mxep_jax
from mxep import torch_frontend as mxep_torch
from mxep.core_kernels.swiglu.activation import SwiGLU

from ..compare import sqnr_db

D, HIDDEN, E, TOP_K, TOKENS = 64, 96, 8, 2, 48
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
OPTIONS = {"bias": True, "activation": GPT_OSS}
NAMES = ("w1", "w3", "w2", "b1", "b3", "b2")
RNG = np.random.default_rng(0)
SHAPES = {"router": (E, D), "w1": (E, HIDDEN, D), "w3": (E, HIDDEN, D), "w2": (E, D, HIDDEN)}
PARAMS = {name: RNG.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in SHAPES.items()}
PARAMS |= {name: RNG.standard_normal((E, n), np.float32) for name, n in (("b1", HIDDEN), ("b3", HIDDEN), ("b2", D))}
X, DY = RNG.standard_normal((2, TOKENS, D), np.float32)


def torch_layer(recipe: str, prob_in: str) -> mxep_torch.MoE:
    moe = mxep_torch.MoE(D, HIDDEN, E, mxep_torch.RouterConfig(TOP_K, prob_in=prob_in), recipe=recipe, **OPTIONS)
    values = {f"experts.{name}": torch.from_numpy(PARAMS[name]) for name in NAMES}
    moe.load_state_dict(values | {"router.weight": torch.from_numpy(PARAMS["router"])})
    return moe


def config(recipe: str, prob_in: str) -> mxep_jax.MoEConfig:
    return mxep_jax.MoEConfig(D, HIDDEN, E, mxep_jax.RouterConfig(TOP_K, prob_in=prob_in), recipe=recipe, **OPTIONS)


TREE = {"router": jnp.asarray(PARAMS["router"]), "experts": {name: jnp.asarray(PARAMS[name]) for name in NAMES}}


def results(layer) -> dict[str, np.ndarray]:
    @jax.jit
    def run(params, x, dy):
        y, backward = jax.vjp(layer, params, x)
        return y, backward(dy)

    y, (params, x) = run(TREE, X, DY)
    found = {"y": y, "x": x, "router.weight": params["router"], **params["experts"]}
    return {name: np.asarray(value) for name, value in found.items()}


def by_jax(recipe: str, prob_in: str) -> dict[str, np.ndarray]:
    return results(lambda params, x: mxep_jax.moe.apply(params, x, config(recipe, prob_in))[0])


def test_two_devices_of_jax_give_the_answer_of_one() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("ep",))
    specs = {"router": P(), "experts": P("ep")}
    apply = partial(mxep_jax.moe.apply, config=config("mxfp8", "combine"), axis_name="ep")
    layer = jax.shard_map(lambda p, x: apply(p, x)[0], mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))
    got, want = results(layer), by_jax("mxfp8", "combine")
    for name, value in want.items():
        assert sqnr_db(got[name], value) > 60, name


def test_a_report_follows_biases_and_activation() -> None:
    """Both frontends report the same, and something else than of the layer without."""
    x, dout = torch.from_numpy(X), torch.from_numpy(DY)
    found = mxep_torch.numerics_report(torch_layer("mxfp8", "combine"), x, dout).operands
    other = mxep_jax.numerics_report(TREE, jnp.asarray(X), config("mxfp8", "combine"), jnp.asarray(DY)).operands
    plain = torch_layer("mxfp8", "combine")
    plain.experts.activation = SwiGLU()
    for name in ("b1", "b3", "b2"):
        torch.nn.init.zeros_(getattr(plain.experts, name))
    without = mxep_torch.numerics_report(plain, x, dout).operands
    for name, want in found.items():
        assert other[name][4:] == pytest.approx(want[4:], abs=0.1), name
    assert all(found[name] != without[name] for name in ("h", "dgate", "dup", "h_t"))
    assert found["x"] == without["x"]


def test_without_biases_there_are_no_parameters() -> None:
    assert set(dict(mxep_torch.GroupedExperts(D, HIDDEN, E).named_parameters())) == {"w1", "w2", "w3"}
    plain = mxep_jax.moe.init(jax.random.key(0), mxep_jax.MoEConfig(D, HIDDEN, E, mxep_jax.RouterConfig(TOP_K)))
    assert set(plain["experts"]) == {"w1", "w2", "w3"}
    biased = mxep_jax.moe.init(jax.random.key(0), config("bf16", "combine"))
    assert {name: b.shape for name, b in biased["experts"].items()} == {name: PARAMS[name].shape for name in NAMES}
    assert not any(biased["experts"][name].any() for name in ("b1", "b3", "b2"))
    experts = mxep_torch.GroupedExperts(D, HIDDEN, E, bias=True)
    assert {name: tuple(p.shape) for name, p in experts.named_parameters()} == {n: PARAMS[n].shape for n in NAMES}
    assert not any(b.any() for b in (experts.b1, experts.b3, experts.b2))


PLAIN = mxep_jax.MoEConfig(D, HIDDEN, E, mxep_jax.RouterConfig(TOP_K))
NO_B3 = {**TREE, "experts": {name: w for name, w in TREE["experts"].items() if name != "b3"}}


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "GroupedExperts: bias: got 1", lambda: mxep_torch.GroupedExperts(D, HIDDEN, E, bias=1)),
        (
            TypeError,
            "activation: got 'silu'",
            lambda: mxep_torch.MoE(D, HIDDEN, E, mxep_torch.RouterConfig(2), activation="silu"),
        ),
        (
            TypeError,
            "MoEConfig: bias: got int",
            lambda: mxep_jax.MoEConfig(D, HIDDEN, E, mxep_jax.RouterConfig(2), bias=1),
        ),
        (
            TypeError,
            "MoEConfig: activation: got None",
            lambda: mxep_jax.MoEConfig(D, HIDDEN, E, mxep_jax.RouterConfig(2), activation=None),
        ),
        (ValueError, "params 'b.': got a bias; allowed: none", lambda: mxep_jax.moe.apply(TREE, X, PLAIN)),
        (ValueError, "got no 'b3'", lambda: mxep_jax.moe.apply(NO_B3, X, config("bf16", "combine"))),
    ],
)
def test_bad_input(error: type[Exception], message: str, call) -> None:
    with pytest.raises(error, match=message):
        call()
