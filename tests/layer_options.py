"""The arguments of a layer from one flat set of options, as parameters of tests list them. It imports no framework."""

from dataclasses import fields
from typing import Any

from mxep.core_kernels.policy.router import RouterConfig

OF_ROUTER = {field.name for field in fields(RouterConfig)} - {"top_k", "bias"}


def layer_options(top_k: int, router_bias: bool = False, **options: Any) -> dict[str, Any]:
    """`router`, of the options that are fields of a RouterConfig, and the other options of `MoE` or `MoEConfig`."""
    of_router = {name: options.pop(name) for name in OF_ROUTER & set(options)}
    return {"router": RouterConfig(top_k, bias=router_bias, **of_router), **options}
