"""The layer: on meshes against itself on one device, with a full capacity, transformed. Against its definition, on 1, 2
and 4 devices: tests/conformance/layer/test_layer.py."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import RECIPES, MoEConfig, RouterConfig, moe, quantize_weights

from ...compare import sqnr_db
from ...layer_options import layer_options
from .. import references
from ..references import normal

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 96, 8, 2, 100
X, DY = normal(TOKENS, DIM, dtype="float32"), normal(TOKENS, DIM, seed=1, dtype="float32")
SPECS = {"router": P(), "experts": P("ep")}


def config(recipe: str = "mxfp8_wgrad_with_hp", **changes) -> MoEConfig:
    sizes = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    return MoEConfig(**layer_options(**{"recipe": recipe, **sizes, **changes}))


PARAMS = moe.init(jax.random.key(0), config())


def names(grads) -> dict[str, jax.Array]:
    params, x = grads
    return {"x": x, "router": params["router"], **params["experts"]}


@partial(jax.jit, static_argnums=2)
def run(params, x, layer_config, dy):
    y, backward, stats = jax.vjp(lambda p, x: moe.apply(p, x, layer_config), params, x, has_aux=True)
    return y, stats, backward(dy)


def test_the_auxiliary_loss_trains_the_router() -> None:
    def aux(f):
        return jax.jit(jax.grad(lambda p: f(p, X, config())[1]))(PARAMS)["router"]

    got = aux(lambda *a: (None, moe.apply(*a)[1].aux_loss))
    np.testing.assert_allclose(got, aux(references.moe), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("prob_in", ["combine", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "kept", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["weights", "quantized weights"]
)
def test_nothing_that_is_saved_is_empty(kept: bool, recipe: str, prob_in: str) -> None:
    """jaxlib 0.11.2 ends the process on an array without elements between the halves of a shard_map's gradient."""
    made = {n: quantize_weights(w, recipe=recipe) for n, w in PARAMS["experts"].items()} if kept else {}

    def layer(params, x):
        experts = {n: made[n].with_values(w) if kept else w for n, w in params["experts"].items()}
        return moe.apply({**params, "experts": experts}, x, config(recipe, prob_in=prob_in))[0]

    saved = jax.tree.leaves(jax.eval_shape(lambda params, x: jax.vjp(layer, params, x)[1], PARAMS, X))
    assert len(saved) > 10
    assert all(array.size for array in saved)


@cache
def parallel(ranks: int, recipe: str, check_vma: bool = True, **changes):
    layer_config = config(recipe, **changes)
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), ("ep",))

    def one_rank(params, x):
        return moe.apply(params, x, layer_config, axis_name="ep")

    outputs = P("ep"), P()
    layer = jax.shard_map(one_rank, mesh=mesh, in_specs=(SPECS, P("ep")), out_specs=outputs, check_vma=check_vma)

    @jax.jit
    def run(params, x, dy):
        y, backward, stats = jax.vjp(layer, params, x, has_aux=True)
        return y, stats, backward(dy)

    return run


def test_an_untracked_shard_map_gives_the_answer_of_one_device() -> None:
    """With check_vma=False JAX tracks nothing and sums the replicated router's gradient in shard_map's transpose. With
    it tests/conformance/layer/test_layer.py has 2 and 4 devices, compiled so that they agree to the bit."""
    recipe = "mxfp8"
    y, stats, grads = run(PARAMS, X, config(recipe), DY)
    y_ep, stats_ep, grads_ep = parallel(2, recipe, check_vma=False)(PARAMS, X, DY)
    # The router's product and each token's sum are the same numbers in another order of fp32 additions.
    np.testing.assert_allclose(y_ep, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats_ep.counts, stats.counts)
    np.testing.assert_allclose(stats_ep.aux_loss, stats.aux_loss, rtol=1e-6)
    assert int(stats_ep.overflow) == 0
    for name, want in names(grads).items():
        got = names(grads_ep)[name]
        # A weight's gradient is rounded to bf16 after a sum over tokens in another order: a few last bits.
        ulp = 2**-7 if name in ("w1", "w2", "w3") else 1e-5
        np.testing.assert_allclose(got, want, rtol=ulp, atol=1e-5 * float(jnp.abs(want).max()), err_msg=name)
        assert sqnr_db(got, want) > 60, name


