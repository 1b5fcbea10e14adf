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

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.metrics import MoEMetrics, describe
from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.router import RouterConfig, SharedExpert
from ..exchange.all_to_all import TokenReplicas
from ..exchange.combine import combine
from ..exchange.device_exchange import exchange_ffn, takes
from ..exchange.dispatch import dispatch, dispatch_probs
from ..exchange.route import Route
from ..ops.call import vary, varying_axes
from ..ops.checks import check_floats, check_shape, check_type, warn_caller
from ..ops.derivatives import reverse_only
from ..ops.mesh import AnyMesh, Axes, axes_of, axis_names, axis_size, mesh_of, over_mesh, ranks_of
from ..ops.mx_array import MXArray, MXGradArray
from ..ops.shapes import Float, Float32, Int
from ..products.ffn import Biases, grouped_swiglu_ffn
from ..products.ffn import swiglu_ffn as _swiglu_ffn
from ..products.weights import Weights, recipe_of
from ..routing.permute import sort_by_expert
from ..routing.router import Routing, check_chosen, external_routing, tokens_and_logits
from ..routing.router import route as choose_experts
from ..routing.weighted_combine import sum_of_slots, weigh_slots
from .moe_params import MoEConfig, Params, check_divided, check_params, check_shapes, specs
from .moe_params import init as init
from .shared_gate import apply_gate, duplicate

