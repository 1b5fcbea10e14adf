"""swiglu and grouped_swiglu_ffn: byte for byte the functions they are made of."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import RECIPES, MXArray, Recipe, grouped_mm, grouped_swiglu_ffn, lower_for, ops, swiglu
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd

from ..references import folded_sum, kernels, normal, results

M, D, F, SIZES = 160, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
X, DY = normal(M, D), normal(M, D, seed=1)
W1, W3, W2 = (normal(3, *shape, seed=seed) / 8 for seed, shape in ((2, (F, D)), (3, (F, D)), (4, (D, F))))
PROB = jnp.asarray(np.random.default_rng(5).random(M), jnp.float32)
NAMES = ("x", "w1", "w3", "w2", "prob")
whole_blocks = partial(grouped_swiglu_ffn, recipe="mxfp8", pad_token_groups=False)


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_and_its_gradient_are_the_formula(weighted: bool) -> None:
    gate, up, dh = (normal(M, F, seed=seed) for seed in range(3))
    h, backward = jax.vjp(jax.jit(swiglu), gate, up, *([PROB] if weighted else []))
    wide = [x.astype(jnp.float32) for x in (gate, up)]
    expected, reference = jax.vjp(
        lambda g, u, p: jax.nn.silu(g) * u * p[:, None], *wide, PROB if weighted else PROB * 0 + 1
    )
    got, want = (h, *backward(dh)), (expected, *reference(dh.astype(jnp.float32)))
    # a value that fp32 rounds differently on the edge between two of bf16: a last bit
    for g, w in zip(got[:3], want, strict=False):
        np.testing.assert_allclose(
            g.astype(np.float32), w.astype(jnp.bfloat16).astype(np.float32), rtol=2**-7, atol=1e-6
        )
    if weighted:
        np.testing.assert_allclose(got[3], want[3], rtol=1e-4, atol=1e-4)
    assert [x.dtype for x in got[:3]] == [jnp.bfloat16] * 3


def one_rank(out, mx_grad: bool):
    """What a combine does: hands its gradient on in MXFP8 if the product takes it so."""
    exchange = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)
    return a2a_combine_hp_fwd_mxfp8_bwd(out, exchange) if mx_grad else out


FOLD = {f"{name} fold": Recipe.parse(name, compute="fold") for name, recipe in RECIPES.items() if recipe.mx}
# Without weights SwiGLU alone differs, and recipes without MXFP8 call it as bf16 does.
WEIGHTED = [(recipe, True) for recipe in RECIPES]
WEIGHTED += [(recipe, False) for recipe in RECIPES if RECIPES[recipe].mx or recipe == "bf16"]
slow = partial(pytest.param, marks=pytest.mark.slow)
FUSED = [(recipe, "float", weighted) for recipe, weighted in WEIGHTED]
FUSED += [(recipe, kind, True) for recipe in RECIPES if RECIPES[recipe].mx for kind in ("mx", "mx both ways")]
FUSED += [(recipe, kind, True) for recipe in FOLD for kind in ("float", "mx both ways")]
# Of each recipe one is not slow: floats with weights, and in "mxfp8" all of them.
FUSED = [case if case[1:] == ("float", True) or case[0] == "mxfp8" else slow(*case) for case in FUSED]


def operand(x, kind: str):
    return x if kind == "float" else MXArray.quantize(x)


def weights(weighted: bool) -> tuple[jax.Array, ...]:
    return (W1, W3, W2, PROB) if weighted else (W1, W3, W2)


@cache
def fused(recipe: str, kind: str, weighted: bool):
    """Value and gradients of the feed-forward."""
    mx_grad = kind == "mx both ways"
    options = {"recipe": FOLD.get(recipe, recipe), "mx_grad": mx_grad, "pad_token_groups": False}

    def ffn(x, w1, w3, w2, prob=None):
        return one_rank(grouped_swiglu_ffn(operand(x, kind), w1, w3, w2, ENDS, prob, **options), mx_grad)

    return results(ffn, DY, X, *weights(weighted))


@partial(jax.jit, static_argnums=(0, 1, 2))
def folded_input_gradient(mm, kind: str, weighted: bool):
    """The gradient of x in fp32."""
    mx_grad, prob = kind == "mx both ways", PROB if weighted else jnp.zeros(0)
    x = operand(X, kind)
    gate, up = mm(x, W1), mm(x, W3)
    h = swiglu(gate, up, PROB if weighted else None)
    (dh,) = jax.vjp(lambda h: one_rank(mm(h, W2, mx_grad=mx_grad), mx_grad), h)[1](DY)
    return folded_sum(ops.swiglu_bwd(dh, gate, up, prob)[:2], (W1, W3), ENDS)


@pytest.mark.parametrize(("recipe", "kind", "weighted"), FUSED)
def test_fused_is_composed(recipe: str, kind: str, weighted: bool) -> None:
    """To the byte. x is fp32 in the composed function: its gradient is the fp32 sum of both products and, rounded,
    the gradient of a bf16 x. Folded rows of dgate and dup have a headroom, folded rows of `grouped_mm` have none."""
    mx_grad = kind == "mx both ways"
    mm = partial(grouped_mm, group_ends=ENDS, recipe=FOLD.get(recipe, recipe), pad_token_groups=False)

    def composed(x, w1, w3, w2, prob=None):
        x = operand(x, kind)
        h = swiglu(mm(x, w1), mm(x, w3), prob)
        return one_rank(mm(h, w2, mx_grad=mx_grad), mx_grad)

    got = fused(recipe, kind, weighted)
    want = results(composed, DY, X.astype(jnp.float32), *weights(weighted))
    dx = folded_input_gradient(mm, kind, weighted) if recipe in FOLD else want[1]
    want = (want[0], dx.astype(jnp.bfloat16), *want[2:])
    for name, g, w in zip(("y", *NAMES), got, want, strict=False):
        np.testing.assert_array_equal(g, w, err_msg=name)
    assert [g.dtype for g in got] == [a.dtype for a in (DY, X, *weights(weighted))]


@pytest.mark.parametrize("mx", [False, True])
def test_groups_of_any_size_are_padded(mx: bool) -> None:
    """To the bytes of whole groups of which all rows but these are zeros."""
    sizes, whole = [33, 0, 95], [64, 32, 96]
    rows = np.concatenate([begin + np.arange(n) for begin, n in zip(np.cumsum([0, *whole]), sizes, strict=False)])

    def padded(x, w1, w3, w2, prob):
        x = MXArray.quantize(x) if mx else x
        return grouped_swiglu_ffn(x, w1, w3, w2, jnp.cumsum(jnp.array(sizes)), prob, recipe="mxfp8")

    def by_hand(x, w1, w3, w2, prob):
        x, prob = (jnp.zeros((sum(whole), *a.shape[1:]), a.dtype).at[rows].set(a) for a in (x, prob))
        x = MXArray.quantize(x) if mx else x
        return whole_blocks(x, w1, w3, w2, jnp.cumsum(jnp.array(whole)), prob)[rows]

    dy, x, prob = (a[: sum(sizes)] for a in (DY, X, PROB))
    for g, w in zip(results(padded, dy, x, W1, W3, W2, prob), results(by_hand, dy, x, W1, W3, W2, prob), strict=True):
        np.testing.assert_array_equal(g, w)


def test_a_wide_x_gets_the_unrounded_sum() -> None:
    (wide,), (narrow,) = (
        jax.vjp(jax.jit(lambda x: grouped_swiglu_ffn(x, W1, W3, W2, ENDS, PROB)), x)[1](DY)
        for x in (X.astype(jnp.float32), X)
    )
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)
    assert not np.array_equal(wide, narrow)


@pytest.mark.parametrize("recipe", [*RECIPES, *FOLD])
def test_what_reads_x_is_quantized_and_folded_once_and_h_is_never_a_kernels_input(recipe: str) -> None:
    def run(*arguments):
        options = {"recipe": FOLD.get(recipe, recipe), "pad_token_groups": False}
        y, backward = jax.vjp(lambda *a: grouped_swiglu_ffn(*a[:4], ENDS, a[4], **options), *arguments)
        return y, backward(y)

    expected = {
        "bf16": {
            "grouped_mm_bf16": 3, "grouped_mm_bf16_kn": 1, "grouped_mm_bf16_kn_sum": 1, "grouped_wgrad_bf16": 3,
            "swiglu": 2, "swiglu_bwd": 1,
        },
        "fp8_rowwise": {
            "quantize_rowwise": 1 + 3 + 1 + 1 + 3 + 2, "grouped_mm_fold": 2, "grouped_mm_fold_pair": 1,
            "grouped_mm_fold_sum": 1, "grouped_wgrad_bf16": 3, "swiglu": 2, "swiglu_bwd": 1,
        },
        "fp8_blockwise": {
            "quantize_blockwise_fold": 1 + 1, "quantize_squares_both": 3, "grouped_mm_blockwise": 4,
            "grouped_mm_blockwise_sum": 1, "grouped_wgrad_fold": 1, "grouped_wgrad_fold_pair": 1,
            "swiglu_blockwise": 1, "swiglu_blockwise_bwd": 1, "swiglu_bwd_fold": 1,
        },
        "mxfp8_wgrad_with_hp": {
            "quantize_row": 1 + 3, "quantize_both": 3, "grouped_mm_mx": 6, "grouped_wgrad_bf16": 3,
            "swiglu_row": 1, "swiglu": 1, "swiglu_bwd": 1,
        },
        "mxfp8": {
            "quantize_row": 1, "quantize_col": 1, "quantize_both": 3 + 1, "grouped_mm_mx": 6,
            "grouped_wgrad_mx": 3, "swiglu_row": 1, "swiglu_bwd_all": 1,
        },
        "mxfp8_wgrad_with_hp fold": {
            "quantize_row_fold": 1 + 3, "quantize_matrix_fold": 3, "grouped_mm_fold": 2,
            "grouped_mm_fold_pair": 1, "grouped_mm_fold_sum": 1, "grouped_wgrad_bf16": 3,
            "swiglu_row_fold": 1, "swiglu": 1, "swiglu_bwd": 1,
        },
        # x and dout in one read each; tokens of h, and rows and tokens of two gradients, come folded from SwiGLU
        "mxfp8 fold": {
            "quantize_both_fold": 2, "quantize_matrix_fold": 3,
            "grouped_mm_fold": 2, "grouped_mm_fold_pair": 1, "grouped_mm_fold_sum": 1,
            "grouped_wgrad_fold": 1, "grouped_wgrad_fold_pair": 1, "swiglu_row_fold": 1, "swiglu_bwd_fold": 1,
        },
    }  # fmt: skip
    assert kernels(run, X, W1, W3, W2, PROB) == expected[recipe]


def test_on_hopper_exact_products_dequantize_what_reads_x_once() -> None:
    """Rows of x, h and three gradients, tokens of the same, and each weight where it is multiplied."""
    recipe = Recipe.parse("mxfp8", compute="exact")

    def run(x, w1, w3, w2, prob):
        options = {"recipe": recipe, "pad_token_groups": False}
        y, backward = jax.vjp(lambda *a: grouped_swiglu_ffn(*a[:4], ENDS, a[4], **options), x, w1, w3, w2, prob)
        return y, backward(y)

    with lower_for("sm_90"):
        found = kernels(run, X, W1, W3, W2, PROB)
    assert found["dequantize"] == 5 + 5 + 6
    assert {name: n for name, n in found.items() if name.startswith("grouped")} == {
        "grouped_mm_bf16": 6, "grouped_wgrad_bf16_t": 3,
    }  # fmt: skip


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", *FOLD])
def test_x_gate_and_up_are_what_is_saved(recipe: str) -> None:
    x, options = MXArray.quantize(X), {"recipe": FOLD.get(recipe, recipe), "pad_token_groups": False}
    _, backward = jax.vjp(lambda *a: grouped_swiglu_ffn(x, *a, ENDS, PROB, **options), W1, W3, W2)
    saved = sorted((str(a.dtype), a.shape) for a in jax.tree.leaves(backward) if a.shape[:1] == (M,) and a.size)
    rows = [("bfloat16", (M, F))] * 2 + [("float32", (M,)), ("uint8", (M, D // 32)), ("uint8", (M, D))]
    assert [s for s in saved if s != ("bfloat16", (M, D))] == rows, "besides the carrier, which compiles away"


def one_weight(x, w1):
    return one_rank(grouped_swiglu_ffn(x, w1, W3, W2, ENDS, PROB, mx_grad=True), True)


@pytest.mark.parametrize("wrapped", [jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f)), "scan"])
def test_remat_and_scan_do_not_change_a_gradient(wrapped) -> None:
    def scanned(x, w1):
        return jax.lax.scan(lambda carry, _: (carry + one_weight(x, w1), None), jnp.zeros_like(DY), length=1)[0]

    got = results(scanned if wrapped == "scan" else wrapped(one_weight), DY, X, W1)
    for a, b in zip(got, results(one_weight, DY, X, W1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_shard_map_sums_the_gradient_of_what_is_replicated() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("dp",))
    local = partial(grouped_swiglu_ffn, group_ends=ENDS)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("dp"), P(), P(), P()), out_specs=P("dp"))
    x, dy = jnp.concatenate([X, DY]), jnp.concatenate([DY, X])
    y, dx, dw1, *_ = results(sharded, dy, x, W1.astype(jnp.float32), W3, W2)
    parts = [results(local, g, part, W1.astype(jnp.float32), W3, W2) for part, g in ((X, DY), (DY, X))]
    np.testing.assert_array_equal(y, jnp.concatenate([part[0] for part in parts]))
    np.testing.assert_array_equal(dx, jnp.concatenate([part[1] for part in parts]))
    np.testing.assert_allclose(dw1, parts[0][2] + parts[1][2], rtol=1e-6, atol=1e-6)


def test_checkify_finds_a_bad_value_inside_jit() -> None:
    checked = checkify.checkify(jax.jit(lambda ends: grouped_swiglu_ffn(X, W1, W3, W2, ends)))
    error, _ = checked(ENDS[::-1])
    with pytest.raises(checkify.JaxRuntimeError, match=r"grouped_swiglu_ffn: group_ends: .*do not decrease"):
        error.throw()
    assert checked(ENDS)[0].get() is None


def test_counts_of_groups_in_place_of_ends() -> None:
    sizes = jnp.array(SIZES, jnp.int16)
    got, want = (grouped_swiglu_ffn(X, W1, W3, W2, **kind) for kind in ({"group_sizes": sizes}, {"group_ends": ENDS}))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="grouped_swiglu_ffn: group_ends, group_sizes: got both; allowed: one of them"):
        grouped_swiglu_ffn(X, W1, W3, W2, ENDS, group_sizes=sizes)
    with pytest.warns(UserWarning, match="the last end is 75 of 160 rows, .* counts go to group_sizes=") as found:
        grouped_swiglu_ffn(X, W1, W3, W2, jnp.array([10, 20, 75]))
    assert found[0].filename == __file__


@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise"])
def test_recipes_without_blocks_take_the_values_of_mx_rows(recipe: str) -> None:
    x = MXArray.quantize(X)
    got, want = (grouped_swiglu_ffn(rows, W1, W3, W2, ENDS, recipe=recipe) for rows in (x, x.dequantize()))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_swiglu_ffn(X.astype("float16"), W1, W3, W2, ENDS), TypeError, "x: got dtype float16"),
        (lambda: grouped_swiglu_ffn(X, W1[0], W3, W2, ENDS), ValueError, r"allowed: \(P, D\) and \(G, F, D\)"),
        (lambda: grouped_swiglu_ffn(X, [W1], W3, W2, ENDS), TypeError, "w1: got list"),
        (lambda: grouped_swiglu_ffn(X, W2, W3, W2, ENDS), ValueError, "w1: got shape"),
        (lambda: grouped_swiglu_ffn(X, W1, W3[:2], W2, ENDS), ValueError, "w3: got shape"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W1, ENDS), ValueError, "w2: got shape"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W2.astype(int), ENDS), TypeError, "w2: got dtype int32"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W2, ENDS, PROB[1:]), ValueError, "prob: got shape"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W2, ENDS, PROB.astype("bfloat16")), TypeError, "prob: got dtype"),
        (lambda: grouped_swiglu_ffn(X, W1[:, :33], W3[:, :33], W2[..., :33], ENDS), ValueError, "F, = 33"),
        (lambda: whole_blocks(X[:33], W1, W3, W2, ENDS), ValueError, "rows = 33.*use pad_token_groups=True"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W2, ENDS + 1), ValueError, "group_ends: .* at most 160"),
        (lambda: whole_blocks(X, W1, W3, W2, ENDS - 1), ValueError, "multiples of 32"),
        (lambda: grouped_swiglu_ffn(X, W1, W3, W2, jnp.ones(3)), TypeError, "group_ends: got dtype float32"),
        (lambda: swiglu(X, X[:3]), ValueError, "swiglu: up: got shape"),
        (lambda: swiglu(X.astype("float32"), X), TypeError, "swiglu: gate: got dtype float32"),
        (lambda: swiglu(X, X, np.ones(len(X))), TypeError, "swiglu: prob: got dtype float64; allowed: float32"),
        (lambda: swiglu(X, X, jnp.zeros(0)), ValueError, r"swiglu: prob: got shape \(0,\)"),
        (lambda: jax.vmap(swiglu)(X[None], X[None]), NotImplementedError, r"jax\.vmap"),
    ],
)
def test_a_bad_argument_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
