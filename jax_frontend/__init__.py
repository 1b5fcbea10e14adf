"""mxep for JAX: MXFP8 grouped products, expert parallelism inside shard_map and a complete Mixture-of-Experts layer.

The layer      moe (init, apply, sharded_apply, specs), MoEConfig, RouterConfig, SharedExpert
               MoEStats (docs/guides/metrics.md)
The router     route, update_selection_bias
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine (docs/concepts/pipeline.md)
GPUs of a host PeerMemory (docs/guides/jax.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, SwiGLU, ragged_dot_mxfp8, quantize_weights
Dense layers   dense, sharded_dense (docs/guides/linear.md)
Recipes        Recipe, RECIPES
Rows           MXArray, gather_rows, weighted_combine
Programs       save_mx_rows (ops/remat.py lists the names), export_checks, lower_for
Kernels        ops, capabilities, force_implementation, numerics_report

Other libraries have modules of their own in `integrations`: nnx (docs/guides/jax.md), layouts (docs/guides/models.md),
torchao. The exchanges alone are in `exchange` (docs/concepts/pipeline.md). The record that a function returns is in the
function's module.

`help(grouped_mm)` and `help(ops.quantize_row)` show shapes, dtypes and errors.
"""

from typing import TYPE_CHECKING, NoReturn

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("mxep.jax_frontend needs jax: pip install 'mxep[jax]'") from error

from ..core_kernels.policy.recipe import RECIPES, Recipe
from ..core_kernels.policy.router import RouterConfig, SharedExpert
from ..core_kernels.swiglu.activation import SwiGLU
from . import ops
from .exchange.all_to_all import TokenReplicas
from .exchange.combine import combine
from .exchange.dispatch import dispatch, dispatch_probs
from .exchange.peer_memory import PeerMemory
from .exchange.rows import gather_rows, weighted_combine
from .layer import moe
from .layer.linear import sharded_dense
from .layer.moe_layer import MoEStats
from .layer.moe_params import MoEConfig
from .layer.numerics import numerics_report
from .ops.capabilities import capabilities, export_checks
from .ops.device import force_implementation, lower_for
from .ops.mx_array import MXArray
from .ops.remat import save_mx_rows
from .products.ffn import grouped_swiglu_ffn
from .products.grouped_mm import grouped_mm
from .products.linear import dense
from .products.ragged_dot import ragged_dot_mxfp8
from .products.swiglu import swiglu
from .products.weights import quantize_weights
from .routing.permute import sort_by_expert
from .routing.router import route, update_selection_bias

__all__ = [
    "RECIPES",
    "MXArray",
    "MoEConfig",
    "MoEStats",
    "PeerMemory",
    "Recipe",
    "RouterConfig",
    "SharedExpert",
    "SwiGLU",
    "TokenReplicas",
    "capabilities",
    "combine",
    "dense",
    "dispatch",
    "dispatch_probs",
    "export_checks",
    "force_implementation",
    "gather_rows",
    "grouped_mm",
    "grouped_swiglu_ffn",
    "lower_for",
    "moe",
    "numerics_report",
    "ops",
    "quantize_weights",
    "ragged_dot_mxfp8",
    "route",
    "save_mx_rows",
    "sharded_dense",
    "sort_by_expert",
    "swiglu",
    "update_selection_bias",
    "weighted_combine",
]

_ELSEWHERE = {
    "core_kernels.dispatch": ["Capability"],
    "core_kernels.formats": ["Rounding"],
    "core_kernels.policy.metrics": ["MoEMetrics"],
    "core_kernels.policy.numerics": ["NumericsReport"],
    "jax_frontend.exchange.all_to_all": ["Exchange", "plan_exchange"],
    "jax_frontend.exchange.route": ["Route"],
    "jax_frontend.exchange.rows": ["a2a_dispatch", "permute", "spread_rows"],
    "jax_frontend.integrations.layouts": ["pack_expert_weights", "unpack_expert_weights"],
    "jax_frontend.integrations.torchao": [
        "a2a_combine_hp_fwd_mxfp8_bwd",
        "a2a_dispatch_mxfp8_fwd_hp_bwd",
        "permute_mxfp8_fwd_hp_bwd",
        "to_mxfp8_a2a_dequant",
        "unpermute_hp_fwd_mxfp8_bwd",
    ],
    "jax_frontend.ops": ["ExpertOrder", "RowMap"],
    "jax_frontend.ops.mx_array": ["MXGradArray"],
    "jax_frontend.products.weights": ["FrozenWeights", "QuantizedWeights"],
    "jax_frontend.routing.router": ["Routing"],
}
"""Names that are in another module of mxep, by module; an error says it to those who look for them here."""


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take every name as existing

    def __getattr__(name: str) -> NoReturn:
        for module, names in _ELSEWHERE.items():
            if name in names:
                raise AttributeError(f"{__name__}.{name}: import it from mxep.{module}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
