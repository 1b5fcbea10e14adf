"""mxep for JAX: MXFP8 grouped products, expert parallelism inside shard_map and a complete Mixture-of-Experts layer.

The layer      moe.init, moe.apply, MoEConfig, MoEStats
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine, Route (docs/pipeline.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, ragged_dot_mxfp8, quantize_weights, QuantizedWeights
Rows           MXArray, MXGradArray, spread_rows, gather_rows, weighted_combine, RowMap, ExpertOrder
Exchanges      plan_exchange, Exchange, a2a_dispatch, permute, and torchao's names a2a_*, permute_*, unpermute_*
Kernels        ops, capabilities, force_implementation, lower_for, numerics_report
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("mxep.jax_frontend needs jax: pip install 'mxep[jax]'") from error

from ..core_kernels.fold.report import NumericsReport
from ..core_kernels.formats import Rounding
from ..core_kernels.recipe import RECIPES, Recipe
from . import moe, ops
from ._device import force_implementation, lower_for
from .capabilities import Capability, capabilities
from .ep import (
    Exchange,
    TokenReplicas,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    plan_exchange,
    to_mxfp8_a2a_dequant,
)
from .ffn import grouped_swiglu_ffn
from .grouped_mm import grouped_mm
from .moe import MoEConfig, MoEStats
from .mx_array import MXArray, MXGradArray
from .numerics import numerics_report
from .ops import ExpertOrder, RowMap
from .permute import (
    gather_rows,
    permute,
    permute_mxfp8_fwd_hp_bwd,
    sort_by_expert,
    spread_rows,
    unpermute_hp_fwd_mxfp8_bwd,
)
from .pipeline import Route, combine, dispatch, dispatch_probs
from .ragged_dot import ragged_dot_mxfp8
from .swiglu import swiglu
from .weighted_combine import weighted_combine
from .weights import QuantizedWeights, quantize_weights

__all__ = [
    "RECIPES",
    "Capability",
    "Exchange",
    "ExpertOrder",
    "MXArray",
    "MXGradArray",
    "MoEConfig",
    "MoEStats",
    "NumericsReport",
    "QuantizedWeights",
    "Recipe",
    "Rounding",
    "Route",
    "RowMap",
    "TokenReplicas",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "capabilities",
    "combine",
    "dispatch",
    "dispatch_probs",
    "force_implementation",
    "gather_rows",
    "grouped_mm",
    "grouped_swiglu_ffn",
    "lower_for",
    "moe",
    "numerics_report",
    "ops",
    "permute",
    "permute_mxfp8_fwd_hp_bwd",
    "plan_exchange",
    "quantize_weights",
    "ragged_dot_mxfp8",
    "sort_by_expert",
    "spread_rows",
    "swiglu",
    "to_mxfp8_a2a_dequant",
    "unpermute_hp_fwd_mxfp8_bwd",
    "weighted_combine",
]
