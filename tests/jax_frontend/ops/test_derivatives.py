"""Reverse mode, once; whatever else is asked for, an error of this package says so, in the function's name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import (
    MoEConfig,
    MXArray,
    RouterConfig,
    grouped_mm,
    grouped_swiglu_ffn,
    moe,
    ops,
    ragged_dot_mxfp8,
    swiglu,
    weighted_combine,
)
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd, a2a_dispatch_mxfp8_fwd_hp_bwd

from ..references import normal

M, D = 32, 32
X, W = normal(M, D, dtype="float32"), normal(1, D, D, seed=1, dtype="float32")
ENDS, SLOTS, ORDER = jnp.array([M], jnp.int32), jnp.arange(M).reshape(M, 1), jnp.arange(M)
EXCHANGE = plan_exchange(ENDS, None, num_rows=M)
CONFIG = MoEConfig(D, D, num_experts=2, router=RouterConfig(top_k=1))
PARAMS = moe.init(jax.random.key(0), CONFIG)
FUNCTIONS = {
    "MXArray.quantize": lambda x: MXArray.quantize(x).dequantize(),
    "a2a_combine_hp_fwd_mxfp8_bwd": lambda x: a2a_combine_hp_fwd_mxfp8_bwd(x, EXCHANGE),
    "a2a_dispatch_mxfp8_fwd_hp_bwd": lambda x: a2a_dispatch_mxfp8_fwd_hp_bwd(x, EXCHANGE).dequantize(),
    "grouped_swiglu_ffn": lambda x: grouped_swiglu_ffn(x, W, W, W, ENDS, recipe="mxfp8"),
    "moe.apply": lambda x: moe.apply(PARAMS, x, CONFIG)[0],
    "grouped_mm": lambda x: grouped_mm(x, W, ENDS),
    "ragged_dot_mxfp8": lambda x: ragged_dot_mxfp8(x, W, ENDS),
    "swiglu": lambda x: swiglu(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    "weighted_combine": lambda x: weighted_combine(x, None, SLOTS, ORDER),
}


def loss(function: Callable) -> Callable[[jax.Array], jax.Array]:
    return lambda x: (function(x).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_another_transform_is_refused_in_the_functions_name(name: str) -> None:
    f = loss(FUNCTIONS[name])
    for transformed in (
        lambda x: jax.jvp(f, (x,), (x,)),
        jax.jit(lambda x: jax.jvp(jax.jit(f), (x,), (x,))),
        jax.jacfwd(f),
        *((lambda x: jax.linearize(f, x)[1](x), jax.hessian(f)) if name == "swiglu" else ()),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name}: transform: got forward mode .*; allowed: jax\.grad"):
            transformed(X)
    for transformed in (jax.vmap(f), jax.jit(jax.vmap(jax.grad(f)))):
        with pytest.raises(
            NotImplementedError, match=rf"^{name}: transform: got jax\.vmap; allowed: .*without the vmap"
        ):
            transformed(X[None])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_refused(name: str) -> None:
    f = loss(FUNCTIONS[name])
    with pytest.raises(NotImplementedError, match=r"^\w+: transform: got .*a second one; allowed: jax\.grad, once"):
        jax.grad(lambda x: jax.grad(f)(x).sum())(X)


def test_a_jacobian_by_rows_is_refused_with_what_to_write() -> None:
    """jax.jacrev is a vmap of the gradient. The transpose of a linearized function is jax.vjp."""
    f = FUNCTIONS["grouped_mm"]
    with pytest.raises(NotImplementedError, match=r"transform: got jax\.vmap; .* jax\.vjp in place of jax\.jacrev"):
        jax.jacrev(f)(X)
    y, linear = jax.linearize(f, X)
    for got, want in zip(jax.linear_transpose(linear, X)(y), jax.vjp(f, X)[1](y), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.linearize(f, x), jax.jacfwd])
def test_an_op_has_no_derivative(transform: Callable) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^swiglu: transform: got a derivative of the op itself.*; allowed: "
    ):
        transform(lambda x: ops.swiglu(x, x, jnp.zeros(0)).astype(jnp.float32).sum())(X.astype(jnp.bfloat16))


def test_what_refuses_compiles_to_nothing() -> None:
    """And survives remat, scan and a custom_vjp around it."""

    def layers(x, w):
        step = jax.checkpoint(lambda x, w: (grouped_mm(x, w, ENDS, out_dtype="float32"), None))
        return jax.lax.scan(step, x, w)[0].sum()

    program = jax.jit(jax.grad(layers, (0, 1))).lower(X, W[None])
    assert not [name for name in ("mxep_guard", "mxep_linear") if name in program.as_text()]
    assert all(np.isfinite(g).all() for g in jax.jit(jax.grad(layers, (0, 1)))(X, W[None]))


def test_disable_jit_changes_nothing_in_shard_map() -> None:
    """Though eager shard_map takes no custom_vjp with symbolic zeros."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("ep",))
    layer = jax.shard_map(
        lambda x, w: grouped_mm(x, w, ENDS // 2, recipe="bf16"), mesh=mesh, in_specs=(P("ep"), P()), out_specs=P("ep")
    )
    with jax.disable_jit():
        got = layer(X, W)
    np.testing.assert_array_equal(got, layer(X, W))
