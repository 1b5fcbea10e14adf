"""Sizes and choices of a layer, its parameters, and their shardings on a mesh.

E experts   D dim   F hidden_dim   S hidden_dim of the shared expert

"router" (E, D)        "experts":       w1, w3 (E, F, D), w2 (E, D, F)
"shared_gate" (1, D)   "shared_expert": w1, w3 (1, S, D), w2 (1, D, S)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail, require_choice
from ...core_kernels.policy.deduplicate import Deduplicate, check_deduplicate
from ...core_kernels.policy.overflow import OnOverflowOfPeers
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.router import RouterConfig, SharedExpert, check_router, check_shared
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..exchange.peer_memory import PeerMemory
from ..ops.checks import check_floats, check_size, check_type, dtype_name
from ..ops.mesh import Axes, axis_names, axis_size
from ..products.weights import QuantizedWeights, check_weights, recipe_of, resolve_compute
from ..routing.overflow import check_capacity_factor, shown

Params = dict[str, Any]


jax.tree_util.register_static(SharedExpert)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Sizes and choices of a layer; hashable. `jax.jit` takes it as a static argument, declared or not.

    Args:
        dim: D, a positive multiple of 32.
        hidden_dim: F of the experts, a positive multiple of 32.
        num_experts: E.
        router: A `RouterConfig`: the experts of a token and their weights. The router computes in fp32.
        shared: A `SharedExpert`, which takes every token and is added to y; None is no shared expert.
        recipe: A Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
        bias: Add b1, b3 (E, F) and b2 (E, D) to the three products of the experts. The shared expert has no bias.
        activation: A `SwiGLU`, of the experts and of the shared expert.
        capacity_factor: The capacity of a rank, relative to the T * top_k rows that it receives of balanced routing, as
            in `dispatch`. None is 1.25 with on_overflow="rounds", else the worst case, which holds all rows.
        deduplicate: None, "dispatch" or "both", how often a token is sent to a rank with several of its experts, as in
            `dispatch`. With prob_in="input", where a row is one replica, None alone.
        transport: How rows are sent between ranks, as in `dispatch`: None is all-to-alls. A `PeerMemory`, with
            deduplicate=None, is the memory of the GPUs of a host.
        on_overflow: What rows beyond the capacity become. "rounds", with a PeerMemory: rows of another round of the
            call, so that none is dropped. "nan": y and the gradient of x are NaN at their tokens, so that the loss
            shows it, and `MoEStats.overflow` counts the rows. "drop": such a row is left out of its token's sum. None
            is "rounds" with a PeerMemory, else "nan".

    A round takes whole experts, in their order, while they fit. An expert is split if a round of its own is too short
    for its rows. y and the gradients of x and of the router have the bytes of one round, and so have the weight
    gradients of an expert that is not split. A split expert's are a sum over its rounds, in the dtype of the weights.
    Only the first round saves its state: the backward repeats the forward of the others.

    Raises:
        ValueError: For sizes and names that are not allowed.
        TypeError: For values of another type.

    Example:
        >>> MoEConfig(32, 64, 4, RouterConfig(2)).recipe.name
        'mxfp8'
    """

    dim: int
    hidden_dim: int
    num_experts: int
    router: RouterConfig
    _: dataclasses.KW_ONLY
    shared: SharedExpert | None = None
    recipe: Recipe | str = "mxfp8"
    bias: bool = False
    activation: SwiGLU = PLAIN
    capacity_factor: float | None = None
    deduplicate: Deduplicate = None
    transport: PeerMemory | None = None
    on_overflow: OnOverflowOfPeers | None = None

    def __post_init__(self) -> None:
        op = "MoEConfig"
        for name in ("dim", "hidden_dim", "num_experts"):
            if type(size := getattr(self, name)) is not int:
                fail(TypeError, op, name, shown(size), "allowed: an int")
        for name in ("dim", "hidden_dim"):
            size = getattr(self, name)
            if not 1 <= size < 2**31 or size % BLOCK:
                fail(ValueError, op, name, size, f"allowed: positive multiples of {BLOCK} below 2^31")
        check_size(op, "num_experts", self.num_experts, 1)
        check_router(op, self.router, self.num_experts)
        check_shared(op, self.shared)
        check_deduplicate(op, self.deduplicate)
        if self.deduplicate is not None and self.router.prob_in == "input":
            allowed = "allowed: None with prob_in='input', whose replicas have a row each"
            fail(ValueError, op, "deduplicate", repr(self.deduplicate), allowed)
        check_type(op, "transport", self.transport, PeerMemory, type(None))
        if self.deduplicate is not None and self.transport is not None:
            fail(ValueError, op, "deduplicate", repr(self.deduplicate), "allowed: None with transport=PeerMemory(...)")
        check_capacity_factor(op, self.capacity_factor)
        if self.on_overflow is not None:
            require_choice(op, "on_overflow", self.on_overflow, get_args(OnOverflowOfPeers))
        if self.on_overflow == "rounds" and self.transport is None:
            allowed = "allowed: 'nan', 'drop' or None with transport=None"
            fail(ValueError, op, "on_overflow", "'rounds'", allowed)
        check_type(op, "bias", self.bias, bool)
        SwiGLU.check(op, self.activation)
        object.__setattr__(self, "recipe", recipe_of(op, self.recipe))

    @property
    def rounds(self) -> bool:
        """Whether a call with rows beyond the capacity has several rounds."""
        return self.transport is not None and self.on_overflow in (None, "rounds")

    @property
    def has_gate(self) -> bool:
        """Whether the shared expert has a gate."""
        return self.shared is not None and self.shared.gate

    @property
    def bias_shapes(self) -> dict[str, tuple[int, int]]:
        """The biases of all experts by name; none without `bias`."""
        sizes = {"b1": self.hidden_dim, "b3": self.hidden_dim, "b2": self.dim}
        return {name: (self.num_experts, n) for name, n in sizes.items()} if self.bias else {}


