"""The feed-forward with biases and a clamped SwiGLU, byte for byte the functions it is made of. Its gradients are
compared with their definition in tests/conformance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import Recipe, SwiGLU, grouped_mm, grouped_swiglu_ffn, ops, swiglu

from ..references import folded_sum, normal
from .test_ffn import DY, ENDS, PROB, W1, W2, W3, D, F, M, X, results

CLAMPED = SwiGLU(alpha=1.702, limit=1.5, offset=1.0)
B1, B3, B2 = (normal(3, n, seed=seed) for n, seed in ((F, 11), (F, 12), (D, 13)))
BIASES = (B1, B3, B2)


def test_the_gradient_of_swiglu_is_the_kernels() -> None:
    gate, up, dh = (normal(M, F, seed=seed) for seed in range(3))
    got = results(partial(swiglu, activation=CLAMPED), dh, gate, up, PROB)
    want = (
        ops.swiglu(gate, up, PROB, None, *CLAMPED.attributes),
        *ops.swiglu_bwd(dh, gate, up, PROB, None, *CLAMPED.attributes),
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_fused_is_composed(compute: str) -> None:
    """x is fp32 in the composed one, whose gradient is then the fp32 sum of both products."""
    options = {"recipe": Recipe.parse("mxfp8", compute=compute), "pad_token_groups": False}

    def fused(x, w1, w3, w2, b1, b3, b2):
        return grouped_swiglu_ffn(x, w1, w3, w2, ENDS, biases=(b1, b3, b2), activation=CLAMPED, **options)

    def composed(x, w1, w3, w2, b1, b3, b2):
        mm = partial(grouped_mm, group_ends=ENDS, **options)
        return mm(swiglu(mm(x, w1, bias=b1), mm(x, w3, bias=b3), activation=CLAMPED), w2, bias=b2)

    got, want = (results(f, DY, x, W1, W3, W2, *BIASES) for f, x in ((fused, X), (composed, X.astype(jnp.float32))))
    dx = want[1]
    if compute == "fold":  # rows of dgate and dup have a headroom, rows of `grouped_mm` have none
        mm = partial(grouped_mm, group_ends=ENDS, **options)

        @jax.jit
        def input_gradient() -> jax.Array:
            gate, up = mm(X, W1, bias=B1), mm(X, W3, bias=B3)
            h = swiglu(gate, up, activation=CLAMPED)
            (dh,) = jax.vjp(lambda h: mm(h, W2, bias=B2), h)[1](DY)
            dgate, dup, _ = ops.swiglu_bwd(dh, gate, up, jnp.zeros(0), None, *CLAMPED.attributes)
            return folded_sum((dgate, dup), (W1, W3), ENDS)

        dx = input_gradient()
    want = (want[0], dx.astype(jnp.bfloat16), *want[2:])
    for name, g, w in zip(("y", "x", "w1", "w3", "w2", "b1", "b3", "b2"), got, want, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w, err_msg=name)


def test_padding_rows_do_not_count_without_a_weight_either() -> None:
    """h of a row of zeros is made of the biases alone. With weights of one the padding has weights of zero."""
    ends = jnp.array([33, 33, 100], jnp.int32)

    def ffn(x, w1, w3, w2, b1, b3, b2, prob=None):
        return grouped_swiglu_ffn(x, w1, w3, w2, ends, prob, biases=(10 * b1, 10 * b3, b2))

    arguments = X[:100], W1, W3, W2, *BIASES
    got, want = results(ffn, DY[:100], *arguments), results(ffn, DY[:100], *arguments, jnp.ones(100))
    for g, w in zip(got, want, strict=False):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"biases": (B1.astype("float16"), None, None)}, TypeError, "b1: got dtype float16"),
        ({"biases": (None, None, B1)}, ValueError, r"b2: got shape \(3, 96\); allowed: \(64,\) or \(3, 64\)"),
        ({"biases": (None, 1.0, None)}, TypeError, "b3: got float"),
        ({"biases": (None, None)}, TypeError, "biases: got 2 items; allowed: None, or a tuple"),
        ({"activation": "gelu"}, TypeError, "activation: got 'gelu'; allowed: a SwiGLU"),
    ],
)
def test_a_bad_argument_is_named(options: dict, error, message: str) -> None:
    with pytest.raises(error, match=message):
        grouped_swiglu_ffn(X, W1, W3, W2, ENDS, **options)
