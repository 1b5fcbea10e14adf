"""A complete Mixture-of-Experts layer, with expert parallelism on or off.

    x (T, D) --router--> top_k experts and probabilities p per token
       |
       '--sort_by_expert--> replicas --dispatch--> groups (P, D) --experts (ffn.py)--> groups (P, D)
                                                                                          |
    y (T, D) <------------------ sum over a token's replicas, weighted by p <--combine----'

prob_in = "swiglu": p is sent with the rows, the experts compute w2 (p silu(w1 x) * w3 x), and the last sum is
unweighted.

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
from ..core_kernels.swiglu.activation import PLAIN, SwiGLU
from . import ep
from ._call import vary, varying_axes
from ._checks import check_floats, check_type, dtype_name
from ._derivatives import reverse_only
from .ep import Axes, TokenReplicas
from .ffn import grouped_swiglu_ffn
from .mx_array import MXArray, MXGradArray
from .permute import sort_by_expert
from .pipeline import combine, dispatch, dispatch_probs
from .weights import Weights, check_weights, recipe_of, resolve_compute

Params = dict[str, Any]
SCORES = ("softmax", "sigmoid")
PROB_IN = ("combine", "swiglu")


class MoEStats(NamedTuple):
    """Statistics of one forward over the tokens of all ranks, equal on every rank.

    counts: (E,) int32, rows of each expert.
    aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
        Transformer, equation 4).
    overflow: int32 scalar, rows that did not fit the capacity; 0 without a capacity.
    """

    counts: jax.Array
    aux_loss: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a layer; hashable, a static argument of a jitted function.

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in fp32. normalize:
        divide the top_k scores of a token by their sum.
    recipe: a Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise" or "bf16".
    prob_in: the place where a row is multiplied by its probability. "combine": the fp32 sum of the experts' outputs.
        "swiglu": inside the experts, before h is rounded; the combine then saves no rows for its gradient.
    capacity: rows that each pair of ranks exchanges at most; None is all of a rank's rows, which never drops one.
    bias: adds b1, b3 (E, F) and b2 (E, D) to the three products of the experts. activation: a `SwiGLU`, of the experts.

    >>> MoEConfig(32, 64, num_experts=4, top_k=2).recipe.name
    'mxfp8'

    Raises ValueError and TypeError for sizes and names that are not allowed.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    recipe: Recipe | str = "mxfp8"
    capacity: int | None = None
    prob_in: Literal["combine", "swiglu"] = "combine"
    bias: bool = False
    activation: SwiGLU = PLAIN

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
        check_type("MoEConfig", "bias", self.bias, bool)
        SwiGLU.check("MoEConfig", self.activation)
        object.__setattr__(self, "recipe", recipe_of("MoEConfig", self.recipe))

    @property
    def bias_shapes(self) -> dict[str, tuple[int, int]]:
        """The biases of all experts by name; none without `bias`."""
        sizes = {"b1": self.hidden_dim, "b3": self.hidden_dim, "b2": self.dim}
        return {name: (self.num_experts, n) for name, n in sizes.items()} if self.bias else {}


def init(key: jax.Array, config: MoEConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw the parameters {"router": (E, D), "experts": {"w1", "w3": (E, F, D), "w2": (E, D, F)}} from truncated normal
    distributions with standard deviation 1 / sqrt(fan in). With `bias` experts have "b1", "b3" (E, F) and "b2" (E, D),
    zeros.

    key: a key of jax.random. dtype: of the parameters, bf16 or fp32. Raises TypeError for other arguments.

    >>> init(jax.random.key(0), MoEConfig(32, 64, num_experts=4, top_k=2))["router"].shape
    (4, 32)
    """
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
    router, biases = drawn.pop("router"), {name: jnp.zeros(shape, dtype) for name, shape in config.bias_shapes.items()}
    return {"router": router, "experts": drawn | biases}


