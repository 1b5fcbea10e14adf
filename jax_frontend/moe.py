"""A complete Mixture-of-Experts layer on the MXFP8 pipeline, with expert parallelism on or off.

    x (T, D) --router--> top_k experts and probabilities p per token
       |
       |   one device
       '--quantize--> T rows --to padded groups--> (P, D) --experts (ffn.py)--> (P, D) -----------.
       |                                                                                          |
       |   expert parallel                                                                        |
       '--quantize--> T rows --to the ranks' parts--[dispatch]--> permute --> experts --.         |
                                                                                        |         |
    y (T, D) <-- combine.py: fp32 sum over K of p x row <--[combine]<-- unpermute <-----'---------'

prob_in = "swiglu": p goes with the rows into the experts, w2 (p silu(w1 x) * w3 x), and the last sum is unweighted.

T tokens   D dim   F hidden_dim   E experts   K top_k   P rows of padded groups      suffixes below name the dims
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import ep, ops
from ._call import vary, varying_axes
from ._checks import check_floats, check_type, dtype_name
from ._derivatives import reverse_only
from .combine import weighted_combine
from .ep import Axes
from .ffn import grouped_swiglu_ffn
from .mx_array import MXArray, MXGradArray
from .permute import gather_rows, permute, permute_mxfp8_fwd_hp_bwd, spread_rows, unpermute_hp_fwd_mxfp8_bwd
from .weights import Weights, check_weights, recipe_of, settled

Params = dict[str, Any]
SCORES = ("softmax", "sigmoid")
PROB_IN = ("combine", "swiglu")


class MoEStats(NamedTuple):
    """Of all ranks' tokens, the same on every rank. counts (E,) int32: rows that go to each expert. aux_loss: fp32
    scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch Transformer, equation 4).
    overflow () int32: rows that did not fit the capacity; 0 when dropless."""

    counts: jax.Array
    aux_loss: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a layer; hashable, a static argument of a jitted function.

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in fp32.
    normalize: divide the top_k scores of a token by their sum. recipe: a Recipe or one of "mxfp8_wgrad_with_hp",
    "mxfp8", "bf16", as in `mxfp8_grouped_mm`. capacity: rows that each pair of ranks exchanges at most; None is all of
    a rank's rows, which never drops one. prob_in: where a row is weighed by its probability: "combine", when the rows
    are summed, or "swiglu", inside the expert, where the probabilities travel with the rows and the experts' outputs,
    T * top_k * dim bf16 values, need not be kept for the backward.

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
    prob_in: Literal["combine", "swiglu"] = "combine"

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
        for name, names in (("prob_in", PROB_IN), ("score_func", SCORES)):
            if getattr(self, name) not in names:
                allowed = f"allowed: {' or '.join(map(repr, names))}"
                fail(ValueError, "MoEConfig", name, repr(getattr(self, name)), allowed)
        if self.capacity is not None and self.capacity < 1:
            fail(ValueError, "MoEConfig", "capacity", self.capacity, "allowed: at least 1, or None for dropless")
        check_type("MoEConfig", "normalize", self.normalize, bool)
        object.__setattr__(self, "recipe", recipe_of("MoEConfig", self.recipe))


def init(key: jax.Array, config: MoEConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw {"router": (E, D), "experts": {"w1", "w3": (E, F, D), "w2": (E, D, F)}} from truncated normals
    of deviation 1 / sqrt(fan in).

    Raises TypeError unless key is one of jax.random, config a MoEConfig and dtype bf16 or fp32."""
    op = "moe.init"
    check_type(op, "config", config, MoEConfig)
    dtype = dtype_name(op, "dtype", dtype)
    is_key = isinstance(key, jax.Array) and (
        (jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and not key.ndim) or (key.dtype == jnp.uint32 and key.ndim == 1)
    )
    if not is_key:
        got = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        fail(TypeError, op, "key", got, "allowed: one key of jax.random")
    e, d, f = config.num_experts, config.dim, config.hidden_dim
    shapes = {"router": (e, d), "w1": (e, f, d), "w2": (e, d, f), "w3": (e, f, d)}
    drawn = {
        name: jax.random.truncated_normal(k, -2.0, 2.0, shape, dtype) * shape[-1] ** -0.5
        for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }
    return {"router": drawn.pop("router"), "experts": drawn}