def init(key: jax.Array, config: MoEConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Draw the parameters from truncated normal distributions with standard deviation 1 / sqrt(fan in).

    Args:
        key: A key of jax.random.
        config: Of the layer.
        dtype: Of the parameters, bfloat16 or float32.

    Returns:
        {"router": (E, D), "experts": {"w1", "w3": (E, F, D), "w2": (E, D, F)}}. With `config.bias` experts also have
        "b1", "b3" (E, F) and "b2" (E, D), zeros. With `config.router.bias` there is {"router_bias": (E,)}, zeros. With
        `config.shared` there is {"shared_expert": {"w1", "w3": (1, S, D), "w2": (1, D, S)}}, S its hidden_dim, and with
        its gate {"shared_gate": (1, D)}.

    Raises:
        TypeError: For other arguments.

    Example:
        >>> init(jax.random.key(0), MoEConfig(32, 64, 4, RouterConfig(2)))["router"].shape
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
    drawn = _draw(key, {"router": (e, d), **shapes(e, d, f)}, dtype)
    biases = {name: jnp.zeros(shape, dtype) for name, shape in config.bias_shapes.items()}
    params = {"router": drawn.pop("router"), "experts": drawn | biases}
    if config.router.bias:
        params["router_bias"] = jnp.zeros(e, dtype)
    if config.shared is not None:
        params["shared_expert"] = _draw(jax.random.fold_in(key, 1), shapes(1, d, config.shared.hidden_dim), dtype)
    if config.has_gate:
        params |= _draw(jax.random.fold_in(key, 2), {"shared_gate": (1, d)}, dtype)
    return params


def _draw(key: jax.Array, sizes: dict[str, tuple[int, ...]], dtype: str) -> Params:
    # In fp32: of bf16 random numbers `truncated_normal` makes 128 different values.
    return {
        name: (jax.random.truncated_normal(k, -2.0, 2.0, shape, jnp.float32) * shape[-1] ** -0.5).astype(dtype)
        for k, (name, shape) in zip(jax.random.split(key, len(sizes)), sizes.items(), strict=True)
    }


def specs(
    config: MoEConfig,
    *,
    expert_axis: Axes | None = "expert",
    fsdp_axis: str | None = None,
    tensor_axis: str | None = None,
) -> Params:
    """Return the PartitionSpec of each parameter that `init` draws, as a tree of the same form.

    Parameters are created sharded, and so are the optimizer's moments, which have the same form:

        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), moe.specs(config))
        params = jax.jit(partial(moe.init, config=config), out_shardings=shardings)(key)

    Args:
        config: Of the layer.
        expert_axis: The mesh axis, or axes, that split the experts.
        fsdp_axis: The axis that splits dim D of the experts' weights. `sharded_apply` gathers them for each call, and
            JAX scatters the sum of their gradients.
        tensor_axis: The axis that splits dim F. Router and biases of dim D are whole on fsdp_axis and tensor_axis.

    Returns:
        The tree.

    Raises:
        TypeError: For a config or an axis of another type.

    Example:
        >>> specs(MoEConfig(32, 64, 4, RouterConfig(2)), fsdp_axis="data")["experts"]["w1"]
        P('expert', None, 'data')
    """
    op = "moe.specs"
    check_type(op, "config", config, MoEConfig)
    axis_names(op, "expert_axis", expert_axis)
    for name, axis in (("fsdp_axis", fsdp_axis), ("tensor_axis", tensor_axis)):
        check_type(op, name, axis, str, type(None))
    split = {"w1": (tensor_axis, fsdp_axis), "w3": (tensor_axis, fsdp_axis), "w2": (fsdp_axis, tensor_axis)}
    biases = {"b1": (tensor_axis,), "b3": (tensor_axis,), "b2": ()}
    experts = split | {name: biases[name] for name in config.bias_shapes}
    tree: Params = {"router": PartitionSpec(), "experts": {n: _spec(expert_axis, *of) for n, of in experts.items()}}
    for name, present in (("router_bias", config.router.bias), ("shared_gate", config.has_gate)):
        if present:
            tree[name] = PartitionSpec()
    if config.shared is not None:
        tree["shared_expert"] = {name: _spec(None, *of) for name, of in split.items()}
    return tree


def _spec(*axes: Axes | None) -> PartitionSpec:
    """Without the dims at the end that no axis splits, so that it is also the spec of quantized weights."""
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return PartitionSpec(*axes)


def specs_of(params: Any, spec: Any) -> Any:
    """The specs with one per field of quantized weights, whose `transposed` has the last two dims the other way."""
    if isinstance(spec, Mapping):
        return {name: specs_of(params[name], of) for name, of in spec.items()}
    if not isinstance(params, QuantizedWeights):
        return spec
    groups, rows, columns = (*spec, None, None, None)[:3]
    return dataclasses.replace(params, values=spec, as_stored=spec, transposed=_spec(groups, columns, rows))


_LAYOUT = "allowed: 'router' and 'experts' with 'w1', 'w2', 'w3' and the biases, as `moe.init` makes them"


def check_params(
    op: str, params: Params, config: MoEConfig, axis_name: Axes | None = None, tensor_axis: str | None = None
) -> None:
    """Raise unless params match the config on this rank of the mesh."""
    if not isinstance(params, Mapping) or not isinstance(params.get("experts", {}), Mapping):
        fail(TypeError, op, "params", type(params).__name__, _LAYOUT)
    optional = {"shared_expert": config.shared is not None, "router_bias": config.router.bias}
    optional["shared_gate"] = config.has_gate
    for name, wanted in optional.items():
        if wanted != (name in params):
            got = f"no {name!r}" if wanted else repr(name)
            fail(ValueError, op, "params", got, "allowed: what `moe.init` makes of the config")
    ranks, parts = axis_size(op, axis_name), axis_size(op, tensor_axis, "tensor_axis")
    check_divided(op, config, {"num_experts": (ranks, axis_name), "hidden_dim": (parts, tensor_axis)})
    check_shapes(op, params, config, ranks, parts)


def check_shapes(op: str, params: Params, config: MoEConfig, ranks: int, parts: int) -> None:
    """Raise unless each parameter has the shape and a dtype of the config, for experts over ranks and F over parts."""
    recipe = resolve_compute(op, config.recipe)
    e, d = config.num_experts, config.dim
    local = e // ranks
    f = config.hidden_dim // parts
    routers = {"router": (e, d)} | ({"router_bias": (e,)} if config.router.bias else {})
    routers |= {"shared_gate": (1, d)} if config.has_gate else {}
    holders = {"router": (params, routers), "experts": (params.get("experts", {}), shapes(local, d, f))}
    if config.shared is not None:
        holders["shared_expert"] = params["shared_expert"], shapes(1, d, config.shared.hidden_dim // parts)
    biases = {name: (local, d if name == "b2" else f) for name in config.bias_shapes}
    for name in {"b1", "b3", "b2"} & set(params.get("experts", {})) - set(biases):
        fail(ValueError, op, f"params {name!r}", "a bias", "allowed: none with config.bias = False")
    holders["biases"] = params.get("experts", {}), biases
    for of, (holder, expected) in holders.items():
        for name, shape in expected.items():
            if name not in holder:
                fail(ValueError, op, "params", f"no {name!r}", _LAYOUT)
            argument = f"params {'of ' + of + ' ' if of == 'shared_expert' else ''}{name!r}"
            if of in ("router", "biases"):
                check_floats(op, argument, holder[name])
            else:
                check_weights(op, argument, holder[name], recipe)
            if holder[name].shape != shape:
                why = f"allowed: {shape} on each of {ranks * parts} ranks"
                fail(ValueError, op, argument, f"shape {holder[name].shape}", why)


def check_divided(op: str, config: MoEConfig, ranks: dict[str, tuple[int, Axes | None]]) -> None:
    """ValueError unless mesh axes divide the sizes of the config: by name, the ranks and the axes."""
    sizes = {name: {f"config.{name}": getattr(config, name)} for name in ranks}
    if config.shared is not None and "hidden_dim" in sizes:
        sizes["hidden_dim"]["config.shared.hidden_dim"] = config.shared.hidden_dim
    for name, (parts, axes) in ranks.items():
        least = BLOCK if name == "hidden_dim" else 1
        for argument, size in sizes[name].items():
            if size % (parts * least):
                each = f"{parts * least}, {least} for each of {parts} ranks" if least > 1 else f"the {parts} ranks"
                fail(ValueError, op, argument, size, f"allowed: multiples of {each} of mesh axis {axes!r}")


def shapes(experts: int, dim: int, hidden_dim: int) -> dict[str, tuple[int, ...]]:
    """The weights of experts by name."""
    return {"w1": (experts, hidden_dim, dim), "w2": (experts, dim, hidden_dim), "w3": (experts, hidden_dim, dim)}