def apply(
    params: Params, x: jax.Array, config: MoEConfig, *, axis_name: Axes | None = None, token_axes: Axes | None = None
) -> tuple[jax.Array, MoEStats]:
    """Run the layer on this device's tokens: x (..., D) bf16 or fp32 -> (y like x, MoEStats).

    params: of `init`. An expert weight may be QuantizedWeights: `quantize_weights(w, recipe=config.recipe)`.
    axis_name: expert parallelism over a mesh axis, or a tuple of them, inside `jax.shard_map`: params["experts"] holds
        this rank's E / ranks experts (shard the first dim), params["router"] all of them, and x this rank's tokens.
        Sharded experts under jit alone give the same numbers without parallelism: XLA gathers them on every device.
    token_axes: the mesh axes that split the tokens, if they are more than axis_name: ("data", "ep") on a mesh of data
        and expert ranks. The stats are sums and means over these axes, so their PartitionSpec is P().

    The caller reduces nothing: JAX sums the gradient of a parameter over every axis on which the parameter is P(). The
    loss is a mean over the global batch, computed outside of shard_map or by psum inside it, plus a weight times
    `aux_loss`:

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

    Raises ValueError (x, params, config and the mesh axis do not fit each other, QuantizedWeights of another recipe)
    and TypeError (dtypes).
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
    order, inverse, counts = sort_by_expert(experts_TK, config.num_experts)
    tokens = TokenReplicas(x_TD.astype(jnp.bfloat16), order, inverse, config.top_k)
    recipe = recipe_of(op, config.recipe)
    ranks = {"axis_name": axis_name, "capacity": config.capacity}
    groups, _, route = dispatch(tokens, counts, recipe=recipe, **ranks)
    if config.prob_in == "swiglu":
        out = _experts(params["experts"], groups, route.group_ends, dispatch_probs(probs_TK, route), config)
        y_TD = combine(out, route, out_dtype=x_TD.dtype)
    else:
        out = _experts(params["experts"], groups, route.group_ends, None, config)
        y_TD = combine(out, route, probs_TK, out_dtype=x_TD.dtype)
    overflow = route.overflow
    counts, overflow, scores_E = (_total(s, token_axes) for s in (counts, overflow, scores_TE.sum(0)))
    fraction_E = counts.astype(jnp.float32) / max(replicas * experts_TK.size, 1)
    mean_prob_E = scores_E / max(replicas * x_TD.shape[0], 1)
    aux_loss = config.num_experts * (fraction_E * mean_prob_E).sum()
    return y_TD.reshape(x.shape), MoEStats(counts, aux_loss, overflow)


def _total(x: jax.Array, axes: Axes | None) -> jax.Array:
    """The sum of x over the ranks of mesh axes. Each rank receives the gradient."""
    if axes is None:
        return x
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return jax.lax.psum(vary(x, axes), axes)


def _check_params(params: Params, config: MoEConfig, axis_name: Axes | None) -> None:
    layout = "allowed: 'router' and 'experts' with 'w1', 'w2', 'w3' and the biases, as `moe.init` makes them"
    if not isinstance(params, Mapping) or not isinstance(params.get("experts", {}), Mapping):
        fail(TypeError, "moe.apply", "params", type(params).__name__, layout)
    recipe = resolve_compute("moe.apply", config.recipe)
    e, d, f = config.num_experts, config.dim, config.hidden_dim
    ranks = ep.axis_size("moe.apply", axis_name)
    if e % ranks:
        allowed = f"allowed: a multiple of the {ranks} ranks of mesh axis {axis_name!r}"
        fail(ValueError, "moe.apply", "config.num_experts", e, allowed)
    local = e // ranks
    allowed = {"router": (e, d), "w1": (local, f, d), "w2": (local, d, f), "w3": (local, f, d)}
    allowed |= {name: (local, n) for name, (_, n) in config.bias_shapes.items()}
    for name in {"b1", "b3", "b2"} & set(params.get("experts", {})) - set(config.bias_shapes):
        fail(ValueError, "moe.apply", f"params {name!r}", "a bias", "allowed: none with config.bias = False")
    for name, shape in allowed.items():
        holder = params if name == "router" else params.get("experts", {})
        if name not in holder:
            fail(ValueError, "moe.apply", "params", f"no {name!r}", layout)
        if name == "router" or name in config.bias_shapes:
            check_floats("moe.apply", f"params {name!r}", holder[name])
        else:
            check_weights("moe.apply", f"params {name!r}", holder[name], recipe)
        got = holder[name].shape
        if got != shape:
            why = f"allowed: {shape} on each of {ranks} ranks"
            fail(ValueError, "moe.apply", f"params {name!r}", f"shape {got}", why)


def _route(router: jax.Array, x_TD: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return probabilities and experts (T, K) of each token's choice, and the scores (T, E) as probabilities.

    Equal scores are ordered by expert."""
    # The default precision of a GPU is tf32, whose 10 bits choose other experts than fp32.
    logits_TE = jnp.matmul(x_TD.astype(jnp.float32), router.astype(jnp.float32).T, precision="highest")
    scores_TE = jax.nn.softmax(logits_TE) if config.score_func == "softmax" else jax.nn.sigmoid(logits_TE)
    chosen_TK, experts_TK = jax.lax.top_k(scores_TE, config.top_k)
    if config.normalize:
        chosen_TK = _shares(chosen_TK)
    return chosen_TK, experts_TK.astype(jnp.int32), _shares(scores_TE)


def _shares(scores: jax.Array) -> jax.Array:
    """Scores divided by their sum along the last dim; zeros if every sigmoid underflowed to zero."""
    return scores / jnp.maximum(scores.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def _experts(
    experts: Params, groups: jax.Array | MXArray, group_ends: jax.Array, prob_P: jax.Array | None, config: MoEConfig
) -> jax.Array | MXGradArray:
    axes = varying_axes(*jax.tree.leaves(groups))

    def local(name: str) -> Weights:
        # Before any cast: JAX sums the gradient over a replicated axis in the dtype of the leaf.
        return jax.tree.map(lambda leaf: vary(leaf, axes), experts[name])

    weights, recipe = (local("w1"), local("w3"), local("w2")), recipe_of("moe.apply", config.recipe)
    biases: dict[str, Any] = {name: local(name) for name in config.bias_shapes}
    # The groups are padded already.
    options = {"recipe": recipe, "mx_grad": recipe.mx, "pad_token_groups": False, "activation": config.activation}
    return grouped_swiglu_ffn(groups, *weights, group_ends, prob_P, **biases, **options)
