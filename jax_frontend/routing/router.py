"""The router: from tokens to logits, from logits to experts and weights, and the gradients of both steps.

    x (T, D), weight (E, D) --tokens_and_logits--> logits (T, E) fp32 --route--> experts, weights (T, k), shares (E,)
                                      '--> x (T, D), for the experts

    gradient of x from the experts ---.
    gradient of the logits x weight --+--logits_bwd--> gradient of x

`route` reads the logits once, forward and backward. It saves the logits and the experts. `tokens_and_logits` passes the
tokens on to the experts, so that their gradient meets the router's in fp32: `logits_bwd` adds both and rounds once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import register_namedtuple_serialization

from ...core_kernels.launch import fail
from ...core_kernels.policy.router import RouterConfig, check_router
from .. import ops
from ..ops.call import jitted
from ..ops.checks import (
    check_experts,
    check_floats,
    check_integers,
    check_matrix,
    check_shape,
    check_values,
    clip_experts,
    reads_values,
)
from ..ops.derivatives import arguments
from ..ops.shapes import Float, Float32, Int

jax.tree_util.register_static(RouterConfig)  # `jax.jit` takes it as a static argument, declared or not


class Routing(NamedTuple):
    """The choice of `route`.

    Args:
        experts: (T, k) int32, the chosen experts of each token, best first.
        weights: (T, k) float32, their weights.
        shares: (E,) float32, the sum over the tokens of each expert's share of the scores. The auxiliary loss needs it.

    Attributes:
        experts: (T, k) int32, the chosen experts of each token, best first.
        weights: (T, k) fp32, their weights.
        shares: (E,) fp32, the sum over the tokens of each expert's share of the scores, which the auxiliary loss needs.
    """

    experts: jax.Array
    weights: jax.Array
    shares: jax.Array


register_namedtuple_serialization(Routing, serialized_name="mxep.Routing")


# --- logits ---------------------------------------------------------------------------------------------


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b of bf16 operands in fp32, without a cast of either."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _logits(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x for the experts, and the logits."""
    return x, _product(x, weight.T)


def _logits_bwd(residuals, grads):
    """The gradients multiply an fp32 gradient by bf16 operands. They split it into two bf16 terms, which hold 16 of its
    24 bits, and sum both products in fp32; bf16 results keep 8."""
    (x, weight), (dx, grad) = residuals, grads
    # Not astype alone: XLA may drop a rounding to bf16 and back.
    high = jax.lax.reduce_precision(grad, 8, 7)
    low = jnp.where(jnp.isfinite(high), grad - high, 0)  # infinity less infinity would be NaN
    terms = jnp.concatenate([high, low], axis=1).astype(jnp.bfloat16)
    of_high, of_low = jnp.split(_product(terms.T, x), 2)
    return ops.logits_bwd(terms, weight, dx), (of_high + of_low).astype(weight.dtype)


_logits.defvjp(lambda x, weight: (_logits(x, weight), (x, weight)), _logits_bwd)


def tokens_and_logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """x (T, D) for the experts, and x @ weight (E, D)^T + bias (E,) in fp32; for arguments that the caller has checked.

    bf16 operands are multiplied as they are; others are cast to fp32.
    """
    if x.dtype == weight.dtype == jnp.bfloat16:
        x, logits = _logits(*arguments("router_logits", x, weight))
    else:
        # The default precision of a GPU is tf32, whose 10 bits choose other experts than fp32.
        logits = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32).T, precision="highest")
    return x, logits if bias is None else logits + bias.astype(jnp.float32)[None]


# --- the choice -------------------------------------------------------------------------------------------


def _run(logits: jax.Array, bias: jax.Array | None, router: RouterConfig) -> Routing:
    # Made inside of `jitted`: jaxlib 0.11.2 ends the process when an empty array enters a part of an eager shard_map.
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias
    experts, weights, share_sums = ops.route(logits, bias, **router.options)
    return Routing(experts, weights, share_sums.sum(0))


_route = jax.custom_vjp(_run, nondiff_argnums=(2,))


def _route_fwd(logits, bias, router):
    routing = _run(logits, bias, router)
    return routing, (logits, routing.experts)


def _route_bwd(router, residuals, grads):
    logits, experts = residuals
    _, dweights, dshares = grads  # of a Routing
    scores = {"score_func": router.score_func, "normalize": router.normalize, "route_scale": router.route_scale}
    return ops.route_bwd(dweights, dshares, logits, experts, **scores), None


_route.defvjp(_route_fwd, _route_bwd)
_route_jitted = jitted(_route, 2)


