"""The computation of a Mixture-of-Experts layer on a rank, for checked arguments.

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

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.metrics import MoEMetrics, describe
from ...core_kernels.policy.overflow import OnOverflow
from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.rounds import CAPACITY_FACTOR
from ...core_kernels.policy.router import RouterConfig, SharedExpert
from .. import ops
from ..exchange.all_to_all import TokenReplicas
from ..exchange.combine import combine
from ..exchange.device_exchange import exchange_ffn, takes
from ..exchange.dispatch import dispatch, dispatch_probs
from ..exchange.peer_experts import run as run_peers
from ..exchange.route import Route
from ..ops import RowMap
from ..ops.call import vary, varying_axes
from ..ops.derivatives import reverse_only
from ..ops.mesh import Axes, axis_names, axis_size
from ..ops.mx_array import MXArray, MXGradArray
from ..products.ffn import Biases, grouped_swiglu_ffn
from ..products.ffn import swiglu_ffn as _swiglu_ffn
from ..products.weights import Weights, recipe_of
from ..routing.router import Routing, external_routing, tokens_and_logits
from ..routing.router import route as choose_experts
from ..routing.weighted_combine import sum_of_slots, weigh_slots
from .moe_params import MoEConfig, Params
from .shared_gate import apply_gate, duplicate

TOGETHER = (
    "{op}: this program is for {count} devices that each gather all tokens and experts and compute the whole layer; "
    "moe.sharded_apply(params, x, config, tokens=...) splits tokens and experts over a mesh"
)


class Choice(NamedTuple):
    """What a caller gives for the choice of experts: arrays, or their PartitionSpecs."""

    experts: Any
    weights: Any
    selection_bias: Any


class MoEStats(NamedTuple):
    """Statistics of one forward over the tokens of all ranks, equal on every rank.

    Args:
        counts: (E,) int32, rows of each expert.
        aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
            Transformer, equation 4). 0 if the caller chose the experts.
        overflow: int32 scalar, rows that did not fit the capacity; 0 without a capacity and with rounds. Their tokens
            are NaN in y, unless `MoEConfig.on_overflow` is "drop".

    Example:
        >>> config = MoEConfig(32, 64, num_experts=2, router=RouterConfig(top_k=1))
        >>> _, stats = moe.apply(moe.init(jax.random.key(0), config), jnp.ones((3, 32)), config)
        >>> stats.counts.sum().item(), stats.overflow.item()
        (3, 0)
    """

    counts: jax.Array
    aux_loss: jax.Array
    overflow: jax.Array

    def metrics(
        self, dim: int, *, recipe: Recipe | str = "mxfp8", ranks: int = 1, prob_in: ProbIn = "swiglu"
    ) -> MoEMetrics:
        """Compute the metrics of this forward as Python numbers, outside of jit; the host waits for the device.

        Args:
            dim: Of the layer.
            recipe: Of the layer.
            ranks: Ranks that share the experts, a divisor of their number.
            prob_in: Of the layer's `RouterConfig`.

        Returns:
            A dict, whose entries `MoEMetrics` describes. wire_nbytes counts rows, not the unused rows of buffers with a
            capacity.

        Raises:
            TypeError: For sizes that are no int.
            ValueError: For sizes and names that are not allowed, and for stacked stats of several layers.

        Example:
            >>> config = MoEConfig(32, 64, 4, RouterConfig(2, force_balance=True))
            >>> _, stats = moe.apply(moe.init(jax.random.key(0), config), jnp.ones((6, 32)), config)
            >>> metrics = stats.metrics(32, ranks=2)
            >>> metrics["tokens_per_expert"], metrics["imbalance"], metrics["wire_nbytes"]
            ([3, 3, 3, 3], 1.0, 2424)
        """
        op, shape = "MoEStats.metrics", np.shape(self.counts)
        if len(shape) != 1:
            allowed = "allowed: (E,), of one layer; take layer i by jax.tree.map(lambda a: a[i], stats).metrics(...)"
            fail(ValueError, op, "counts", f"shape {shape}", allowed)
        counts = np.asarray(self.counts).tolist()
        return describe(counts, int(self.overflow), dim, Recipe.parse(recipe), ranks, prob_in)


register_namedtuple_serialization(MoEStats, serialized_name="mxep.MoEStats")


def run_layer(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    choice: Choice,
    axis_name: Axes | None,
    token_axes: Axes | None,
    tensor_axis: str | None,
) -> tuple[jax.Array, MoEStats]:
    """y, like x, and the statistics of all ranks."""
    op, (experts, weights, selection_bias) = "moe.apply", choice
    replicas = axis_size(op, token_axes, "token_axes")
    outside = external_routing(config.num_experts, experts, weights)
    given = params["experts"]
    params, outside = reverse_only(op, (params, outside), rows="x (..., D) with any leading dims")
    x = reverse_only(op, x, rows="x (..., D) with any leading dims", together=TOGETHER)
    x_TD = x.reshape(-1, config.dim)
    x_TD, routing = route_tokens(params, x_TD, config.router, selection_bias) if outside is None else (x_TD, outside)
    experts_TK, probs_TK, shares_E = routing
    order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1), config.num_experts)
    # The ranks of tensor_axis compute parts of one sum: JAX adds their gradients where they leave x and probs.
    parts = axis_names(op, "tensor_axis", tensor_axis)
    x_TD, probs_TK = vary(x_TD, parts), vary(probs_TK, parts)
    tokens = TokenReplicas(x_TD.astype(jnp.bfloat16), order, inverse, experts_TK.shape[1], outside is None)
    if config.router.prob_in == "input":
        tokens = TokenReplicas(weigh_slots(x_TD, probs_TK), order, inverse, 1)
    recipe = recipe_of(op, config.recipe)
    y_TD, overflow = _run_experts(
        params["experts"], given, x_TD, tokens, probs_TK, counts, config, recipe, axis_name, parts
    )
    if config.router.prob_in == "input":
        y_TD = sum_of_slots(y_TD, experts_TK.shape[1], x_TD.dtype)
    if config.shared is not None:
        y_TD += _shared(params, x_TD, config.shared, config).astype(y_TD.dtype)
    y_TD = _total(y_TD, tensor_axis)
    counts, overflow, shares_E = (_total(s, token_axes) for s in (counts, overflow, shares_E))
    fraction_E = counts.astype(jnp.float32) / max(replicas * experts_TK.size, 1)
    tokens_of_ranks = max(replicas * x_TD.shape[0], 1)
    aux_loss: jax.Array = _balance(shares_E, fraction_E, tokens_of_ranks)
    return y_TD.reshape(x.shape), MoEStats(counts, aux_loss, overflow)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _balance(shares_E: jax.Array, fraction_E: jax.Array, tokens: int) -> jax.Array:
    """The auxiliary loss. XLA may multiply constants of its gradient in another order where the forward is recomputed:
    the barrier makes the factor one array in every program."""
    return fraction_E.size * (fraction_E * (shares_E / tokens)).sum()


def _balance_bwd(tokens, fraction_E, grad):
    return grad * jax.lax.optimization_barrier(fraction_E * fraction_E.size / tokens), None


_balance.defvjp(lambda shares_E, fraction_E, tokens: (_balance(shares_E, fraction_E, tokens), fraction_E), _balance_bwd)


def _total(x: jax.Array, axes: Axes | None) -> jax.Array:
    """The sum of x over the ranks of mesh axes. Each rank receives the gradient."""
    if axes is None:
        return x
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return jax.lax.psum(vary(x, axes), axes)


@jax.named_scope("mxep.route")
def route_tokens(
    params: Params, x_TD: jax.Array, router: RouterConfig, selection_bias: jax.Array | None = None
) -> tuple[jax.Array, Routing]:
    """The tokens for the experts, and their routing."""
    x_TD, logits_TE = tokens_and_logits(x_TD, params["router"], params.get("router_bias"))
    return x_TD, choose_experts(logits_TE, router, selection_bias=selection_bias)


def _shared(params: Params, x_TD: jax.Array, shared: SharedExpert, config: MoEConfig) -> jax.Array:
    """(T, D): the shared expert, one group of all tokens, times its gate."""
    ends = jnp.full((1,), x_TD.shape[0], jnp.int32)
    w1, w3, w2 = _local(params["shared_expert"], varying_axes(x_TD))
    pad = bool(x_TD.shape[0] % BLOCK)
    options = {"recipe": config.recipe, "activation": config.activation, "pad_token_groups": pad}
    x_TD, x_of_gate = duplicate(x_TD) if shared.gate else (x_TD, x_TD)
    out = grouped_swiglu_ffn(x_TD.astype(jnp.bfloat16), w1, w3, w2, ends, **options)
    assert isinstance(out, jax.Array)
    if not shared.gate:
        return out
    return apply_gate(x_of_gate, params["shared_gate"], out)


def _run_experts(
    experts: Params, given: Params, x_TD: jax.Array, tokens: TokenReplicas, probs_TK: jax.Array, counts: jax.Array,
    config: MoEConfig, recipe: Recipe, axis_name: Axes | None, parts: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """y (T, D), or a row per slot of prob_in="input", and () int32, rows of this rank that did not fit. given: the
    experts, as `run_rounds` takes them."""
    factor, prob_in = config.capacity_factor, config.router.prob_in
    dropped: OnOverflow = "drop" if config.on_overflow == "drop" else "nan"
    several = axis_name is not None and axis_size("moe.apply", axis_name) > 1
    if config.rounds:  # One rank has all rows already.
        factor = (CAPACITY_FACTOR if factor is None else factor) if several else None
    if axis_name is not None and several and config.transport is not None:
        config.transport.check_axes("moe.apply", axis_name)
        weights, as_given = ((e["w1"], e["w3"], e["w2"]) for e in (experts, given))
        if not parts and takes(recipe, x_TD, weights, prob_in == "swiglu", config.bias):
            return exchange_ffn(
                tokens, probs_TK, counts, weights, as_given, recipe, config.activation, config.transport, factor,
                dropped, config.rounds,
            )  # fmt: skip
        if factor is not None and config.rounds:
            of_rank = RankExperts(config, parts)
            y_TD = run_peers(
                tokens, probs_TK, counts, experts, given, of_rank, recipe, config.transport, factor, prob_in, x_TD.dtype
            )
            return y_TD, jnp.zeros((), jnp.int32)
    options = {"deduplicate": config.deduplicate, "transport": config.transport, "on_overflow": dropped}
    groups, _, route = dispatch(tokens, counts, recipe=recipe, axis_name=axis_name, capacity_factor=factor, **options)
    inside = dispatch_probs(probs_TK, route) if prob_in == "swiglu" else None
    out = RankExperts(config, parts)(experts, groups, route, inside)
    y_TD = combine(out, route, probs_TK if prob_in == "combine" else None, out_dtype=x_TD.dtype)
    return y_TD, route.overflow


class RankExperts(NamedTuple):
    """The experts of a rank, static. parts: the mesh axes that split dim F."""

    config: MoEConfig
    parts: tuple[str, ...]

    def __call__(
        self, experts: Params, groups: jax.Array | MXArray, route: Route | RowMap, prob_P: jax.Array | None
    ) -> jax.Array | MXGradArray:
        config, parts = self
        axes, recipe = varying_axes(*jax.tree.leaves(groups)), recipe_of("moe.apply", config.recipe)
        w1, w3, w2 = _local(experts, axes)
        biases = None
        if config.bias:
            b1, b3, b2 = (vary(experts[name], axes) for name in ("b1", "b3", "b2"))
            if parts:  # The first of the ranks whose outputs are summed adds it.
                b2 = jnp.where(jax.lax.axis_index(parts) == 0, b2, 0)
            biases = Biases(b1, b3, b2)
        # The groups are padded already.
        options = {"recipe": recipe, "mx_grad": recipe.mx, "pad_token_groups": False, "activation": config.activation}
        # `combine` and its gradient read no row past the last end.
        return _swiglu_ffn(groups, w1, w3, w2, route, prob_P, biases=biases, clear_rest=False, **options)


def _local(experts: Params, axes: tuple[str, ...]) -> tuple[Weights, Weights, Weights]:
    """w1, w3 and w2, varying like the rows."""

    def vary_leaves(name: str) -> Weights:
        # Before any cast: JAX sums the gradient over a replicated axis in the dtype of the leaf.
        return jax.tree.map(lambda leaf: vary(leaf, axes), experts[name])

    return vary_leaves("w1"), vary_leaves("w3"), vary_leaves("w2")
