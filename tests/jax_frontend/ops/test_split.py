"""Row-wise ops on split rows, on four devices under jit and shardings alone: values, and no collective."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MXArray, ops, swiglu
from mxep.jax_frontend.ops.split import WHOLE_DIMS

from ..references import normal
from .row_inputs import inputs_of

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
ROWS, PARTS = P(("a", "b")), P("a", "b")
X, UP, DH, PROB = normal(64, 128), normal(64, 128), normal(64, 128), jnp.linspace(0, 1, 64)
W = normal(8, 32, 64)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("a", "b"), (kind, kind), devices=jax.devices("cpu")[:4])


def run(function: Callable[..., Any], kind: AxisType, spec: P, *arrays: jax.Array) -> Counter[str]:
    """The collectives of the compiled function. Results equal the results of one device, sharded as the rows."""
    mesh = mesh_of(kind)
    placed = tuple(jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for x in arrays)
    program = jax.jit(function).lower(*placed).compile()
    for got, want in zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.size == 0 or got.sharding.spec[0] == spec[0]
    text = str(program.as_text())
    return Counter(re.findall(r" (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text))


def every_op(x, up, dh, prob, w):
    """Each op of the table, on rows and on the matrices of groups."""
    return {name: getattr(ops, name)(*inputs_of(name, x, up, dh, prob, w)) for name in WHOLE_DIMS}


@KINDS
def test_each_device_runs_an_op_on_its_rows(kind: AxisType) -> None:
    assert not run(every_op, kind, ROWS, X, UP, DH, PROB, W)


def loss(x: jax.Array, up: jax.Array, prob: jax.Array | None = None) -> jax.Array:
    h = swiglu(MXArray.quantize(x).dequantize(), up, prob).astype(jnp.float32)
    return (h * jnp.arange(h.shape[1])).sum()


@KINDS
def test_gradients_stay_at_their_rows(kind: AxisType) -> None:
    assert not run(jax.grad(loss, (0, 1, 2)), kind, ROWS, X, UP, PROB)
    assert not run(jax.grad(loss, (0, 1)), kind, ROWS, X, UP)


@KINDS
def test_split_columns_are_gathered_and_split_rows_are_not(kind: AxisType) -> None:
    assert run(ops.quantize_row, kind, PARTS, X) == {"all-gather": 1}
    assert run(ops.quantize_both, kind, PARTS, W) == {"all-gather": 1}


@KINDS
def test_rows_of_one_array_alone(kind: AxisType) -> None:
    """The other array, whole on every device, is cut to the same rows."""
    assert not run(lambda x: swiglu(x, UP, PROB), kind, ROWS, X)
    assert not run(lambda up: swiglu(X, up), kind, ROWS, UP)


@KINDS
def test_eager_calls_do_the_same(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    x = jax.device_put(X, NamedSharding(mesh, ROWS))
    for got, want in zip(ops.quantize_row(x), ops.quantize_row(X), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.spec[0] == ROWS[0]
    with jax.set_mesh(mesh):
        assert jax.grad(loss)(x, x).sharding.spec[0] == ROWS[0]


def test_beside_an_axis_of_a_shard_map() -> None:
    """Manual over "a": the rows over "b" stay where they are."""
    mesh = mesh_of(AxisType.Auto)
    row = jax.shard_map(ops.quantize_row, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    assert not run(row, AxisType.Auto, ROWS, X)


def test_an_op_that_reads_other_rows_is_not_split() -> None:
    x = jax.device_put(X, NamedSharding(mesh_of(AxisType.Auto), ROWS))
    row_map = jnp.arange(64, dtype=jnp.int32)[::-1]
    assert "all-gather" in str(jax.jit(ops.permute_rows).lower(x, row_map).compile().as_text())
