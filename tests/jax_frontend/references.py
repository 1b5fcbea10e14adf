"""Formulas in jax.numpy and fp32, and the primitives of a traced program."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from mxep.core_kernels.formats import GRADIENT_HEADROOM, WEIGHT_HEADROOM
from mxep.jax_frontend import MoEConfig, ops


def primitives(f: Callable, *arguments) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel, and each primitive of JAX, is in the program of f."""
    kernels: Counter[str] = Counter()
    others: Counter[str] = Counter()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "mxep_kernel":
                kernels[equation.params["op"].name] += 1
            others[equation.primitive.name] += 1
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(f)(*arguments).jaxpr)
    return kernels, others


def kernels(f: Callable, *arguments) -> Counter[str]:
    return primitives(f, *arguments)[0]


@partial(jax.jit, static_argnums=0)
def results(f: Callable, dy: jax.Array, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    """Value and gradients. The same f with the same shapes compiles once, whichever tests ask."""
    y, backward = jax.vjp(f, *arguments)
    return y, *backward(dy)


def folded_sum(gradients, weights, group_ends: jax.Array) -> jax.Array:
    """The sum in fp32 of the products of dgate and dup (M, F), whose folded rows have a headroom, with w1 and w3."""
    total = jnp.float32(0)
    for gradient, w in zip(gradients, weights, strict=True):
        rows = ops.quantize_row_fold(gradient, headroom=GRADIENT_HEADROOM)
        columns = ops.fold_rows(*ops.quantize_col(w), headroom=WEIGHT_HEADROOM)
        total += ops.grouped_mm_fold(*rows, *columns, group_ends, out_dtype="float32")
    return total


def normal(*shape: int, seed: int = 0, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def moe(params: dict, x: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """Every expert on every token, then the chosen ones: (y, aux_loss)."""
    logits = x @ params["router"].T
    scores = jax.nn.softmax(logits) if config.router.score_func == "softmax" else jax.nn.sigmoid(logits)
    probs, chosen = jax.lax.top_k(scores, config.router.top_k)
    probs = probs / probs.sum(-1, keepdims=True) if config.router.normalize else probs
    w = params["experts"]
    hidden = jax.nn.silu(jnp.einsum("td,efd->tef", x, w["w1"])) * jnp.einsum("td,efd->tef", x, w["w3"])
    out = jnp.einsum("tef,edf->ted", hidden, w["w2"])
    y = (jnp.take_along_axis(out, chosen[..., None], 1) * probs[..., None]).sum(1)
    fraction = jnp.bincount(chosen.reshape(-1), length=config.num_experts) / chosen.size
    mean_prob = (scores / scores.sum(-1, keepdims=True)).mean(0)
    return y, config.num_experts * (fraction * mean_prob).sum()
