"""A complete Mixture-of-Experts layer on the MXFP8 pipeline, with expert parallelism on or off.

    x (T, D) --router--> top_k experts and probabilities per token
       |                             |
       '--spread, sorted by expert--> rows (T K, D) --[dispatch]--> permute --> experts (SwiGLU) --.
                                                                                                   |
    y (T, D) <-- fp32 sum over K of probability x row <-- token order <--[combine]<-- unpermute <--'

T tokens   D dim   F hidden_dim   E experts   K top_k      suffixes below name the dims
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import ep, ops, vjp
from ._call import vary, varying_axes
from ._checks import check_floats
from .mx_array import MXArray

Params = dict[str, Any]
SCORES = ("softmax", "sigmoid")


class MoEStats(NamedTuple):
    """counts (E,) int32: rows that this rank's tokens send to each expert. aux_loss: fp32 scalar,
    E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch Transformer,
    equation 4). overflow () int32: this rank's rows that did not fit the capacity; 0 when dropless."""

    counts: jax.Array
    aux_loss: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a layer; hashable, a static argument of a jitted function.

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in fp32.
    normalize: divide the top_k scores of a token by their sum. recipe: a Recipe or one of
    "mxfp8_wgrad_with_hp", "mxfp8", "bf16". capacity: rows that each pair of ranks exchanges at most;
    None is all of a rank's rows, which never drops one.

    Raises ValueError and TypeError on sizes and names that are not allowed.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    recipe: Recipe | str = "mxfp8_wgrad_with_hp"
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "capacity"):
            size = getattr(self, name)
            if type(size) is not int and not (name == "capacity" and size is None):
                fail(TypeError, "MoEConfig", name, repr(size), "allowed: an int")
        for name in ("dim", "hidden_dim"):
            size = getattr(self, name)
            if size <= 0 or size % BLOCK:
                fail(ValueError, "MoEConfig", name, size, f"allowed: positive multiples of {BLOCK}")
        if not 1 <= self.top_k <= self.num_experts:
            fail(ValueError, "MoEConfig", "top_k", self.top_k, f"allowed: 1 to num_experts = {self.num_experts}")
        if self.score_func not in SCORES:
            names = " or ".join(map(repr, SCORES))
            fail(ValueError, "MoEConfig", "score_func", repr(self.score_func), f"allowed: {names}")
        if self.capacity is not None and self.capacity < 1:
            fail(ValueError, "MoEConfig", "capacity", self.capacity, "allowed: at least 1, or None for dropless")
        object.__setattr__(self, "recipe", Recipe.parse(self.recipe))