def route(
    logits: Float[jax.Array, "T E"],
    router: RouterConfig,
    *,
    selection_bias: Float32[jax.Array, " E"] | None = None,
) -> Routing:
    """Choose `router.top_k` experts for each token.

    The weights and the shares are differentiable in the logits. The result has the same bits on every device and in
    both frameworks, except for the last sum of `shares`.

    Args:
        logits: (T, E) float32 or bfloat16, E up to 512.
        router: The choice, static. Its fields `bias` and `prob_in` are for layers; this function does not read them.
        selection_bias: (E,) float32, added to the scores for the choice and not for the weights. It is required if
            `router.selection_bias` is True.

    Returns:
        The experts, their weights, and the shares. Of equal scores the lower expert is first. A NaN logit makes its
        token's weights NaN; of sigmoid scores without `normalize` only its expert's weight, and that expert is chosen.

    Raises:
        ValueError: For shapes and values that are not allowed.
        TypeError: For other dtypes and types.

    Example:
        >>> router = RouterConfig(2, score_func="sigmoid", normalize=False)
        >>> experts, weights, _ = route(jnp.array([[0.0, 2.0, 1.0]]), router)
        >>> experts.tolist(), [round(w, 4) for w in weights[0].tolist()]
        ([[1, 2]], [0.8808, 0.7311])

    Source:
        Fedus et al., "Switch Transformers", 2021; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """
    op = "route"
    check_floats(op, "logits", logits)
    check_matrix(op, "logits", logits)
    router = check_router(op, router, logits.shape[1])
    if router.selection_bias and selection_bias is None:
        fail(ValueError, op, "selection_bias", None, "allowed: an array (E,) float32 with router.selection_bias=True")
    bias = None
    if selection_bias is not None:
        check_shape(op, "selection_bias", selection_bias, logits.shape[1:], "one value per expert", "float32")
        bias = jax.lax.stop_gradient(jnp.asarray(selection_bias))
    logits, bias = arguments(op, jnp.asarray(logits), bias)
    return _route_jitted(logits, bias, router)


def check_chosen(op: str, x: jax.Array, num_experts: int, experts: jax.Array | None, weights: jax.Array | None) -> None:
    """Raise unless the caller of a layer for x (..., D) gives no experts and weights, or experts (..., k) of integers
    and weights (..., k) of float32; in eager calls and inside `checkify.checkify` also for experts that do not exist.
    """
    if experts is None or weights is None:
        if experts is weights:
            return
        name, other = ("experts", "weights") if experts is None else ("weights", "experts")
        fail(ValueError, op, name, "None", f"allowed: an array with {other}, or neither")
    check_integers(op, "experts", experts)
    experts = jnp.asarray(experts)
    if experts.ndim != x.ndim or experts.shape[:-1] != x.shape[:-1] or not experts.shape[-1]:
        fail(ValueError, op, "experts", f"shape {experts.shape}", f"allowed: {(*x.shape[:-1], 'k')}, k above 0")
    check_shape(op, "weights", weights, experts.shape, "experts'", "float32")
    check_experts(op, "experts", experts, num_experts)


def external_routing(num_experts: int, experts: jax.Array | None, weights: jax.Array | None) -> Routing | None:
    """Experts and weights that the caller of a layer has chosen, or None without both. shares are zeros. `check_chosen`
    has reported experts that do not exist."""
    if experts is None or weights is None:
        return None
    flat = clip_experts(jnp.asarray(experts).reshape(-1, experts.shape[-1]), num_experts)
    return Routing(flat, jnp.asarray(weights).reshape(flat.shape), jnp.zeros(num_experts, jnp.float32))


def update_selection_bias(
    selection_bias: Float32[jax.Array, " E"], counts: Int[jax.Array, " E"], rate: float
) -> Float32[jax.Array, " E"]:
    """Compute selection_bias + rate * sign(mean(counts) - counts): the load balance of DeepSeek-V3 without a loss.

    A training loop calls it after each step:

        bias = update_selection_bias(bias, stats.counts, 0.001)

    Args:
        selection_bias: (E,) float32.
        counts: (E,) of an integer dtype, the rows of each expert in the last step, as `MoEStats.counts`. The caller
            sums them over data-parallel ranks first.
        rate: A positive number; 0.001 for DeepSeek-V3.

    Returns:
        (E,) float32.

    Raises:
        ValueError: For shapes and rates that are not allowed. Negative counts raise in eager calls on a CPU and under
            checkify.
        TypeError: For other dtypes.

    Example:
        >>> update_selection_bias(jnp.zeros(3), jnp.array([4, 1, 1]), 0.5).tolist()
        [-0.5, 0.5, 0.5]

    Source:
        Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    """
    op = "update_selection_bias"
    check_floats(op, "selection_bias", selection_bias)
    shape = np.shape(selection_bias)
    if len(shape) != 1:
        fail(ValueError, op, "selection_bias", f"shape {shape}", "allowed: (E,)")
    check_shape(op, "selection_bias", selection_bias, shape, "one value per expert", "float32")
    check_shape(op, "counts", counts, shape, "one count per expert", "int")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        fail(TypeError, op, "rate", repr(rate), "allowed: a float")
    if not 0 < rate < float("inf"):
        fail(ValueError, op, "rate", rate, "allowed: positive finite numbers")
    if isinstance(counts, Tracer) or reads_values(counts):
        check_values(counts >= 0, op, "counts", counts, "allowed: counts of at least 0")
    load = jnp.asarray(counts).astype(jnp.float32)
    return jax.lax.stop_gradient(selection_bias + rate * jnp.sign(load.mean() - load))
