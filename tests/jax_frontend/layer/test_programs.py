"""Programs as JAX handles them: exported, checked, saved in part, and refused where no kernel runs."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import (
    MoEConfig,
    MXArray,
    RouterConfig,
    SharedExpert,
    export_checks,
    grouped_mm,
    lower_for,
    moe,
    ops,
    quantize_weights,
    route,
    save_mx_rows,
    sort_by_expert,
)
from mxep.jax_frontend.ops import remat

from ..references import normal

CONFIG = MoEConfig(64, 96, num_experts=4, router=RouterConfig(top_k=2))
PARAMS = moe.init(jax.random.key(0), CONFIG)
X = normal(32, 64, dtype="float32")
W, ENDS = normal(2, 96, 64, dtype="float32"), jnp.array([16, 32])


def loss(params, x):
    y, stats = moe.apply(params, x, CONFIG)
    return (y**2).mean() + 0.01 * stats.aux_loss


GRADIENT = jax.jit(jax.grad(loss))


def test_a_program_is_serialized_as_it_is() -> None:
    """Forward and gradient, and the gradient of what was serialized. The checks of values are no effect."""
    exported = export.export(GRADIENT, disabled_checks=export_checks())(PARAMS, X)
    loaded = export.deserialize(exported.serialize())
    want = GRADIENT(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, loaded.call(PARAMS, X), want)
    forward = export.export(jax.jit(loss), disabled_checks=export_checks())(PARAMS, X)
    again = jax.grad(export.deserialize(forward.serialize(vjp_order=1)).call)(PARAMS, X)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), again, want)


MX = MXArray.quantize(X)
PRODUCT = {"group_ends": ENDS, "out_dtype": "float32"}


@pytest.mark.parametrize(
    ("run", "arguments"),
    [
        (lambda params, x: moe.apply(params, x, CONFIG), (PARAMS, X)),
        (lambda x, w: (x, grouped_mm(x, w, **PRODUCT)), (MX, W)),
        (lambda x, w: grouped_mm(x, w, recipe="bf16", **PRODUCT), (X, quantize_weights(W, "bf16"))),
        (lambda x, w: grouped_mm(x, w, **PRODUCT), (X, quantize_weights(W))),
        (lambda x, w: grouped_mm(x, w, **PRODUCT), (X, quantize_weights(W, frozen=True))),
        (lambda x, w: grouped_mm(x, w, recipe="fp8_rowwise", **PRODUCT), (X, quantize_weights(W, "fp8_rowwise"))),
        (lambda x, w: grouped_mm(x, w, recipe="fp8_blockwise", **PRODUCT), (X, quantize_weights(W, "fp8_blockwise"))),
        (lambda x: (route(x, RouterConfig(2)), ops.quantize_both(x)), (X,)),
    ],
    ids=["MoEStats", "MXArray", "bf16", "mxfp8", "frozen", "fp8_rowwise", "fp8_blockwise", "route"],
)
def test_arguments_and_results_of_this_package_are_serialized(run, arguments: tuple) -> None:
    run = jax.jit(run)
    data = export.export(run, disabled_checks=export_checks())(*arguments).serialize()
    got, want = export.deserialize(data).call(*arguments), run(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def symbolic(symbols: str, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*export.symbolic_shape(symbols), 64), dtype)


WITH_SHARED = {"recipe": "bf16", "router": RouterConfig(2, prob_in="combine"), "shared": SharedExpert(32)}


@pytest.mark.parametrize(
    ("changes", "batches"), [({}, [(1, 1), (3, 50)]), (WITH_SHARED, [(3, 50)])], ids=["default", "shared"]
)
def test_one_program_for_every_number_of_tokens(changes: dict, batches: list[tuple[int, int]]) -> None:
    """Forward and gradients of the layer, with the bytes of the program of a number."""
    config = dataclasses.replace(CONFIG, **changes)
    params = moe.init(jax.random.key(0), config)

    def loss(params, x):
        y, stats = moe.apply(params, x, config)
        return (y**2).mean() + 0.01 * stats.aux_loss

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    exported = export.export(step, disabled_checks=export_checks())(params, symbolic("B, S"))
    loaded = export.deserialize(exported.serialize())
    for batch in batches:
        x = normal(*batch, 64, dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, loaded.call(params, x), step(params, x))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_blockwise"])
def test_a_product_of_a_symbolic_number_of_rows(recipe: str) -> None:
    product = jax.jit(lambda x, w, sizes: grouped_mm(x, w, group_sizes=sizes, recipe=recipe))
    sizes = jnp.array([3, 20])
    exported = export.export(product, disabled_checks=export_checks())(symbolic("T"), W, sizes)
    for rows in (23, 200):
        x = normal(rows, 64, dtype="float32")
        np.testing.assert_array_equal(exported.call(x, W, sizes), product(x, W, sizes))


def test_where_a_number_of_tokens_is_part_of_the_program() -> None:
    """A Triton kernel is launched with numbers, and the rows of each rank begin at multiples of a number."""
    (rows,), sizes = export.symbolic_shape("n"), jnp.zeros(4, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"^row_map: rank_rows: got n, a symbol of jax.export; allowed: a n"):
        jax.eval_shape(partial(ops.row_map, num_rows=2 * rows, num_local_experts=2, rank_rows=rows), sizes)
    with pytest.raises(NotImplementedError, match=r"^sort_by_expert: num_experts: got n, a symbol of jax.export"):
        jax.eval_shape(partial(sort_by_expert, num_experts=rows), sizes)
    on_gpus = {"platforms": ["cuda"], "disabled_checks": export_checks()}
    product = jax.jit(lambda x, w: grouped_mm(x, w, ENDS, recipe="bf16"))
    with lower_for("sm_90"):
        export.export(product, **on_gpus)(symbolic("T", "bfloat16"), W.astype("bfloat16"))
        with pytest.raises(NotImplementedError, match=r"^route: a size: got .* T.*allowed on a GPU: numbers"):
            export.export(jax.jit(loss), **on_gpus)(PARAMS, symbolic("T"))


@pytest.mark.parametrize(
    "wrapped",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda ends: jax.lax.scan(lambda c, _: (c, f(c)), ends, None, length=2),
        lambda f: lambda ends: jax.lax.cond(ends[0] > 0, f, f, ends),
        lambda f: lambda ends: jax.lax.map(f, ends[None]),
    ],
    ids=["jit", "checkpoint", "scan", "cond", "map"],
)
def test_checkify_finds_a_bad_value_inside(wrapped) -> None:
    checked = checkify.checkify(wrapped(lambda ends: grouped_mm(X, W, ends)))
    assert checked(ENDS)[0].get() is None
    with pytest.raises(checkify.JaxRuntimeError, match=r"grouped_mm: group_ends: got \[32 16\]; allowed: ends that do"):
        checked(ENDS[::-1])[0].throw()


# On one device: 160 rows hold any split of 64 rows in 4 padded groups.
PADDED = 192
ROWS, HIDDEN, OUTPUTS = PADDED * 66, PADDED * 96 * 2, PADDED * 64 * 2


def saved_nbytes(policy) -> int:
    """What the gradient saves besides its arguments, with outputs that combine weighs."""
    config = dataclasses.replace(CONFIG, router=dataclasses.replace(CONFIG.router, prob_in="combine"))
    layer = jax.checkpoint(lambda params, x: moe.apply(params, x, config)[0].sum(), policy=policy)
    leaves = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(layer, p, x)[1], PARAMS, X))
    given = jax.tree.leaves((PARAMS, X))
    return sum(x.size * x.dtype.itemsize for x in leaves) - sum(x.nbytes for x in given)


def test_policies_save_what_they_name() -> None:
    policies = jax.checkpoint_policies
    nothing = saved_nbytes(policies.nothing_saveable)
    assert saved_nbytes(save_mx_rows) - nothing == ROWS
    assert saved_nbytes(policies.save_only_these_names(remat.GATE, remat.UP)) - nothing == 2 * HIDDEN
    assert saved_nbytes(policies.save_only_these_names(*remat.NAMES)) - nothing == ROWS + 2 * HIDDEN + OUTPUTS


def test_a_policy_changes_no_byte() -> None:
    layer = jax.jit(jax.grad(jax.checkpoint(loss, policy=save_mx_rows)))
    jax.tree.map(np.testing.assert_array_equal, layer(PARAMS, X), GRADIENT(PARAMS, X))


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_a_platform_without_kernels_is_named(platform: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"platform: got {platform}; allowed: cpu and cuda; "):
        jax.jit(loss).trace(PARAMS, X).lower(lowering_platforms=(platform,))


def test_on_a_mesh_with_explicit_axes_gradients_lie_as_their_arguments() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Explicit,) * 2, devices=jax.devices("cpu")[:4])
    x, w = (jax.device_put(a, NamedSharding(mesh, P(axis))) for a, axis in ((X, "data"), (W, "expert")))

    def total(x, w):
        return (grouped_mm(x, w, ENDS, out_dtype="float32") ** 2).sum()

    gradient = jax.jit(jax.grad(total, (0, 1)))
    dx, dw = gradient(x, w)
    assert (jax.typeof(dx).sharding.spec, jax.typeof(dw).sharding.spec) == (P("data", None), P("expert", None, None))
    for got, want in zip((dx, dw), gradient(X, W), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
