"""A complete Mixture-of-Experts layer, with expert parallelism on or off.

    x (T, D) --router (router.py)--> top_k experts and probabilities p per token
       |
       '--sort_by_expert--> replicas --dispatch--> groups (P, D) --experts (ffn.py)--> groups (P, D)
                                                                                          |
    y (T, D) <------------------ sum over a token's replicas, weighted by p <--combine----'
       '--shared expert (every token)--> added to y

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
from ..core_kernels.router.plan import OPTIONS, check_options
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
from .router import GroupScore, Routing, ScoreFunc, chosen_outside, router_logits
from .router import route as choose_experts
from .weighted_combine import sum_of_slots, weigh_slots
from .weights import Weights, check_weights, recipe_of, resolve_compute

Params = dict[str, Any]
PROB_IN = ("combine", "swiglu", "input")


class MoEStats(NamedTuple):
    """Statistics of one forward over the tokens of all ranks, equal on every rank.

    counts: (E,) int32, rows of each expert.
    aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
        Transformer, equation 4). 0 if the caller chose the experts.
    overflow: int32 scalar, rows that did not fit the capacity; 0 without a capacity.
    """

    counts: jax.Array
    aux_loss: jax.Array
    overflow: jax.Array


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a layer; hashable, a static argument of a jitted function.

    dim, hidden_dim: multiples of 32.
    score_func, normalize, route_scale, num_groups, top_k_groups, group_score, force_balance: the choice of experts and
        their weights, as in `route`. The router computes in fp32.
    router_bias: add a learned bias to the logits.
    shared_hidden_dim: the hidden size of a shared expert, which takes every token and is added to y; None is no shared
        expert.
    shared_gate: multiply the shared expert's output by the sigmoid of a learned product with x, as Qwen2-MoE does.
    prob_in: the place where a row is multiplied by its probability. "swiglu": inside the experts, before h is rounded;
        the combine then saves no rows for its gradient and moves quantized tokens backward. "combine": the fp32 sum of
        the experts' outputs; faster with b2, which the experts otherwise add in a pass of its own. "input": the
        experts' input, as Llama 4 does; x then has a row per token and expert.
    capacity: rows that each pair of ranks exchanges at most; None is all of a rank's rows, which never drops one.
    bias: adds b1, b3 (E, F) and b2 (E, D) to the three products of the experts. activation: a `SwiGLU`, of
        the experts and of the shared one, which has no bias.

    >>> MoEConfig(32, 64, num_experts=4, top_k=2).recipe.name
    'mxfp8'

    Raises ValueError and TypeError for sizes and names that are not allowed.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    score_func: ScoreFunc = "softmax"
    normalize: bool = True
    recipe: Recipe | str = "mxfp8"
    capacity: int | None = None
    prob_in: Literal["combine", "swiglu", "input"] = "swiglu"
    route_scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2"
    force_balance: bool = False
    router_bias: bool = False
    shared_hidden_dim: int | None = None
    shared_gate: bool = False
    bias: bool = False
    activation: SwiGLU = PLAIN

    def __post_init__(self) -> None:
        optional = ("capacity", "shared_hidden_dim")
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_groups", "top_k_groups", *optional):
            size = getattr(self, name)
            if type(size) is not int and not (name in optional and size is None):
                fail(TypeError, "MoEConfig", name, repr(size), "allowed: an int")
        for name in ("dim", "hidden_dim", "shared_hidden_dim"):
            size = getattr(self, name)
            if size is not None and (size <= 0 or size % BLOCK):
                fail(ValueError, "MoEConfig", name, size, f"allowed: positive multiples of {BLOCK}")
        if self.num_experts < 1:
            fail(ValueError, "MoEConfig", "num_experts", self.num_experts, "allowed: at least 1")
        for name in ("normalize", "router_bias", "shared_gate"):
            check_type("MoEConfig", name, getattr(self, name), bool)
        if self.shared_gate and self.shared_hidden_dim is None:
            fail(ValueError, "MoEConfig", "shared_gate", True, "allowed: with shared_hidden_dim")
        check_options("MoEConfig", self.num_experts, top_k=self.top_k, **self.route_options)
        if self.prob_in not in PROB_IN:
            allowed = f"allowed: {', '.join(map(repr, PROB_IN))}"
            fail(ValueError, "MoEConfig", "prob_in", repr(self.prob_in), allowed)
        if self.capacity is not None and self.capacity < 1:
            fail(ValueError, "MoEConfig", "capacity", self.capacity, "allowed: at least 1, or None for dropless")
        check_type("MoEConfig", "bias", self.bias, bool)
        SwiGLU.check("MoEConfig", self.activation)
        object.__setattr__(self, "recipe", recipe_of("MoEConfig", self.recipe))

    @property
    def route_options(self) -> dict[str, Any]:
        """The options of `route`."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def bias_shapes(self) -> dict[str, tuple[int, int]]:
        """The biases of all experts by name; none without `bias`."""
        sizes = {"b1": self.hidden_dim, "b3": self.hidden_dim, "b2": self.dim}
        return {name: (self.num_experts, n) for name, n in sizes.items()} if self.bias else {}