_TOGETHER = (
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
        overflow: int32 scalar, rows that did not fit the capacity; 0 without a capacity. Their tokens are NaN in y,
            unless `MoEConfig.on_overflow` is "drop".

    Example:
        >>> config = MoEConfig(32, 64, num_experts=2, router=RouterConfig(top_k=1))
        >>> _, stats = apply(init(jax.random.key(0), config), jnp.ones((3, 32)), config)
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
            ValueError: For sizes and names that are not allowed.

        Example:
            >>> config = MoEConfig(32, 64, 4, RouterConfig(2, force_balance=True))
            >>> _, stats = apply(init(jax.random.key(0), config), jnp.ones((6, 32)), config)
            >>> metrics = stats.metrics(32, ranks=2)
            >>> metrics["tokens_per_expert"], metrics["imbalance"], metrics["wire_nbytes"]
            ([3, 3, 3, 3], 1.0, 2424)
        """
        counts = np.asarray(self.counts).tolist()
        return describe(counts, int(self.overflow), dim, Recipe.parse(recipe), ranks, prob_in)


def apply(
    params: Params,
    x: Float[jax.Array, "... D"],
    config: MoEConfig,
    *,
    experts: Int[jax.Array, "... k"] | None = None,
    weights: Float32[jax.Array, "... k"] | None = None,
    selection_bias: Float32[jax.Array, " E"] | None = None,
    axis_name: Axes | None = None,
    token_axes: Axes | None = None,
    tensor_axis: str | None = None,
) -> tuple[Float[jax.Array, "... D"], MoEStats]:
    """Run the layer on this device's tokens.

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

    y of a token does not depend on the other tokens of the call. Exceptions on a CPU: fp32 router products of one row,
    and GEMMs of large dims whose fp32 sums are not exact (recipes "bf16", "fp8_blockwise").

    Args:
        params: Of `init`. An expert weight may be QuantizedWeights: `quantize_weights(w, recipe=config.recipe)`.
        x: (..., D) bfloat16 or float32.
        config: Static.
        experts: (..., k) integers, which replace the router's choice: the caller has chosen k experts for each token.
            An expert that a token has twice counts twice, as two experts of the same weights would.
        weights: (..., k) float32, given with experts. y is differentiable in weights.
        selection_bias: (E,) float32, added to the scores for the choice alone; `update_selection_bias` balances the
            load. It is required with `config.router.selection_bias=True`, and must be None otherwise and with experts.
        axis_name: Expert parallelism over a mesh axis, or a tuple of them, inside `jax.shard_map`. params["experts"]
            holds this rank's E / ranks experts (shard the first dim), the other parameters are whole, x is this rank's
            tokens. Under jit alone, without an enclosing shard_map, the numbers are the same and nothing is split:
            every device gathers all arrays, with a warning. `sharded_apply` has the shard_map inside.
        token_axes: The mesh axes that split the tokens, if they are more than axis_name: ("data", "ep") on a mesh of
            data and expert ranks. The stats are sums and means over these axes, so their PartitionSpec is P().
        tensor_axis: A mesh axis that splits dim F of the experts, and no tokens. Each of its ranks has F / ranks hidden
            values of every expert and the same x. y is summed over it, in x's dtype.

    Returns:
        y, like x, and `MoEStats`.

    Raises:
        ValueError: If x, params, config and the mesh axis do not fit each other, and for QuantizedWeights of another
            recipe.
        TypeError: For other dtypes and types.

    Example:
        >>> config = MoEConfig(32, 64, 4, RouterConfig(2))
        >>> y, stats = apply(init(jax.random.key(0), config), jnp.ones((5, 32)), config)
        >>> y.shape, stats.counts.sum().item()
        ((5, 32), 10)
    """
    op = "moe.apply"
    _check(op, x, config, experts, weights, selection_bias)
    check_params(params, config, axis_name, tensor_axis)
    _warn_if_sharded(op, params["experts"])
    token_axes = axis_name if token_axes is None else token_axes
    return _layer(params, x, config, Choice(experts, weights, selection_bias), axis_name, token_axes, tensor_axis)


def _check(op: str, x: Any, config: Any, experts: Any, weights: Any, selection_bias: Any) -> None:
    """Raise unless the arguments of all tokens, or of the tokens of a rank, fit each other."""
    check_type(op, "config", config, MoEConfig)
    check_floats(op, "x", x)
    if x.ndim < 1 or x.shape[-1] != config.dim:
        fail(ValueError, op, "x", f"shape {x.shape}", f"allowed: (..., {config.dim})")
    check_chosen(op, x, config.num_experts, experts, weights)
    if experts is not None:
        if selection_bias is not None:
            fail(ValueError, op, "selection_bias", "an array", "allowed: None with experts and weights")
    elif config.router.selection_bias and selection_bias is None:
        allowed = "allowed: an array (E,) float32 with config.router.selection_bias=True"
        fail(ValueError, op, "selection_bias", None, allowed)
    elif selection_bias is not None and not config.router.selection_bias:
        allowed = "allowed: None, or RouterConfig(selection_bias=True) in the config"
        fail(ValueError, op, "selection_bias", "an array", allowed)


def _layer(
    params: Params,
    x: jax.Array,
    config: MoEConfig,
    choice: Choice,
    axis_name: Axes | None,
    token_axes: Axes | None,
    tensor_axis: str | None,
) -> tuple[jax.Array, MoEStats]:
    """`apply` for checked arguments."""
    op, (experts, weights, selection_bias) = "moe.apply", choice
    replicas = axis_size(op, token_axes, "token_axes")
    outside = external_routing(config.num_experts, experts, weights)
    params, outside = reverse_only(op, (params, outside), rows="x (..., D) with any leading dims")
    x = reverse_only(op, x, rows="x (..., D) with any leading dims", together=_TOGETHER)
    x_TD = x.reshape(-1, config.dim)
    x_TD, routing = _route(params, x_TD, config.router, selection_bias) if outside is None else (x_TD, outside)
    experts_TK, probs_TK, shares_E = routing
    order, inverse, counts = sort_by_expert(experts_TK, config.num_experts)
    # The ranks of tensor_axis compute parts of one sum: JAX adds their gradients where they leave x and probs.
    parts = axis_names(op, "tensor_axis", tensor_axis)
    x_TD, probs_TK = vary(x_TD, parts), vary(probs_TK, parts)
    tokens = TokenReplicas(x_TD.astype(jnp.bfloat16), order, inverse, experts_TK.shape[1], outside is None)
    if config.router.prob_in == "input":
        tokens = TokenReplicas(weigh_slots(x_TD, probs_TK), order, inverse, 1)
    recipe = recipe_of(op, config.recipe)
    ranks = {"axis_name": axis_name, "capacity_factor": config.capacity_factor, "deduplicate": config.deduplicate}
    ranks |= {"transport": config.transport, "on_overflow": config.on_overflow}
    driven = None
    if config.transport == "peer_memory" and axis_name is not None and axis_size(op, axis_name) > 1 and not parts:
        driven = _driven_by_the_device(params["experts"], x_TD, tokens, probs_TK, counts, config, recipe, axis_name)
    if driven is not None:
        y_TD, overflow = driven
    else:
        groups, _, route = dispatch(tokens, counts, recipe=recipe, **ranks)
        inside = dispatch_probs(probs_TK, route) if config.router.prob_in == "swiglu" else None
        out = _experts(params["experts"], groups, route, inside, config, parts)
        y_TD = combine(out, route, probs_TK if config.router.prob_in == "combine" else None, out_dtype=x_TD.dtype)
        overflow = route.overflow
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


def sharded_apply(
    params: Params,
    x: Float[jax.Array, "... D"],
    config: MoEConfig,
    *,
    tokens: PartitionSpec,
    expert_axis: Axes | None = "expert",
    fsdp_axis: str | None = None,
    tensor_axis: str | None = None,
    mesh: AnyMesh | None = None,
    experts: Int[jax.Array, "... k"] | None = None,
    weights: Float32[jax.Array, "... k"] | None = None,
    selection_bias: Float32[jax.Array, " E"] | None = None,
) -> tuple[Float[jax.Array, "... D"], MoEStats]:
    """Run the layer on a mesh, on global arrays, under `jax.jit` and shardings alone: `apply` inside `jax.shard_map`.

    Inside a shard_map over some axes of the mesh, x and params are the parts of these axes, and the other axes become
    manual here.

    Args:
        params: As in `apply`, of all ranks. They have the shardings of `specs` for these axes. Otherwise JAX reshards
            them in every call (automatic axes) or raises (explicit axes).
        x: As in `apply`, of all ranks.
        config: As in `apply`.
        tokens: The PartitionSpec of x and y without their last dim: P(("data", "expert")) for x (T, D),
            P("data", "expert") for x (B, S, D). Its axes include expert_axis: each rank computes its own tokens.
        expert_axis: The mesh axis, or axes, that split the experts. None: every rank has all.
        fsdp_axis: An axis of `tokens` that splits dim D of the experts' weights too. They are gathered for the call,
            and the sum of their gradients is scattered.
        tensor_axis: An axis that splits dim F, as in `apply`.
        mesh: None is the mesh of `jax.set_mesh`, or the mesh of x if it has explicit axes.
        experts: As in `apply`, of all ranks.
        weights: As in `apply`, of all ranks.
        selection_bias: As in `apply`.

    Returns:
        y, like x, and `MoEStats` of all tokens, P().

    Raises:
        ValueError: As `apply`, and for specs that do not fit x, params or the mesh.
        TypeError: As `apply`.

    Example:
        >>> config = MoEConfig(32, 64, 4, RouterConfig(2))
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((1, 1), ("data", "expert"), auto, devices=jax.devices()[:1])
        >>> with jax.set_mesh(mesh):
        ...     params, tokens = init(jax.random.key(0), config), PartitionSpec(("data", "expert"))
        ...     y, stats = sharded_apply(params, jnp.ones((5, 32)), config, tokens=tokens)
        >>> y.shape, stats.counts.sum().item()
        ((5, 32), 10)
    """
    op = "moe.sharded_apply"
    _check(op, x, config, experts, weights, selection_bias)
    if not isinstance(tokens, PartitionSpec):
        fail(TypeError, op, "tokens", type(tokens).__name__, "allowed: a jax.sharding.PartitionSpec")
    check_type(op, "mesh", mesh, Mesh, AbstractMesh, type(None))
    mesh = mesh_of(op, mesh, x)
    token_axes, expert_axes = axes_of(tokens), axis_names(op, "expert_axis", expert_axis)
    for name, axis in (("fsdp_axis", fsdp_axis), ("tensor_axis", tensor_axis)):
        check_type(op, name, axis, str, type(None))
    used = {"tokens": token_axes, "expert_axis": expert_axes, "fsdp_axis": (fsdp_axis,), "tensor_axis": (tensor_axis,)}
    for argument, axes in used.items():
        for axis in axes:
            if axis is not None and axis not in mesh.axis_names:
                fail(ValueError, op, argument, repr(axis), f"allowed: axes of the mesh, {mesh.axis_names}")
    if len(tokens) > x.ndim - 1:
        fail(ValueError, op, "tokens", tokens, f"allowed: at most {x.ndim - 1} parts, for x's dims but the last")
    if tensor_axis in token_axes:
        fail(ValueError, op, "tensor_axis", repr(tensor_axis), f"allowed: an axis that is not in tokens, {tokens}")
    for name, axes in (("expert_axis", expert_axes), ("fsdp_axis", (fsdp_axis,) if fsdp_axis else ())):
        if not set(axes) <= set(token_axes) or (name == "fsdp_axis" and set(axes) & set(expert_axes)):
            why = "; the ranks would compute the same tokens" if name == "expert_axis" else " and not of expert_axis"
            fail(ValueError, op, name, repr(axes), f"allowed: axes of tokens, {tokens}{why}")
    check_type(op, "params", params, Mapping)
    if selection_bias is not None:
        check_shape(op, "selection_bias", selection_bias, (config.num_experts,), "one value per expert", "float32")
    of_params = specs(config, expert_axis=expert_axis, fsdp_axis=fsdp_axis, tensor_axis=tensor_axis)
    for got, wanted in ((params, of_params), (dict(params).get("experts"), of_params["experts"])):
        if not isinstance(got, Mapping) or got.keys() != wanted.keys():
            keys = sorted(got) if isinstance(got, Mapping) else type(got).__name__
            fail(ValueError, op, "params", keys, f"allowed: {sorted(wanted)}, what `moe.init` makes of the config")

    by = {"num_experts": expert_axes, "dim": (fsdp_axis,), "hidden_dim": (tensor_axis,)}
    check_divided(op, config, {name: (ranks_of(mesh, axes), axes) for name, axes in by.items()})
    for dim, part in enumerate(tokens):
        ranks = ranks_of(mesh, axes_of(PartitionSpec(part)), of_part=True)
        if x.shape[dim] % ranks:
            allowed = (
                f"allowed: multiples of the {ranks} ranks of {part!r} in tokens; pad x, or split it over fewer axes"
            )
            fail(ValueError, op, "x", f"{x.shape[dim]} rows in dim {dim} of {x.shape}", allowed)

    exchanged = tuple(axis for axis in expert_axes if mesh.shape[axis] > 1)

    def local(params: Params, x: jax.Array, choice: Choice) -> tuple[jax.Array, MoEStats]:
        if fsdp_axis:
            params = {name: _gathered(op, p, of_params[name], fsdp_axis) for name, p in params.items()}
        check_shapes(op, params, config, ranks_of(mesh, expert_axes), ranks_of(mesh, (tensor_axis,)))
        return _layer(params, x, config, choice, exchanged or None, token_axes or None, tensor_axis)

    in_specs = (of_params, tokens, Choice(tokens, tokens, PartitionSpec()))
    run = over_mesh(local, mesh, in_specs, (tokens, PartitionSpec()))
    return run(params, x, Choice(experts, weights, selection_bias))


def _gathered(op: str, tree: Any, spec: Any, axis: str) -> Any:
    """The weights whose spec has the axis, whole along it. The gradient of a gather is a scatter of sums."""
    if isinstance(tree, dict):
        return {name: _gathered(op, leaf, spec[name], axis) for name, leaf in tree.items()}
    if axis not in spec:
        return tree
    check_floats(op, "params", tree, ", not QuantizedWeights, with fsdp_axis")
    return jax.lax.all_gather(tree, axis, axis=spec.index(axis), tiled=True)


def _warn_if_sharded(op: str, experts: Params) -> None:
    """Outside of jit; inside, `reverse_only` warns."""
    leaves = [leaf for leaf in jax.tree.leaves(experts) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    count = max((len(leaf.sharding.device_set) for leaf in leaves), default=1)
    if count > 1:
        warn_caller(_TOGETHER.format(op=op, count=count))


def _total(x: jax.Array, axes: Axes | None) -> jax.Array:
    """The sum of x over the ranks of mesh axes. Each rank receives the gradient."""
    if axes is None:
        return x
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    return jax.lax.psum(vary(x, axes), axes)


@jax.named_scope("mxep.route")
def _route(
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


def _driven_by_the_device(
    experts: Params, x_TD: jax.Array, tokens: TokenReplicas, probs_TK: jax.Array, counts: jax.Array, config: MoEConfig,
    recipe: Recipe, axis_name: Axes,
) -> tuple[jax.Array, jax.Array] | None:  # fmt: skip
    """y (T, D) and the rows that did not fit; None where another exchange has to run."""
    weights, inside = (experts["w1"], experts["w3"], experts["w2"]), config.router.prob_in == "swiglu"
    if not takes(recipe, x_TD, weights, inside, config.bias):
        return None
    return exchange_ffn(
        tokens, probs_TK, counts, weights, recipe, config.activation, axis_name, config.capacity_factor,
        config.on_overflow,
    )  # fmt: skip


def _experts(
    experts: Params,
    groups: jax.Array | MXArray,
    route: Route,
    prob_P: jax.Array | None,
    config: MoEConfig,
    parts: tuple[str, ...],
) -> jax.Array | MXGradArray:
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
