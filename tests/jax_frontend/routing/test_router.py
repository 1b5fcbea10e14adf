"""The router: layers with its options, routing from outside, shared experts, the balance. Bytes: tests/conformance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.reference import choice
from mxep.jax_frontend import MoEConfig, MoEStats, RouterConfig, SharedExpert, moe, route, update_selection_bias
from mxep.jax_frontend.layer.moe_layer import route_tokens
from mxep.jax_frontend.routing.router import check_chosen, tokens_and_logits

from ... import routed_layers
from ...compare import gemm_bound, sqnr_db
from ...layer_options import layer_options
from ...routed_layers import DIM, EXPERTS, HIDDEN, LAYERS, SHARED, TOP_K
from ..references import normal


def config(recipe: str = "bf16", **options) -> MoEConfig:
    sizes = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoEConfig(**layer_options(**{"recipe": recipe, **sizes, **options}))


def tree(case: routed_layers.RoutedLayer) -> dict:
    router, w1, w3, w2, shared = map(partial(jax.tree.map, jnp.asarray), case.parameters)
    return {
        "router": router,
        "experts": {"w1": w1, "w3": w3, "w2": w2},
        "shared_expert": dict(zip(("w1", "w3", "w2"), shared, strict=True)),
    }


@partial(jax.jit, static_argnums=2)
def run(params, x, layer_config, bias, dy):
    y, backward = jax.vjp(lambda p, x: moe.apply(p, x, layer_config, selection_bias=bias)[0], params, x)
    grads, dx = backward(dy)
    shared = {f"shared.{name}": grad for name, grad in grads["shared_expert"].items()}
    return {"y": y, "x": dx, "router": grads["router"], **grads["experts"], **shared}


@pytest.mark.parametrize("name", ["deepseek_v3", "as_it_is"])
def test_a_layer_with_options_is_its_definition(name: str) -> None:
    """In bf16, with the limits of tests/torch_frontend/routing/test_router.py."""
    case = LAYERS[name]
    options = config(shared=SharedExpert(SHARED), selection_bias=len(case.bias) > 0, **case.options)
    bias = jnp.asarray(case.bias) if len(case.bias) else None
    got, want = run(tree(case), case.x, options, bias, case.dy), case.expected()
    assert got.keys() == want.keys()
    measured = {key: sqnr_db(got[key], value) for key, value in want.items()}
    assert measured.pop("router") > 42.3
    assert min(measured.values()) > 44.0, measured


def test_a_shared_expert_on_two_devices() -> None:
    """Its gradient is the sum over the devices, in another order of additions: measured 143.2 dB, of the router
    139.4, less 10."""
    case = LAYERS["as_it_is"]
    options = config(shared=SharedExpert(SHARED), selection_bias=len(case.bias) > 0, **case.options)
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("ep",))
    specs = {"router": P(), "experts": P("ep"), "shared_expert": P()}
    one_rank = partial(moe.apply, config=options, axis_name="ep", selection_bias=jnp.asarray(case.bias))
    layer = jax.shard_map(lambda p, x: one_rank(p, x)[0], mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))

    @jax.jit
    def gradient(params, x):
        return jax.grad(lambda p: (layer(p, x) * case.dy).sum())(params)

    got = gradient(tree(case), case.x)
    want = run(tree(case), case.x, options, jnp.asarray(case.bias), case.dy)
    for name, grad in got["shared_expert"].items():
        assert sqnr_db(grad, want[f"shared.{name}"]) > 133
    assert sqnr_db(got["router"], want["router"]) > 129


def test_the_gradient_of_weights_and_shares() -> None:
    """Measured 138.8 dB, less 3."""
    logits, dweights, dshares = (normal(*s, seed=i, dtype="float32") for i, s in enumerate([(40, 12), (40, 3), (12,)]))

    def loss(logits):
        _, weights, shares = route(logits, RouterConfig(3, score_func="sigmoid", route_scale=1.5))
        return (weights * dweights).sum() + (shares * dshares).sum()

    options = choice.Choice(3, "sigmoid", route_scale=1.5)
    want = choice.route_vjp(np.asarray(dweights), np.asarray(dshares), np.asarray(logits), options)
    assert sqnr_db(jax.jit(jax.grad(loss))(logits), want) > 135.8


def test_the_logits_of_bf16_values() -> None:
    """fp32 sums of bf16 products, forward; bf16 gradients of an fp32 gradient, 55.5 dB, which the exact gradients have
    too after their rounding, less 0.3. With one bf16 term for the gradient they have 52.4 at most."""
    x, weight, grad = normal(60, 64), normal(8, 64, seed=1), normal(60, 8, seed=2, dtype="float32")
    logits, backward = jax.vjp(lambda x, w: tokens_and_logits(x, w, None)[1], x, weight)
    x64, w64, g64 = (np.asarray(a).astype(np.float64) for a in (x, weight, grad))
    assert logits.dtype == jnp.float32
    gemm_bound(logits, x64 @ w64.T, np.abs(x64) @ np.abs(w64).T, 64)
    dx, dweight = jax.jit(backward)(grad)
    assert dx.dtype == dweight.dtype == jnp.bfloat16
    assert sqnr_db(dx, g64 @ w64) > 55.2
    assert sqnr_db(dweight, g64.T @ x64) > 55.2


def test_the_gradients_of_experts_and_router_meet_in_one_sum() -> None:
    """One rounding to bf16 of the whole gradient of x, 55.5 dB less 0.3."""
    x, weight, grad = normal(60, 64), normal(8, 64, seed=1), normal(60, 8, seed=2, dtype="float32")
    (tokens, _), backward = jax.vjp(lambda x: tokens_and_logits(x, weight, None), x)
    np.testing.assert_array_equal(tokens, x)
    dx = normal(60, 64, seed=3)
    (got,), (of_logits,) = jax.jit(backward)((dx, grad)), jax.jit(backward)((jnp.zeros_like(dx), grad))
    want = np.float64(dx) + np.float64(grad) @ np.float64(weight)
    assert sqnr_db(got, want) > 55.2
    assert sqnr_db(of_logits + dx, want) < 54.7  # two roundings: 53.4


def test_an_infinite_gradient_of_a_logit_stays_infinite() -> None:
    x, weight = normal(3, 64), normal(8, 64, seed=1)
    grad = jnp.zeros((3, 8)).at[1, 5].set(jnp.inf)
    _, backward = jax.vjp(lambda x: tokens_and_logits(x, weight, None)[1], x)
    (dx,) = jax.jit(backward)(grad)
    want = np.zeros((3, 64), np.float32)
    want[1] = np.asarray(weight[5], np.float32) * np.inf
    np.testing.assert_array_equal(np.asarray(dx, np.float32), want)


@pytest.mark.parametrize(("dtype", "num_experts"), [("uint8", 256), ("int8", 128), ("uint32", 4)])
def test_experts_of_any_integer_dtype(dtype: str, num_experts: int) -> None:
    x, experts = jnp.ones((2, DIM)), jnp.array([[0, num_experts - 1], [1, 2]], dtype)
    check_chosen("op", x, num_experts, experts, jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="allowed: 0 to 2"):
        check_chosen("op", x, 3, experts, jnp.ones((2, 2)))


def test_a_nan_logit() -> None:
    logits = jnp.array([[0.0, 1.0, 5.0, jnp.nan]])
    assert jnp.isnan(route(logits, RouterConfig(2, score_func="softmax")).weights).all()
    assert jnp.isnan(route(logits, RouterConfig(2, score_func="sigmoid")).weights).all()
    experts, weights, _ = route(logits, RouterConfig(2, score_func="sigmoid", normalize=False))
    assert (experts.tolist(), jnp.isnan(weights).tolist()) == ([[3, 2]], [[True, False]])


def test_experts_chosen_outside() -> None:
    """The layer's own choice, given to it, changes no bit of y."""
    params = moe.init(jax.random.key(0), config(router_bias=True))
    params["router_bias"] = jnp.arange(EXPERTS, dtype=jnp.float32) / 4
    x = normal(5, 8, DIM, dtype="float32")
    want, stats = moe.apply(params, x, config(router_bias=True))
    _, own = route_tokens(params, x.reshape(-1, DIM), config().router)
    experts, weights = (a.reshape(5, 8, TOP_K) for a in (own.experts, own.weights))

    def outside(weights):
        return moe.apply(params, x, config(router_bias=True), experts=experts, weights=weights)

    got, again = outside(weights)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(again.counts, stats.counts)
    assert again.aux_loss == 0
    assert stats.counts[-1] > stats.counts[0]
    gradient = jax.grad(lambda w: (outside(w)[0] ** 2).sum())(weights)
    assert (gradient != 0).all()