def apply(
    params: Params, x: jax.Array, config: MoEConfig, *, axis_name: Axes | None = None, token_axes: Axes | None = None
) -> tuple[jax.Array, MoEStats]:
    """Run the layer on this device's tokens: x (..., D) bf16 or fp32 -> (y like x, MoEStats).

    Expert parallelism is axis_name, a mesh axis or a tuple of them, inside `jax.shard_map`: params["experts"] holds
    this rank's E / ep experts (shard the first dim), params["router"] all of them, and x this rank's tokens. Sharded
    experts under jit alone give the same numbers and no parallelism: XLA gathers them on every device.
    token_axes: the mesh axes that tokens are split over, where axis_name is not all of them: on a mesh of data and
    expert ranks ("data", "ep"). The stats are sums and means over these, so their PartitionSpec is P().
    params: as `init` makes them. An expert weight may be QuantizedWeights: `quantize_weights(w, recipe=config.recipe)`
    holds the bytes that the layer makes of w.

    Nothing is left to reduce: of parameters that are P() on an axis, JAX sums the gradient over it. The loss is a mean
    over the global batch, computed outside of shard_map or by psum inside it, plus a weight times `aux_loss`:

        def layer(params, x):
            return moe.apply(params, x, config, axis_name="ep")

        specs = {"router": P(), "experts": P("ep")}
        layer = jax.shard_map(layer, mesh=mesh, in_specs=(specs, P("ep")), out_specs=(P("ep"), P()))

        def loss(params, x, target):
            y, stats = layer(params, x)
            return ((y - target) ** 2).mean() + 0.01 * stats.aux_loss

    >>> config = MoEConfig(32, 64, num_experts=4, top_k=2)
    >>> y, stats = apply(init(jax.random.key(0), config), jnp.ones((5, 32)), config)
    >>> y.shape, stats.counts.sum().item()
    ((5, 32), 10)

    Raises ValueError where x, params, config and the mesh axis do not fit each other or QuantizedWeights are another
    recipe's, TypeError for dtypes.
    """
    op = "moe.apply"
    check_type(op, "config", config, MoEConfig)
    check_floats(op, "x", x)
    if x.ndim < 1 or x.shape[-1] != config.dim:
        fail(ValueError, op, "x", f"shape {x.shape}", f"allowed: (..., {config.dim})")
    _check_params(params, config, axis_name)
    token_axes = axis_name if token_axes is None else token_axes
    replicas = ep.axis_size(op, token_axes, "token_axes")
    params, x = reverse_only(op, (params, x), rows="x (..., D) with any leading dims")
    x_TD = x.reshape(-1, config.dim)
    probs_TK, experts_TK, scores_TE = _route(params["router"], x_TD, config)
    order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1), config.num_experts)
    routing = _Routing(order, inverse.reshape(-1, config.top_k), counts, probs_TK)
    overflow = jnp.zeros((), jnp.int32)
    if axis_name is None and config.capacity is None:
        y_TD = _on_one_device(params["experts"], x_TD, routing, config)
    else:
        y_TD, overflow = _across_ranks(params["experts"], x_TD, routing, config, axis_name)
    counts, overflow, scores_E = (_total(s, token_axes) for s in (counts, overflow, scores_TE.sum(0)))
    fraction_E = counts.astype(jnp.float32) / max(replicas * experts_TK.size, 1)
    mean_prob_E = scores_E / max(replicas * x_TD.shape[0], 1)
    aux_loss = config.num_experts * (fraction_E * mean_prob_E).sum()
    return y_TD.reshape(x.shape), MoEStats(counts, aux_loss, overflow)


def _total(x: jax.Array, axes: Axes | None) -> jax.Array:
    """x summed over the ranks of mesh axes; a gradient goes back to each of them."""
    if axes is None:
        return x
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return jax.lax.psum(vary(x, axes), axes)


def _check_params(params: Params, config: MoEConfig, axis_name: Axes | None) -> None:
    layout = "allowed: 'router' and 'experts' with 'w1', 'w2', 'w3', as `moe.init` makes them"
    if not isinstance(params, Mapping) or not isinstance(params.get("experts", {}), Mapping):
        fail(TypeError, "moe.apply", "params", type(params).__name__, layout)
    recipe = settled("moe.apply", config.recipe)
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
            fail(ValueError, "moe.apply", "params", f"no {name!r}", layout)
        if name == "router":
            check_floats("moe.apply", "params 'router'", holder[name])
        else:
            check_weights("moe.apply", f"params {name!r}", holder[name], recipe)
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


