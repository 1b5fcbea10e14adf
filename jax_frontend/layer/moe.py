"""A complete Mixture-of-Experts layer, with expert parallelism on or off: checks of the arguments, and shardings.

apply            a rank's part, inside shard_map -----------------------.
sharded_apply    global arrays --shard_map, FSDP's gather--> this rank's '--> run_layer (moe_layer.py)
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ...core_kernels.launch import fail
from ..ops.checks import check_floats, check_shape, check_type, warn_caller
from ..ops.mesh import AnyMesh, Axes, axes_of, axis_names, mesh_of, over_mesh, ranks_of
from ..ops.shapes import Float, Float32, Int
from ..routing.router import check_chosen
from .moe_layer import TOGETHER, Choice, MoEStats, run_layer
from .moe_params import MoEConfig, Params, check_divided, check_params, check_shapes, specs, specs_of
from .moe_params import init as init


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
    token_axes = axis_name if token_axes is None else token_axes
    _check_token_axes(op, axis_name, token_axes, tensor_axis)
    check_params(op, params, config, axis_name, tensor_axis)
    _warn_if_sharded(op, params["experts"])
    return run_layer(params, x, config, Choice(experts, weights, selection_bias), axis_name, token_axes, tensor_axis)


def _check_token_axes(op: str, axis_name: Axes | None, token_axes: Axes | None, tensor_axis: str | None) -> None:
    """Raise unless ranks of the exchange have tokens of their own, and ranks of tensor_axis the same."""
    split = axis_names(op, "token_axes", token_axes)
    if not set(axis_names(op, "axis_name", axis_name)) <= set(split):
        fail(ValueError, op, "token_axes", repr(token_axes), f"allowed: axes that include axis_name, {axis_name!r}")
    if tensor_axis in split:
        fail(ValueError, op, "tensor_axis", repr(tensor_axis), f"allowed: an axis that splits no tokens, as {split} do")


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
    params = {name: dict(p) if isinstance(p, Mapping) else p for name, p in params.items()}
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
        return run_layer(params, x, config, choice, exchanged or None, token_axes or None, tensor_axis)

    in_specs = (specs_of(params, of_params), tokens, Choice(tokens, tokens, PartitionSpec()))
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
        warn_caller(TOGETHER.format(op=op, count=count))
