"""ragged_dot_mxfp8 against jax.lax.ragged_dot of the dequantized operands in fp32, and its gradients likewise."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize import oracle_blockwise as blockwise
from mxep.jax_frontend import RECIPES, MXArray, Recipe, grouped_mm, ops, quantize_weights, ragged_dot_mxfp8

from ...compare import gemm_bound
from ..references import normal, primitives

M, K, N = 192, 64, 96
SIZES = {"aligned": [64, 0, 96], "any": [33, 0, 95], "empty": [0, 0, 0], "full": [1, 190, 1]}
LHS, RHS, DOUT = normal(M, K), normal(3, K, N, seed=1), normal(M, N, seed=2)


def sizes_of(case: str, dtype: str = "int32") -> jax.Array:
    return jnp.asarray(SIZES[case], dtype)


@partial(jax.jit, static_argnums=0)
def results(f: Callable, lhs: jax.Array, rhs: jax.Array, dout: jax.Array, *sizes: jax.Array):
    """The product and its gradients. The same f with the same shapes compiles once, whichever tests ask."""
    out, backward = jax.vjp(lambda *floats: f(*floats, *sizes), lhs, rhs)
    return out, *backward(dout.astype(out.dtype))


@cache
def dot(recipe: str) -> Callable:
    return partial(ragged_dot_mxfp8, recipe=recipe)


def along(x: jax.Array, axis: int) -> jax.Array:
    """What MXFP8 keeps of x, quantized along an axis, in fp32."""
    moved = jnp.moveaxis(x, axis, -1)
    q, sf = ops.quantize_row(moved.reshape(-1, moved.shape[-1]))
    return jnp.moveaxis(ops.dequantize(q, sf, out_dtype="float32").reshape(moved.shape), -1, axis)


def along_tokens(x: jax.Array, sizes: list[int]) -> jax.Array:
    """`along` the rows of each group by itself, as if zeros followed them up to whole blocks."""
    parts = []
    for part in jnp.split(x, np.cumsum(sizes)):
        padded = jnp.pad(part, ((0, -len(part) % 32), (0, 0)))
        parts.append(along(padded, 0)[: len(part)] if len(part) else part.astype(jnp.float32))
    return jnp.concatenate(parts)


def folded_tokens(x: jax.Array, sizes: list[int]) -> np.ndarray:
    """`along_tokens`, folded."""
    parts = []
    for part in np.split(np.asarray(x), np.cumsum(sizes)):
        padded, ends = np.pad(part, ((0, -len(part) % 32), (0, 0))), np.array([-(-len(part) // 32) * 32])
        columns = fold_oracle.fold_groups(*quantize_oracle.quantize_col(padded), ends)
        parts.append(fold_oracle.span_values(*columns, ends).T[: len(part)])
    return np.concatenate(parts)


def sums(lhs: np.ndarray, rhs: np.ndarray, dout: np.ndarray, sizes: jax.Array) -> tuple[np.ndarray, ...]:
    """The product and its gradients in fp64."""
    out, dlhs, drhs = np.zeros((M, N)), np.zeros((M, K)), np.zeros(rhs.shape)
    ends = np.cumsum(sizes)
    for g, rows in enumerate(slice(end - size, end) for end, size in zip(ends, np.asarray(sizes), strict=True)):
        out[rows], dlhs[rows], drhs[g] = lhs[rows] @ rhs[g], dout[rows] @ rhs[g].T, lhs[rows].T @ dout[rows]
    return out, dlhs, drhs


def check_products(got, lhs, rhs, dout, sizes: jax.Array, recipe: str) -> None:
    """out, dlhs and drhs within the bound, each of the operands that its product multiplies."""
    if recipe == "bf16":
        pairs = [tuple(x.astype(jnp.float32) for x in (lhs, rhs, dout))] * 3
    elif recipe == "fp8_blockwise":
        rows, squares = blockwise.row_values, blockwise.square_values
        lhs_q, dout_q = (rows(*blockwise.quantize_blockwise(np.asarray(x))) for x in (lhs, dout))
        rhs_q = squares(*blockwise.quantize_squares(np.asarray(rhs)))
        of_tokens = (folded_tokens(lhs, sizes.tolist()), rhs, folded_tokens(dout, sizes.tolist()))
        pairs = [(lhs_q, rhs_q, dout), (lhs, rhs_q, dout_q), of_tokens]
    else:
        tokens = partial(along_tokens, sizes=sizes.tolist()) if recipe == "mxfp8" else lambda x: x.astype(jnp.float32)
        pairs = [
            (along(lhs, 1), along(rhs, 1), dout),
            (lhs, along(rhs, 2), along(dout, 1)),
            (tokens(lhs), rhs, tokens(dout)),
        ]
    for i, operands in enumerate(pairs):
        lhs, rhs, dout = (np.asarray(x, np.float64) for x in operands)
        exact, magnitude = (sums(*arrays, sizes)[i] for arrays in ((lhs, rhs, dout), map(np.abs, (lhs, rhs, dout))))
        gemm_bound(got[i], exact, magnitude, (K, N, M)[i])


@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_product_and_its_gradients_are_ragged_dots(recipe: str, case: str) -> None:
    sizes = sizes_of(case)
    got = results(dot(recipe), LHS, RHS, DOUT, sizes)
    check_products(got, LHS, RHS, DOUT, sizes, recipe)
    last = sum(SIZES[case])
    assert not np.asarray(got[0][last:], np.float32).any(), "rows past the sum"
    assert not np.asarray(got[1][last:], np.float32).any(), "their gradients"
    assert not any(np.asarray(d, np.float32).any() for d, size in zip(got[2], SIZES[case], strict=True) if not size)
    assert [x.shape for x in got] == [(M, N), (M, K), (3, K, N)]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_folded_it_is_the_grouped_product_of_the_transposed_weights(recipe: str) -> None:
    folding = Recipe.parse(recipe, compute="fold")
    sizes = sizes_of("aligned")
    got = results(lambda *a: ragged_dot_mxfp8(*a, sizes, recipe=folding), LHS, RHS, DOUT)
    want = results(lambda *a: grouped_mm(*a, jnp.cumsum(sizes), recipe=folding), LHS, RHS.mT, DOUT)
    for g, w in zip(got, (*want[:2], want[2].mT), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("compute", ["exact", "fold"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_no_float_is_transposed(recipe: str, compute: str) -> None:
    def run(lhs, rhs, dout):
        choice = Recipe.parse(recipe, compute=compute)
        return jax.vjp(lambda *a: ragged_dot_mxfp8(*a, sizes_of("any"), recipe=choice), lhs, rhs)[1](dout)

    kernels, others = primitives(run, LHS, RHS, DOUT)
    assert not others["transpose"]
    assert kernels["grouped_mm_mx"] + kernels["grouped_mm_fold"] == 2


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_sizes_are_any_integers(recipe: str, dtype: str) -> None:
    got, want = (results(dot(recipe), LHS, RHS, DOUT, sizes_of("any", d)) for d in (dtype, "int32"))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("lhs", "rhs", "preferred", "out"),
    [
        ("bfloat16", "bfloat16", None, "bfloat16"),
        ("bfloat16", "float32", None, "float32"),
        ("float32", "float32", jnp.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16", jnp.float32, "float32"),
    ],
)
def test_dtypes_are_those_of_ragged_dot(lhs: str, rhs: str, preferred, out: str) -> None:
    sizes = sizes_of("any")
    recipe = "mxfp8_wgrad_with_hp"
    got = results(
        partial(dot(recipe), group_sizes=sizes, preferred_element_type=preferred),
        LHS.astype(lhs),
        RHS.astype(rhs),
        DOUT,
    )
    assert [x.dtype.name for x in got] == [out, lhs, rhs]
    check_products(got, LHS, RHS, DOUT, sizes, recipe)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_remat_and_shard_map_do_not_change_a_gradient(recipe: str) -> None:
    sizes = jnp.concatenate([sizes_of("any"), sizes_of("full")])
    lhs, dout = jnp.concatenate([LHS, DOUT[:, :K]]), jnp.concatenate([DOUT, -DOUT])
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("dp",))
    sharded = jax.shard_map(dot(recipe), mesh=mesh, in_specs=(P("dp"), P(), P("dp")), out_specs=P("dp"))
    wide = RHS.astype(jnp.float32)
    parts = zip(jnp.split(lhs, 2), jnp.split(dout, 2), jnp.split(sizes, 2), strict=True)
    halves = [results(dot(recipe), x, wide, d, s) for x, d, s in parts]
    for f in (sharded, jax.checkpoint(sharded)):
        out, dlhs, drhs = results(f, lhs, wide, dout, sizes)
        np.testing.assert_array_equal(out, jnp.concatenate([half[0] for half in halves]))
        np.testing.assert_array_equal(dlhs, jnp.concatenate([half[1] for half in halves]))
        np.testing.assert_array_equal(drhs, halves[0][2] + halves[1][2])


def test_quantized_weights_stand_for_their_array() -> None:
    cached, sizes = quantize_weights(RHS), sizes_of("any")
    got = results(lambda lhs, rhs: ragged_dot_mxfp8(lhs, cached.with_values(rhs), sizes), LHS, RHS, DOUT)
    for g, w in zip(got, results(lambda *a: ragged_dot_mxfp8(*a, sizes), LHS, RHS, DOUT), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_nan_past_the_sum_stays_out(recipe: str) -> None:
    sizes, last = sizes_of("any"), sum(SIZES["any"])
    got = results(dot(recipe), LHS.at[last:].set(jnp.nan), RHS, DOUT.at[last:].set(jnp.inf), sizes)
    for g, w in zip(got, results(dot(recipe), LHS, RHS, DOUT, sizes), strict=True):
        np.testing.assert_array_equal(g, w)


def test_checkify_finds_too_many_rows_inside_jit() -> None:
    checked = checkify.checkify(jax.jit(lambda sizes: ragged_dot_mxfp8(LHS, RHS, sizes)))
    error, _ = checked(jnp.array([100, 93, 0]))
    with pytest.raises(checkify.JaxRuntimeError, match=r"ragged_dot_mxfp8: group_sizes: .*at most 192"):
        error.throw()
    assert checked(sizes_of("any"))[0].get() is None


SIZES_OK = sizes_of("any")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ragged_dot_mxfp8(LHS.astype("float16"), RHS, SIZES_OK), TypeError, "lhs: got dtype float16"),
        (lambda: ragged_dot_mxfp8(MXArray.quantize(LHS), RHS, SIZES_OK), TypeError, "lhs: got MXArray"),
        (lambda: ragged_dot_mxfp8(LHS, [RHS], SIZES_OK), TypeError, "rhs: got list.*or QuantizedWeights"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK.astype("float32")), TypeError, "group_sizes: got dtype float32"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK, preferred_element_type="float16"), TypeError, "got float16"),
        (lambda: ragged_dot_mxfp8(LHS, RHS.mT, SIZES_OK), ValueError, r"\(M, K\) and \(G, K, N\)"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK[:2]), ValueError, r"group_sizes: got shape \(2,\); "),
        (lambda: ragged_dot_mxfp8(LHS, RHS[..., :33], SIZES_OK), ValueError, "rhs: got dim 2, N, = 33"),
        (lambda: ragged_dot_mxfp8(LHS[:, :33], RHS[:, :33], SIZES_OK), ValueError, "rhs: got dim 1, K, = 33"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK + 64), ValueError, "group_sizes: .*at most 192"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK - 1), ValueError, "group_sizes: .*at least 0"),
        (lambda: ragged_dot_mxfp8(LHS, RHS, SIZES_OK, recipe="fp4"), ValueError, "recipe: got 'fp4'"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_arguments_of_other_libraries() -> None:
    class GroupSizes(NamedTuple):
        """As tokamax.RaggedDotGroupSizes."""

        value: jax.Array
        representative_value: tuple[int, ...]

    sizes = jnp.array([64, 64, 64])
    got = ragged_dot_mxfp8(LHS, RHS, GroupSizes(sizes, (64, 64, 64)))
    np.testing.assert_array_equal(got, ragged_dot_mxfp8(LHS, RHS, sizes, precision=None, group_offset=None))
    refused = {"precision": jax.lax.Precision.HIGHEST, "group_offset": jnp.array([1]), "out_sharding": P("data")}
    for name, value in refused.items():
        with pytest.raises(NotImplementedError, match=rf"ragged_dot_mxfp8: {name}: got .*; allowed: None"):
            ragged_dot_mxfp8(LHS, RHS, sizes, **{name: value})


def test_the_parameters_are_those_of_ragged_dot() -> None:
    """In its order, with its defaults, so that positional calls are the same calls; `recipe` is our own."""
    theirs = inspect.signature(jax.lax.ragged_dot).parameters.values()
    ours = list(inspect.signature(ragged_dot_mxfp8).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[:-1]] == [(p.name, p.kind, p.default) for p in theirs]
    assert ours[-1].name == "recipe"
    default = ragged_dot_mxfp8(LHS, RHS, SIZES_OK, jax.lax.Precision.DEFAULT, jnp.float32)
    np.testing.assert_array_equal(default, ragged_dot_mxfp8(LHS, RHS, SIZES_OK, preferred_element_type="float32"))
