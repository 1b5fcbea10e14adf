"""mxep for JAX: MXFP8 grouped products, expert parallelism inside shard_map and a complete Mixture-of-Experts layer.

The layer      moe.init, moe.apply, moe.sharded_apply, moe.specs, MoEConfig, MoEStats
Its metrics    moe_metrics, MoEMetrics
The router     route, Routing, update_selection_bias
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine, Route (docs/pipeline.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, SwiGLU, ragged_dot_mxfp8, quantize_weights, QuantizedWeights
Layouts        unpack_expert_weights, pack_expert_weights: gate and up in one tensor, as other libraries store them
Rows           MXArray, MXGradArray, spread_rows, gather_rows, weighted_combine, RowMap, ExpertOrder
Exchanges      plan_exchange, Exchange, a2a_dispatch, permute, and torchao's names a2a_*, permute_*, unpermute_*
Programs       save_mx_rows (remat.py lists the names), export_checks, lower_for
Kernels        ops, capabilities, force_implementation, numerics_report

`help(grouped_mm)` and `help(ops.quantize_row)` show shapes, dtypes and errors.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("mxep.jax_frontend needs jax: pip install 'mxep[jax]'") from error

from ..core_kernels.formats import Rounding as Rounding
from ..core_kernels.policy.metrics import MoEMetrics as MoEMetrics
from ..core_kernels.policy.numerics import NumericsReport as NumericsReport
from ..core_kernels.policy.recipe import RECIPES as RECIPES
from ..core_kernels.policy.recipe import Recipe as Recipe
from ..core_kernels.swiglu.activation import SwiGLU as SwiGLU
from . import ops as ops
from .exchange.all_to_all import Exchange as Exchange
from .exchange.all_to_all import TokenReplicas as TokenReplicas
from .exchange.all_to_all import plan_exchange as plan_exchange
from .exchange.combine import combine as combine
from .exchange.dispatch import dispatch as dispatch
from .exchange.dispatch import dispatch_probs as dispatch_probs
from .exchange.route import Route as Route
from .exchange.rows import a2a_dispatch as a2a_dispatch
from .exchange.rows import gather_rows as gather_rows
from .exchange.rows import permute as permute
from .exchange.rows import spread_rows as spread_rows
from .exchange.rows import weighted_combine as weighted_combine
from .integrations.layouts import pack_expert_weights as pack_expert_weights
from .integrations.layouts import unpack_expert_weights as unpack_expert_weights
from .integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd as a2a_combine_hp_fwd_mxfp8_bwd
from .integrations.torchao import a2a_dispatch_mxfp8_fwd_hp_bwd as a2a_dispatch_mxfp8_fwd_hp_bwd
from .integrations.torchao import permute_mxfp8_fwd_hp_bwd as permute_mxfp8_fwd_hp_bwd
from .integrations.torchao import to_mxfp8_a2a_dequant as to_mxfp8_a2a_dequant
from .integrations.torchao import unpermute_hp_fwd_mxfp8_bwd as unpermute_hp_fwd_mxfp8_bwd
from .layer import moe as moe
from .layer.metrics import moe_metrics as moe_metrics
from .layer.moe import MoEStats as MoEStats
from .layer.moe_params import MoEConfig as MoEConfig
from .layer.numerics import numerics_report as numerics_report
from .ops import ExpertOrder as ExpertOrder
from .ops import RowMap as RowMap
from .ops.capabilities import Capability as Capability
from .ops.capabilities import capabilities as capabilities
from .ops.capabilities import export_checks as export_checks
from .ops.device import force_implementation as force_implementation
from .ops.device import lower_for as lower_for
from .ops.mx_array import MXArray as MXArray
from .ops.mx_array import MXGradArray as MXGradArray
from .ops.remat import save_mx_rows as save_mx_rows
from .products.ffn import grouped_swiglu_ffn as grouped_swiglu_ffn
from .products.grouped_mm import grouped_mm as grouped_mm
from .products.ragged_dot import ragged_dot_mxfp8 as ragged_dot_mxfp8
from .products.swiglu import swiglu as swiglu
from .products.weights import QuantizedWeights as QuantizedWeights
from .products.weights import quantize_weights as quantize_weights
from .routing.permute import sort_by_expert as sort_by_expert
from .routing.router import Routing as Routing
from .routing.router import route as route
from .routing.router import update_selection_bias as update_selection_bias