class _Routing(NamedTuple):
    """Slots, T K of them, sorted by expert: order (T K,) and its inverse (T, K); counts (E,); probs (T, K)."""

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array
    probs: jax.Array


def _on_one_device(experts: Params, x_TD: jax.Array, routing: _Routing, config: MoEConfig) -> jax.Array:
    recipe, out_dtype = Recipe.parse(config.recipe), x_TD.dtype
    slots = routing.order.shape[0]
    maps = ops.row_map(routing.counts, num_rows=slots, num_local_experts=config.num_experts, alignment=recipe.alignment)
    # Both maps at once: the slot that each padded row fills, -1 for padding, and the row of each slot.
    order_P = jnp.append(routing.order, -1)[maps.row_map]
    inverse_TK = maps.inverse[routing.inverse]
    x_TD = x_TD.astype(jnp.bfloat16)
    # Copies of a row have the row's bytes.
    x: Any = MXArray.quantize(x_TD, recipe.rounding) if recipe.mx else x_TD
    groups = spread_rows(x, order_P, inverse_TK.reshape(-1), config.top_k)
    prob_P, probs_TK = None, routing.probs
    if config.prob_in == "swiglu":
        prob_P, probs_TK = gather_rows(probs_TK.reshape(-1, 1), order_P, inverse_TK.reshape(-1))[:, 0], None
    out = _experts(experts, groups, maps.group_ends, prob_P, recipe)
    return weighted_combine(out, probs_TK, inverse_TK, order_P, out_dtype=out_dtype, scaling_mode=recipe.rounding)


def _across_ranks(
    experts: Params, x_TD: jax.Array, routing: _Routing, config: MoEConfig, axis_name: Axes | None
) -> tuple[jax.Array, jax.Array]:
    """y, and how many rows did not fit."""
    recipe, out_dtype = Recipe.parse(config.recipe), x_TD.dtype
    order, inverse = routing.order, routing.inverse.reshape(-1)
    exchange = ep.plan_exchange(routing.counts, axis_name, num_rows=order.shape[0], capacity=config.capacity)
    tokens, x_TD = ep.of_tokens(exchange, order, inverse, config.top_k), x_TD.astype(jnp.bfloat16)
    if recipe.mx:
        received = ep.a2a_dispatch_mxfp8_fwd_hp_bwd(x_TD, tokens, recipe.rounding)
        groups, maps = permute_mxfp8_fwd_hp_bwd(received, exchange, group_size_multiple_of=recipe.alignment)
    else:
        groups, maps = permute(ep.a2a_dispatch(x_TD, tokens), exchange, group_size_multiple_of=recipe.alignment)
    prob_P, probs_TK = None, routing.probs
    if config.prob_in == "swiglu":
        sent = ep.a2a_dispatch(gather_rows(probs_TK.reshape(-1, 1), order, inverse), exchange)
        prob_P, probs_TK = gather_rows(sent, maps.row_map, maps.inverse)[:, 0], None
    out = unpermute_hp_fwd_mxfp8_bwd(_experts(experts, groups, maps.group_ends, prob_P, recipe), maps)
    rows = ep.a2a_combine_hp_fwd_mxfp8_bwd(out, exchange, recipe.rounding, mxfp8_bwd=recipe.mx)
    return weighted_combine(rows, probs_TK, routing.inverse, order, out_dtype=out_dtype), exchange.overflow


def _experts(
    experts: Params, groups: jax.Array | MXArray, group_ends: jax.Array, prob_P: jax.Array | None, recipe: Recipe
) -> jax.Array | MXGradArray:
    axes = varying_axes(*jax.tree.leaves(groups))

    def local(name: str) -> Weights:
        # In the parameter's own dtype: over a mesh axis that replicates it, JAX sums the gradient in that dtype.
        return jax.tree.map(lambda leaf: vary(leaf, axes), experts[name])

    weights = local("w1"), local("w3"), local("w2")
    # The groups are padded already.
    options = {"recipe": recipe, "mx_grad": recipe.mx, "pad_token_groups": False}
    return grouped_swiglu_ffn(groups, *weights, group_ends, prob_P, **options)