def test_the_balance() -> None:
    counts = moe.apply(
        moe.init(jax.random.key(0), config()), normal(40, DIM, dtype="float32"), config(force_balance=True)
    )[1].counts
    assert counts.tolist() == [40 * TOP_K // EXPERTS] * EXPERTS
    bias = update_selection_bias(jnp.array([0.5, -1.0, 0, 0]), jnp.array([4, 0, 2, 2]), 0.25)
    assert bias.tolist() == [0.25, -0.75, 0, 0]


def test_negative_counts_are_reported_under_checkify() -> None:
    """Inside jit alone they are not: the bias of a negative count is then updated as for an idle expert."""
    update = jax.jit(lambda counts: update_selection_bias(jnp.zeros(2), counts, 0.25))
    assert update(jnp.array([3, -1])).tolist() == [-0.25, 0.25]
    error, _ = checkify.checkify(update)(jnp.array([3, -1]))
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"update_selection_bias: counts: got -1 at index 1; allowed: counts"
    ):
        error.throw()


def test_experts_that_do_not_exist_are_clipped_inside_jit() -> None:
    params, x, weights = moe.init(jax.random.key(0), config()), normal(3, DIM, dtype="float32"), jnp.ones((3, 2))
    run = jax.jit(lambda experts: moe.apply(params, x, config(), experts=experts, weights=weights))
    bad = jnp.array([[0, -3], [EXPERTS, 1], [2, 2**31 - 1]])
    jax.tree.map(np.testing.assert_array_equal, run(bad), run(jnp.clip(bad, 0, EXPERTS - 1)))
    with pytest.raises(checkify.JaxRuntimeError, match=r"moe.apply: experts: got -3 at index \(0, 1\); allowed: 0 to"):
        checkify.checkify(run)(bad)[0].throw()