@pytest.mark.slow  # test_derivatives.py has a shard_map without jit of one function
def test_without_jit_the_gradient_is_the_same() -> None:
    """Eager shard_map takes no custom_vjp with symbolic zeros: the layer's are inside jits of their own."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("ep",))
    apply = partial(moe.apply, config=config(), axis_name="ep")
    layer = jax.shard_map(lambda p, x: apply(p, x)[0], mesh=mesh, in_specs=(SPECS, P("ep")), out_specs=P("ep"))
    y, backward = jax.vjp(layer, PARAMS, X)
    expected, _, grads = parallel(2, "mxfp8_wgrad_with_hp")(PARAMS, X, DY)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    got = names(backward(DY))
    for name, want in names(grads).items():
        assert sqnr_db(got[name], want) > 60, name


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", pytest.param("bf16", marks=pytest.mark.slow)])
def test_replicas_of_the_experts_add_their_gradients_in_fp32(recipe: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "ep"))
    tokens = P(("dp", "ep"))
    apply = partial(moe.apply, config=config(recipe), axis_name="ep")
    layer = jax.shard_map(lambda p, x: apply(p, x)[0], mesh=mesh, in_specs=(SPECS, tokens), out_specs=tokens)

    @jax.jit
    def gradient(params, x, dy):
        y, backward = jax.vjp(layer, params, x)
        return y, backward(dy)

    y, _, grads = run(PARAMS, X, config(recipe), DY)
    y_replicas, got = gradient(PARAMS, X, DY)
    got = names(got)
    np.testing.assert_allclose(y_replicas, y, rtol=1e-5, atol=1e-6)
    for name, want in names(grads).items():
        # Each replica rounds its own sum to bf16 before the sum of both; the rounding of one device is another.
        assert sqnr_db(got[name], want) > (48 if name in ("w1", "w2", "w3") else 60), name
    text = gradient.lower(PARAMS, X, DY).as_text()
    sums = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((tensor<\S+)\)', text, re.DOTALL)
    assert len(sums) >= 4, "three weights and the router"
    assert not [kind for kind in sums if "bf16" in kind]


def train(apply, params: dict, x: jax.Array):
    """Ten steps of SGD on a loss of y and aux_loss, with the shardings of the arguments."""

    def loss(params, x):
        y, stats = apply(params, x)
        return ((y - DY) ** 2).mean() + 0.01 * stats.aux_loss, (y, stats)

    @jax.jit
    def step(params, x):
        (value, (y, stats)), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
        return value, y, stats, grads, jax.tree.map(lambda p, g: p - 5 * g, params, grads)

    first = step(params, x)
    *_, params = first
    for _ in range(9):
        *_, params = step(params, x)
    return first, params


ONE = config("bf16")


@cache
def one_device():
    return train(lambda p, x: moe.apply(p, x, ONE), PARAMS, X)


# Measured: y equal, gradients 135 dB, what ten steps change 61.7 dB, as roundings to bf16 part; less a margin.
@pytest.mark.parametrize(
    ("shape", "check_vma"),
    [pytest.param((1, 4), True, marks=pytest.mark.slow), ((2, 2), True), ((2, 2), False)],
    ids=str,
)
def test_a_mesh_trains_as_one_device(shape: tuple[int, int], check_vma: bool) -> None:
    """The stats leave shard_map as they are, and nothing is left to reduce."""
    mesh = Mesh(np.array(jax.devices("cpu")[: shape[0] * shape[1]]).reshape(shape), ("data", "ep"))
    tokens = P(("data", "ep"))
    layer = jax.shard_map(
        lambda p, x: moe.apply(p, x, ONE, axis_name="ep", token_axes=("data", "ep")),
        mesh=mesh, in_specs=(SPECS, tokens), out_specs=(tokens, P()), check_vma=check_vma,
    )  # fmt: skip
    params = jax.device_put(PARAMS, {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})
    (value, y, stats, grads, _), trained = train(layer, params, jax.device_put(X, NamedSharding(mesh, tokens)))
    (value_1, y_1, stats_1, grads_1, _), trained_1 = one_device()
    np.testing.assert_allclose(value, value_1, rtol=1e-6)
    np.testing.assert_allclose(y, y_1, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(stats.counts, stats_1.counts)
    np.testing.assert_allclose(stats.aux_loss, stats_1.aux_loss, rtol=1e-6)
    change, change_1 = (jax.tree.map(jnp.subtract, p, PARAMS) for p in (trained, trained_1))
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_1), strict=True):
        assert sqnr_db(got, want) > 120
    for got, want in zip(jax.tree.leaves(change), jax.tree.leaves(change_1), strict=True):
        assert sqnr_db(got, want) > 55


def test_a_capacity_drops_rows_and_says_so() -> None:
    """Two ranks, 20 rows per pair: what does not fit adds nothing to its token and gets no gradient; with "drop"."""
    capacity, ranks = 20, 2
    options = {"capacity_factor": capacity * ranks / (TOKENS // ranks * TOP_K), "on_overflow": "drop"}
    y, stats, grads = parallel(ranks, "bf16", **options)(PARAMS, X, DY)
    kept = np.zeros((TOKENS, EXPERTS), np.float32)
    probs, chosen = jax.lax.top_k(jax.nn.softmax(X @ PARAMS["router"].T), TOP_K)
    probs, chosen = np.asarray(probs / probs.sum(-1, keepdims=True)), np.asarray(chosen)
    dropped = 0
    for rank in range(ranks):
        tokens = np.arange(TOKENS // ranks) + rank * TOKENS // ranks
        slots = sorted((chosen[t, k], t, k) for t in tokens for k in range(TOP_K))
        for target in range(ranks):
            sent = [s for s in slots if s[0] // (EXPERTS // ranks) == target]
            dropped += len(sent[capacity:])
            for expert, token, k in sent[:capacity]:
                kept[token, expert] = probs[token, k]
    assert int(stats.overflow) == dropped > 0

    def reference(params, x):
        w = params["experts"]
        hidden = jax.nn.silu(jnp.einsum("td,efd->tef", x, w["w1"])) * jnp.einsum("td,efd->tef", x, w["w3"])
        return (jnp.einsum("tef,edf->ted", hidden, w["w2"]) * kept[..., None]).sum(1)

    expected, wanted = jax.jit(lambda p, x: (reference(p, x), jax.vjp(reference, p, x)[1](DY)[0]["experts"]))(PARAMS, X)
    assert sqnr_db(y, expected) > 42
    for name, want in wanted.items():
        assert sqnr_db(grads[0]["experts"][name], want) > 42, name
    lost = ~kept.any(1)
    assert lost.any(), "some token loses every expert"
    assert not np.asarray(y)[lost].any()


def test_one_token_and_one_hot_expert() -> None:
    params = PARAMS | {"router": jnp.zeros_like(PARAMS["router"]).at[5].set(10.0)}
    _, stats, grads = run(params, jnp.abs(X[:1]), config(), DY[:1])
    assert stats.counts.tolist() == [1, 0, 0, 0, 0, 1, 0, 0], "equal scores: the lower expert first"
    assert all(np.isfinite(np.asarray(g)).all() for g in jax.tree.leaves(grads))


def test_no_tokens_are_no_problem() -> None:
    y, stats, grads = run(PARAMS, X[:0], config(), DY[:0])
    assert (y.shape, int(stats.counts.sum()), float(stats.aux_loss)) == ((0, DIM), 0, 0.0)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_remat_and_scan_over_layers_keep_the_gradient() -> None:
    layers = jax.tree.map(lambda *p: jnp.stack(p), *(moe.init(jax.random.key(i), config()) for i in range(2)))

    def block(x, params):
        return x + moe.apply(params, x, config())[0], None

    def scanned(layers, x):
        return (jax.lax.scan(jax.checkpoint(block), x, layers)[0] * DY).sum()

    def unrolled(layers, x):
        for i in range(2):
            x, _ = block(x, jax.tree.map(lambda p, i=i: p[i], layers))
        return (x * DY).sum()

    got, want = (jax.jit(jax.grad(f))(layers, X) for f in (scanned, unrolled))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-5 * float(jnp.abs(b).max()))


def test_x_keeps_its_shape_and_dtype() -> None:
    x = X.astype(jnp.bfloat16).reshape(5, 20, DIM)
    y, _ = jax.eval_shape(partial(moe.apply, config=config()), PARAMS, x)
    assert (y.shape, y.dtype) == (x.shape, jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_draws_from_a_truncated_normal_distribution(dtype: str) -> None:
    """Its deviation is 0.88 of the deviation without truncation. The bf16 weights are the rounded fp32 weights."""
    wide = MoEConfig(256, 128, num_experts=8, router=RouterConfig(top_k=2))
    for w in moe.init(jax.random.key(0), wide, dtype)["experts"].values():
        drawn = np.asarray(w, np.float32) * w.shape[-1] ** 0.5
        assert abs(drawn.std() - 0.88) < 0.01
        assert np.abs(drawn).max() <= 2.01
        assert len(np.unique(drawn)) > 1000


def test_init_draws_what_apply_takes() -> None:
    params = moe.init(jax.random.key(0), config(), jnp.bfloat16)
    shapes = {"router": (EXPERTS, DIM), "w1": (EXPERTS, HIDDEN, DIM), "w2": (EXPERTS, DIM, HIDDEN)}
    flat = {"router": params["router"], **params["experts"]}
    assert {name: flat[name].shape for name in shapes} == shapes
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    again = moe.init(jax.random.key(0), config(), jnp.bfloat16)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 33}, "dim: got 33"),
        ({"hidden_dim": 0}, "hidden_dim: got 0"),
        ({"top_k": 9}, "MoEConfig: router: got top_k=9"),
        ({"score_func": "relu"}, "'softmax', 'sigmoid', 'softmax_of_chosen'"),
        ({"recipe": "fp4"}, "recipe: got 'fp4'"),
        ({"prob_in": "router"}, "'combine', 'swiglu', 'input'"),
        ({"capacity_factor": 0}, "capacity_factor: got 0"),
    ],
)
def test_a_bad_config_is_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("changes", [{"dim": 64.0}, {"top_k": True}, {"num_experts": "8"}])
def test_a_size_that_is_no_int_is_named(changes: dict) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(changes))}: got .*; allowed: an int"):
        config(**changes)


def test_a_config_is_static_where_jit_takes_it() -> None:
    """Declared or not. Its sizes are numbers, and no dict stands for it."""
    want = jax.jit(moe.apply, static_argnums=2)(PARAMS, X, config())[0]
    np.testing.assert_array_equal(jax.jit(moe.apply)(PARAMS, X, config())[0], want)
    np.testing.assert_array_equal(jax.jit(jax.checkpoint(moe.apply))(PARAMS, X, config=config())[0], want)
    with pytest.raises(
        TypeError, match="MoEConfig: dim: got a traced value, which differs from call to call; allowed: an"
    ):
        jax.jit(lambda dim: config(dim=dim).dim)(DIM)
    with pytest.raises(TypeError, match=r"config: got dict; allowed: MoEConfig"):
        jax.jit(moe.apply)(PARAMS, X, {"dim": DIM})


def test_a_config_is_hashable_and_equal_by_value() -> None:
    assert len({config(), config("mxfp8_wgrad_with_hp"), config("bf16")}) == 2


def test_what_does_not_fit_the_config_is_named() -> None:
    with pytest.raises(TypeError, match="x: got dtype float16"):
        moe.apply(PARAMS, X.astype(jnp.float16), config())
    with pytest.raises(TypeError, match="params 'w2': got dtype float16"):
        moe.apply(
            PARAMS | {"experts": PARAMS["experts"] | {"w2": PARAMS["experts"]["w2"].astype("float16")}}, X, config()
        )
    with pytest.raises(ValueError, match="params: got no 'w1'"):
        moe.apply({"router": PARAMS["router"]}, X, config())
    with pytest.raises(TypeError, match="params: got NoneType; allowed: 'router' and 'experts'"):
        moe.apply(None, X, config())
    with pytest.raises(TypeError, match="config: got str; allowed: MoEConfig"):
        moe.apply(PARAMS, X, "x")
    with pytest.raises(ValueError, match=r"token_axes: got \('data', 'nowhere'\); allowed: a mesh axis"):
        moe.apply(PARAMS, X, config(), token_axes=("data", "nowhere"))
    with pytest.raises(ValueError, match=r"x: got shape \(100, 32\)"):
        moe.apply(PARAMS, X[:, :32], config())
    with pytest.raises(ValueError, match=r"params 'w1': got shape .* on each of 1 ranks"):
        moe.apply(PARAMS, X, config(hidden_dim=64))
    with pytest.raises(ValueError, match="axis_name: got 'nowhere'"):
        moe.apply(PARAMS, X, config(), axis_name="nowhere")


def test_an_axis_that_does_not_divide_the_experts_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:3]), ("ep",))
    apply = partial(moe.apply, PARAMS, config=config(), axis_name="ep")
    with pytest.raises(ValueError, match="num_experts: got 8; allowed: multiples of the 3 ranks of mesh axis 'ep'"):
        jax.shard_map(lambda x: apply(x)[0], mesh=mesh, in_specs=P(), out_specs=P("ep"))(X)