def init(key: jax.Array, config: MoEConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw the parameters {"router": (E, D), "experts": {"w1", "w3": (E, F, D), "w2": (E, D, F)}} from truncated normal
    distributions with standard deviation 1 / sqrt(fan in). With bias experts also have "b1", "b3" (E, F) and "b2"
    (E, D), zeros; with router_bias also {"router_bias": (E,)}, zeros; with a shared expert {"shared_expert": {"w1",
    "w3": (1, S, D), "w2": (1, D, S)}}, S = shared_hidden_dim; with shared_gate also {"shared_gate": (1, D)}.

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
    shapes = {"router": (e, d), **_shapes(e, d, f)}
    drawn = _draw(key, shapes, dtype)
    biases = {name: jnp.zeros(shape, dtype) for name, shape in config.bias_shapes.items()}
    params = {"router": drawn.pop("router"), "experts": drawn | biases}
    if config.router_bias:
        params["router_bias"] = jnp.zeros(e, dtype)
    if (s := config.shared_hidden_dim) is not None:
        params["shared_expert"] = _draw(jax.random.fold_in(key, 1), _shapes(1, d, s), dtype)
    if config.shared_gate:
        params |= _draw(jax.random.fold_in(key, 2), {"shared_gate": (1, d)}, dtype)
    return params


def _draw(key: jax.Array, shapes: dict[str, tuple[int, ...]], dtype: str) -> Params:
    return {
        name: jax.random.truncated_normal(k, -2.0, 2.0, shape, dtype) * shape[-1] ** -0.5
        for k, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }


def apply(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    *,
    experts: jax.Array | None = None,
    weights: jax.Array | None = None,
    selection_bias: jax.Array | None = None,
    axis_name: Axes | None = None,
    token_axes: Axes | None = None,
) -> tuple[jax.Array, MoEStats]:
    """Run the layer on this device's tokens: x (..., D) bf16 or fp32 -> (y like x, MoEStats).

    params: of `init`. An expert weight may be QuantizedWeights: `quantize_weights(w, recipe=config.recipe)`.
    experts, weights: (..., k) integers and (..., k) float32, which replace the router: the caller has chosen k
        different experts for each token. y is differentiable in weights.
    selection_bias: (E,) float32, added to the scores for the choice alone; `update_selection_bias` balances the load.
    axis_name: expert parallelism over a mesh axis, or a tuple of them, inside `jax.shard_map`: params["experts"] holds
        this rank's E / ranks experts (shard the first dim), the other parameters are whole, x is this rank's tokens.
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
    outside = chosen_outside(op, x, config.num_experts, experts, weights)
    if outside is not None and selection_bias is not None:
        fail(ValueError, op, "selection_bias", "an array", "allowed: None beside experts and weights")
    params, x, outside = reverse_only(op, (params, x, outside), rows="x (..., D) with any leading dims")
    x_TD = x.reshape(-1, config.dim)
    chosen = _route(params, x_TD, config, selection_bias) if outside is None else outside
    experts_TK, probs_TK, shares_E = chosen
    order, inverse, counts = sort_by_expert(experts_TK, config.num_experts)
    tokens = TokenReplicas(x_TD.astype(jnp.bfloat16), order, inverse, experts_TK.shape[1])
    if config.prob_in == "input":
        tokens = TokenReplicas(weigh_slots(x_TD, probs_TK), order, inverse, 1)
    recipe = recipe_of(op, config.recipe)
    ranks = {"axis_name": axis_name, "capacity": config.capacity}
    groups, _, route = dispatch(tokens, counts, recipe=recipe, **ranks)
    inside = dispatch_probs(probs_TK, route) if config.prob_in == "swiglu" else None
    out = _experts(params["experts"], groups, route.group_ends, inside, config)
    y_TD = combine(out, route, probs_TK if config.prob_in == "combine" else None, out_dtype=x_TD.dtype)
    if config.prob_in == "input":
        y_TD = sum_of_slots(y_TD, experts_TK.shape[1], x_TD.dtype)
    if config.shared_hidden_dim is not None:
        y_TD += _shared(params, x_TD, config).astype(y_TD.dtype)
    overflow = route.overflow
    counts, overflow, shares_E = (_total(s, token_axes) for s in (counts, overflow, shares_E))
    fraction_E = counts.astype(jnp.float32) / max(replicas * experts_TK.size, 1)
    mean_prob_E = shares_E / max(replicas * x_TD.shape[0], 1)
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
    optional = {"shared_expert": config.shared_hidden_dim is not None, "router_bias": config.router_bias}
    optional["shared_gate"] = config.shared_gate
    for name, wanted in optional.items():
        if wanted != (name in params):
            got = f"no {name!r}" if wanted else repr(name)
            fail(ValueError, "moe.apply", "params", got, "allowed: what `moe.init` makes of the config")
    recipe = resolve_compute("moe.apply", config.recipe)
    e, d, f = config.num_experts, config.dim, config.hidden_dim
    ranks = ep.axis_size("moe.apply", axis_name)
    if e % ranks:
        allowed = f"allowed: a multiple of the {ranks} ranks of mesh axis {axis_name!r}"
        fail(ValueError, "moe.apply", "config.num_experts", e, allowed)
    local = e // ranks
    routers = {"router": (e, d)} | ({"router_bias": (e,)} if config.router_bias else {})
    routers |= {"shared_gate": (1, d)} if config.shared_gate else {}
    holders = {"router": (params, routers), "experts": (params.get("experts", {}), _shapes(local, d, f))}
    if config.shared_hidden_dim is not None:
        holders["shared_expert"] = params["shared_expert"], _shapes(1, d, config.shared_hidden_dim)
    biases = {name: (local, n) for name, (_, n) in config.bias_shapes.items()}
    for name in {"b1", "b3", "b2"} & set(params.get("experts", {})) - set(biases):
        fail(ValueError, "moe.apply", f"params {name!r}", "a bias", "allowed: none with config.bias = False")
    holders["biases"] = params.get("experts", {}), biases
    for of, (holder, shapes) in holders.items():
        for name, shape in shapes.items():
            if name not in holder:
                fail(ValueError, "moe.apply", "params", f"no {name!r}", layout)
            argument = f"params {'of ' + of + ' ' if of == 'shared_expert' else ''}{name!r}"
            if of in ("router", "biases"):
                check_floats("moe.apply", argument, holder[name])
            else:
                check_weights("moe.apply", argument, holder[name], recipe)
            if holder[name].shape != shape:
                why = f"allowed: {shape} on each of {ranks} ranks"
                fail(ValueError, "moe.apply", argument, f"shape {holder[name].shape}", why)


def _shapes(experts: int, dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
    return {"w1": (experts, hidden_dim, dim), "w2": (experts, dim, hidden_dim), "w3": (experts, hidden_dim, dim)}


@jax.named_scope("mxep.route")
def _route(params: Params, x_TD: jax.Array, config: MoEConfig, selection_bias: jax.Array | None = None) -> Routing:
    logits_TE = router_logits(x_TD, params["router"], params.get("router_bias"))
    return choose_experts(logits_TE, config.top_k, selection_bias=selection_bias, **config.route_options)


def _shared(params: Params, x_TD: jax.Array, config: MoEConfig) -> jax.Array:
    """(T, D): the shared expert, one group of all tokens, times its gate."""
    ends = jnp.full((1,), x_TD.shape[0], jnp.int32)
    weights = _local(params["shared_expert"], varying_axes(x_TD))
    pad = bool(x_TD.shape[0] % BLOCK)
    options = {"recipe": config.recipe, "activation": config.activation, "pad_token_groups": pad}
    out = grouped_swiglu_ffn(x_TD.astype(jnp.bfloat16), *weights, ends, **options)
    assert isinstance(out, jax.Array)
    if not config.shared_gate:
        return out
    gate_T1 = x_TD @ vary(params["shared_gate"], varying_axes(x_TD)).astype(x_TD.dtype).T
    return jax.nn.sigmoid(gate_T1.astype(jnp.float32)) * out


def _experts(
    experts: Params, groups: jax.Array | MXArray, group_ends: jax.Array, prob_P: jax.Array | None, config: MoEConfig
) -> jax.Array | MXGradArray:
    axes, recipe = varying_axes(*jax.tree.leaves(groups)), recipe_of("moe.apply", config.recipe)
    weights, biases = _local(experts, axes), {name: vary(experts[name], axes) for name in config.bias_shapes}
    # The groups are padded already.
    options = {"recipe": recipe, "mx_grad": recipe.mx, "pad_token_groups": False, "activation": config.activation}
    return grouped_swiglu_ffn(groups, *weights, group_ends, prob_P, **biases, **options)


def _local(experts: Params, axes: tuple[str, ...]) -> tuple[Weights, Weights, Weights]:
    """w1, w3 and w2, varying like the rows."""

    def vary_leaves(name: str) -> Weights:
        # Before any cast: JAX sums the gradient over a replicated axis in the dtype of the leaf.
        return jax.tree.map(lambda leaf: vary(leaf, axes), experts[name])

    return vary_leaves("w1"), vary_leaves("w3"), vary_leaves("w2")
