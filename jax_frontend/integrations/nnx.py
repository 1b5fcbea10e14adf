"""The layer as a Flax NNX module, with logical axis names for its parameters. Needs flax: pip install 'mxep[flax]'.

`mxep.jax_frontend.moe` is the same layer as plain functions of a dict; this file holds its parameters and calls it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..layer import moe
from ..layer.moe_layer import MoEStats
from ..layer.moe_params import MoEConfig, Params
from ..ops.mesh import AnyMesh, Axes

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(
        "mxep.jax_frontend.integrations.nnx: flax is missing; install it with `pip install 'mxep[flax]'`"
    ) from error

NAMES = {
    "w1": ("expert", "mlp", "embed"), "w3": ("expert", "mlp", "embed"), "w2": ("expert", "embed", "mlp"),
    "b1": ("expert", "mlp"), "b3": ("expert", "mlp"), "b2": ("expert", None),
}  # fmt: skip
"""The logical names of the dims of each expert parameter. The router's have none: it is whole on every device."""


class MoE(nnx.Module):
    """A Mixture-of-Experts layer: `layer(x)` -> (y, MoEStats).

    Parameters: router (E, D), w1 and w3 (E, F, D), w2 (E, D, F), and others that the config asks for. Each has logical
    axis names, "expert", "mlp" and "embed", and rules that map them to expert_axis, tensor_axis and fsdp_axis.
    `nnx.get_partition_spec` and flax's sharding of new parameters then put it where `moe.sharded_apply` reads it.

    Args:
        config: a `MoEConfig`.
        rngs: draws the parameters with its "params" stream.
        dtype: of the parameters.
        tokens: the PartitionSpec of x for `moe.sharded_apply`, which runs the layer. Without it `moe.apply` runs the
            layer on one device.
        expert_axis: as in `moe.sharded_apply`.
        fsdp_axis: as in `moe.sharded_apply`.
        tensor_axis: as in `moe.sharded_apply`.
        mesh: as in `moe.sharded_apply`.

    Raises:
        ValueError: as `moe.init` and `moe.sharded_apply`.
        TypeError: as `moe.init` and `moe.sharded_apply`.

    Example:
        >>> layer = MoE(MoEConfig(32, 64, 4, RouterConfig(2)), rngs=nnx.Rngs(0))
        >>> y, stats = layer(jnp.ones((5, 32)))
        >>> y.shape, layer.w1.shape
        ((5, 32), (4, 64, 32))
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        tokens: PartitionSpec | None = None,
        expert_axis: Axes | None = "expert",
        fsdp_axis: str | None = None,
        tensor_axis: str | None = None,
        mesh: AnyMesh | None = None,
    ) -> None:
        self.config, self.tokens, self.mesh = config, tokens, mesh
        self.axes = {"expert_axis": expert_axis, "fsdp_axis": fsdp_axis, "tensor_axis": tensor_axis}
        rules = (("expert", expert_axis), ("mlp", tensor_axis), ("embed", fsdp_axis))

        def parameter(value: jax.Array, names: tuple[str | None, ...]) -> nnx.Param:
            if tokens is None:
                return nnx.Param(value)
            return nnx.Param(value, out_sharding=names, sharding_rules=rules, mesh=mesh)

        drawn = moe.init(rngs.params(), config, dtype)
        for name in ("router", "router_bias", "shared_gate"):
            if name in drawn:
                setattr(self, name, parameter(drawn[name], (None,) * drawn[name].ndim))
        for name, value in drawn["experts"].items():
            setattr(self, name, parameter(value, NAMES[name]))
        for name, value in drawn.get("shared_expert", {}).items():
            setattr(self, f"shared_{name}", parameter(value, (None, *NAMES[name][1:])))

    @property
    def params(self) -> Params:
        """The parameters as `moe.apply` takes them."""

        def values(names: Any, prefix: str = "") -> dict[str, jax.Array]:
            return {name: getattr(self, prefix + name)[...] for name in names if hasattr(self, prefix + name)}

        params: Params = {**values(("router", "router_bias", "shared_gate")), "experts": values(NAMES)}
        if self.config.shared is not None:
            params["shared_expert"] = values(("w1", "w3", "w2"), "shared_")
        return params

    def __call__(
        self,
        x: jax.Array,
        *,
        experts: jax.Array | None = None,
        weights: jax.Array | None = None,
        selection_bias: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """x (..., D) bf16 or fp32 -> (y like x, MoEStats); the other arguments as in `moe.apply`."""
        given: dict[str, Any] = {"experts": experts, "weights": weights, "selection_bias": selection_bias}
        if self.tokens is None:
            return moe.apply(self.params, x, self.config, **given)
        placed: dict[str, Any] = {"tokens": self.tokens, "mesh": self.mesh, **self.axes}
        return moe.sharded_apply(self.params, x, self.config, **placed, **given)