def init(key: jax.Array, config: MoEConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw {"router": (E, D), "experts": {"w1", "w3": (E, F, D), "w2": (E, D, F)}} from truncated normals
    of deviation 1 / sqrt(fan in)."""
    e, d, f = config.num_experts, config.dim, config.hidden_dim
    shapes = {"router": (e, d), "w1": (e, f, d), "w2": (e, d, f), "w3": (e, f, d)}
    drawn = {
        name: jax.random.truncated_normal(k, -2.0, 2.0, shape, dtype) * shape[-1] ** -0.5
        for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }
    return {"router": drawn.pop("router"), "experts": drawn}


def apply(
    params: Params, x: jax.Array, config: MoEConfig, *, axis_name: str | None = None
) -> tuple[jax.Array, MoEStats]:
    """Run the layer on this device's tokens: x (..., D) bf16 or fp32 -> (y like x, MoEStats).

    params: as `init` makes them. With axis_name, inside `jax.shard_map`: params["experts"] holds this rank's
    E / ep experts (shard the first dim), params["router"] all of them, and x this rank's tokens.

    >>> config = MoEConfig(32, 64, num_experts=4, top_k=2)
    >>> y, stats = apply(init(jax.random.key(0), config), jnp.ones((5, 32)), config)
    >>> y.shape, stats.counts.sum().item()
    ((5, 32), 10)

    Raises ValueError where x, params, config and the mesh axis do not fit each other, TypeError for dtypes.
    """
    check_floats("moe.apply", "x", x)
    if x.ndim < 1 or x.shape[-1] != config.dim:
        fail(ValueError, "moe.apply", "x", f"shape {x.shape}", f"allowed: (..., {config.dim})")
    _check_params(params, config, axis_name)
    x_TD = x.reshape(-1, config.dim)
    probs_TK, experts_TK, scores_TE = _route(params["router"], x_TD, config)
    order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1), config.num_experts)
    rows = vjp.spread_rows(x_TD.astype(jnp.bfloat16), order, inverse, config.top_k)
    rows, overflow = _run_experts(params["experts"], rows, counts, config, axis_name)
    y_TKD = vjp.gather_rows(rows, inverse, order).reshape(-1, config.top_k, config.dim)
    y_TD = (y_TKD.astype(jnp.float32) * probs_TK[..., None]).sum(1)
    fraction_E = counts.astype(jnp.float32) / max(experts_TK.size, 1)
    mean_prob_E = scores_TE.sum(0) / max(x_TD.shape[0], 1)
    aux_loss = config.num_experts * (fraction_E * mean_prob_E).sum()
    return y_TD.astype(x.dtype).reshape(x.shape), MoEStats(counts, aux_loss, overflow)


def _check_params(params: Params, config: MoEConfig, axis_name: str | None) -> None:
    e, d, f = config.num_experts, config.dim, config.hidden_dim
    ranks = ep.axis_size("moe.apply", axis_name)
    if e % ranks:
        allowed = f"allowed: a multiple of the {ranks} ranks of mesh axis {axis_name!r}"
        fail(ValueError, "moe.apply", "config.num_experts", e, allowed)
    local = e // ranks
    allowed = {"router": (e, d), "w1": (local, f, d), "w2": (local, d, f), "w3": (local, f, d)}
    for name, shape in allowed.items():
        holder = params if name == "router" else params.get("experts", {})
        if name not in holder:
            layout = "allowed: 'router' and 'experts' with 'w1', 'w2', 'w3', as `moe.init` makes them"
            fail(ValueError, "moe.apply", "params", f"no {name!r}", layout)
        check_floats("moe.apply", f"params {name!r}", holder[name])
        got = holder[name].shape
        if got != shape:
            why = f"allowed: {shape} on each of {ranks} ranks"
            fail(ValueError, "moe.apply", f"params {name!r}", f"shape {got}", why)


def _route(router: jax.Array, x_TD: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Probabilities and experts (T, K) of each token's choice, and the scores (T, E) as probabilities.

    Of equal scores the lower expert comes first."""
    # A GPU's default for fp32 is tf32, whose 10 bits choose other experts than torch's fp32 does.
    logits_TE = jnp.matmul(x_TD.astype(jnp.float32), router.astype(jnp.float32).T, precision="highest")
    scores_TE = jax.nn.softmax(logits_TE) if config.score_func == "softmax" else jax.nn.sigmoid(logits_TE)
    chosen_TK, experts_TK = jax.lax.top_k(scores_TE, config.top_k)
    if config.normalize:
        chosen_TK = _shares(chosen_TK)
    return chosen_TK, experts_TK.astype(jnp.int32), _shares(scores_TE)


def _shares(scores: jax.Array) -> jax.Array:
    """Scores over their sum along the last dim; zeros where every sigmoid has underflowed to zero."""
    return scores / jnp.maximum(scores.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, computed in fp32 and rounded once to gate's dtype."""
    product = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return product.astype(gate.dtype)


def _run_experts(
    experts: Params, rows: jax.Array, counts: jax.Array, config: MoEConfig, axis_name: str | None
) -> tuple[jax.Array, jax.Array]:
    """Rows sorted by expert -> the experts' outputs in the same order, and how many rows did not fit."""
    recipe = Recipe.parse(config.recipe)
    exchange = ep.plan_exchange(counts, axis_name, num_rows=rows.shape[0], capacity=config.capacity)
    num_local_experts = config.num_experts // exchange.ep_degree
    layout = (exchange.recv_counts, exchange.ep_degree, num_local_experts, recipe.alignment)
    if recipe.quantized:
        received = ep.a2a_dispatch_mxfp8_fwd_hp_bwd(rows, exchange, recipe.rounding)
        groups, maps = vjp.permute_mxfp8_fwd_hp_bwd(received, *layout, rank_rows=exchange.capacity)
    else:
        groups, maps = vjp.permute(ep.a2a_dispatch(rows, exchange), *layout, rank_rows=exchange.capacity)

    def mm(x: jax.Array | MXArray, name: str, mx_grad: bool = False) -> Any:
        # In the parameter's own dtype: over a mesh axis that replicates it, JAX sums the gradient in that dtype.
        weight = vary(experts[name], varying_axes(*jax.tree.leaves(x))).astype(jnp.bfloat16)
        return vjp.mxfp8_grouped_mm(x, weight, maps.group_ends, recipe=recipe, mx_grad=mx_grad)

    hidden = swiglu(mm(groups, "w1"), mm(groups, "w3"))
    out = vjp.unpermute_hp_fwd_mxfp8_bwd(mm(hidden, "w2", mx_grad=recipe.quantized), maps)
    rows = ep.a2a_combine_hp_fwd_mxfp8_bwd(out, exchange, recipe.rounding, mxfp8_bwd=recipe.quantized)
    return rows, exchange.overflow