LOGITS, ONES = jnp.zeros((3, 8)), jnp.ones((3, 2))
IDS = ONES.astype(jnp.int32)


def layer(**arguments) -> object:
    return moe.apply(moe.init(jax.random.key(0), config()), jnp.zeros((3, DIM)), config(), **arguments)


@pytest.mark.parametrize(
    ("error", "message", "run"),
    [
        (TypeError, r"route: logits: got dtype int32", lambda: route(LOGITS.astype(jnp.int32), RouterConfig(2))),
        (ValueError, r"route: router: got top_k=9; allowed: 1 to num_experts = 8",
         lambda: route(LOGITS, RouterConfig(9))),
        (TypeError, r"route: router: got 2; allowed: a RouterConfig, such as RouterConfig\(top_k=2\)",
         lambda: route(LOGITS, 2)),
        (ValueError, r"route: selection_bias: got None; allowed: an array",
         lambda: route(LOGITS, RouterConfig(2, selection_bias=True))),
        (ValueError, r"RouterConfig: score_func: got 'relu'", lambda: RouterConfig(2, score_func="relu")),
        (ValueError, r"RouterConfig: route_scale: got nan", lambda: RouterConfig(2, route_scale=float("nan"))),
        (ValueError, r"route: selection_bias: got shape \(7,\)",
         lambda: route(LOGITS, RouterConfig(2), selection_bias=LOGITS[0, :7])),
        (ValueError, r"MoEConfig: router: got num_groups=3", lambda: config(num_groups=3)),
        (TypeError, r"RouterConfig: num_groups: got 2.0; allowed: an int", lambda: config(num_groups=2.0)),
        (ValueError, r"SharedExpert: hidden_dim: got 40", lambda: SharedExpert(40)),
        (ValueError, rf"SharedExpert: hidden_dim: got {2**31}", lambda: SharedExpert(2**31)),
        (ValueError, rf"MoEConfig: dim: got {2**63}; allowed: .* below 2\^31", lambda: config(dim=2**63)),
        (ValueError, rf"MoEConfig: hidden_dim: got {2**31}; allowed: .*", lambda: config(hidden_dim=2**31)),
        (ValueError, rf"MoEConfig: num_experts: got {2**31}; allowed: 1 to", lambda: config(num_experts=2**31)),
        (TypeError, r"RouterConfig: bias: got 1", lambda: RouterConfig(2, bias=1)),
        (ValueError, r"moe.apply: params: got no 'shared_expert'",
         lambda: moe.apply(moe.init(jax.random.key(0), config()), LOGITS[:, :1] + jnp.zeros((3, DIM)),
                           config(shared=SharedExpert(32)))),
        (ValueError, r"moe.apply: weights: got None; allowed: an array with experts", lambda: layer(experts=IDS)),
        (ValueError, r"moe.apply: experts: got shape \(2, 2\)", lambda: layer(experts=IDS[:2], weights=ONES)),
        (ValueError, r"moe.apply: experts: got 8 at index \(1, 1\); allowed: 0 to 7",
         lambda: layer(experts=IDS.at[1:, 1].set(8), weights=ONES)),
        (ValueError, r"MoEStats.metrics: counts: got shape \(2, 8\); allowed: \(E,\), of one layer; take layer i",
         lambda: MoEStats(jnp.zeros((2, 8), int), ONES[0], IDS[0]).metrics(32)),
        (ValueError, r"moe.apply: selection_bias: got an array; allowed: None with experts",
         lambda: layer(experts=IDS, weights=ONES, selection_bias=LOGITS[0])),
        (ValueError, r"moe.apply: selection_bias: got an array; allowed: None, or RouterConfig\(selection_bias=True\)",
         lambda: layer(selection_bias=LOGITS[0])),
        (ValueError, r"moe.apply: selection_bias: got None; allowed: an array",
         lambda: moe.apply(moe.init(jax.random.key(0), config()), jnp.zeros((3, DIM)), config(selection_bias=True))),
        (ValueError, r"update_selection_bias: counts: got shape \(2,\)",
         lambda: update_selection_bias(jnp.zeros(3), jnp.ones(2, int), 0.1)),
        (ValueError, r"update_selection_bias: counts: got -1 at index 1; allowed: counts of at least 0",
         lambda: update_selection_bias(jnp.zeros(2), jnp.array([3, -1]), 0.1)),
        (ValueError, r"update_selection_bias: rate: got 0", lambda: update_selection_bias(ONES[0], IDS[0], 0)),
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], message: str, run) -> None:
    with pytest.raises(error, match=message):
        run()
