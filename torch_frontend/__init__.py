"""mxep for PyTorch: MXFP8 grouped products, expert parallelism and a complete Mixture-of-Experts layer.

The layer      MoE, GroupedExperts, MoEStats, MXFP8ExpertParallel
FSDP2          shard_moe, clip_grad_norm_ (docs/fsdp.md)
Its metrics    MoERecorder, moe_metrics, MoEMetrics (docs/metrics.md)
The router     route, Routing, update_selection_bias
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine, Route (docs/pipeline.md)
Overlapped     expert_parallel_ffn, expert_parallel_mm, Collectives, CopyEngines, PeerMemory (docs/overlap.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, SwiGLU, quantize_weights, QuantizedWeights
Other models   convert_moe, ConversionReport, ConvertedExperts; register_experts in .transformers (docs/transformers.md)
Layouts        unpack_expert_weights, pack_expert_weights: gate and up in one tensor, as other libraries store them
Rows           MXTensor, spread_rows, gather_rows, weighted_combine, RowMap, ExpertOrder, a2a_dispatch
torchao's      mxfp8_grouped_mm, a2a_*, permute_*, unpermute_* and others, under torchao's signatures (docs/torchao.md)
Kernels        ops, capabilities, force_implementation, debug_checks, numerics_report

`help(grouped_mm)` and `help(ops.quantize_row)` show shapes, dtypes and errors.
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mxep.torch_frontend: PyTorch is missing; install it with `pip install 'mxep[torch]'`"
    ) from error

from ..core_kernels.formats import Rounding as Rounding
from ..core_kernels.policy.metrics import MoEMetrics as MoEMetrics
from ..core_kernels.policy.numerics import NumericsReport as NumericsReport
from ..core_kernels.policy.recipe import RECIPES as RECIPES
from ..core_kernels.policy.recipe import Recipe as Recipe
from ..core_kernels.swiglu.activation import SwiGLU as SwiGLU
from . import ops as ops
from .exchange.all_to_all import TokenReplicas as TokenReplicas
from .exchange.all_to_all import a2a_dispatch as a2a_dispatch
from .exchange.combine import combine as combine
from .exchange.dispatch import dispatch as dispatch
from .exchange.dispatch import dispatch_probs as dispatch_probs
from .exchange.route import Route as Route
from .integrations.convert import ConversionReport as ConversionReport
from .integrations.convert import ConvertedExperts as ConvertedExperts
from .integrations.convert import convert_moe as convert_moe
from .integrations.layouts import pack_expert_weights as pack_expert_weights
from .integrations.layouts import unpack_expert_weights as unpack_expert_weights
from .integrations.torchao import ScaleCalculationMode as ScaleCalculationMode
from .integrations.torchao import _to_mxfp8_then_scaled_grouped_mm as _to_mxfp8_then_scaled_grouped_mm
from .integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd as a2a_combine_hp_fwd_mxfp8_bwd
from .integrations.torchao import a2a_dispatch_mxfp8_fwd_hp_bwd as a2a_dispatch_mxfp8_fwd_hp_bwd
from .integrations.torchao import bf16_grouped_mm as bf16_grouped_mm
from .integrations.torchao import fp8_rowwise_grouped_mm as fp8_rowwise_grouped_mm
from .integrations.torchao import mxfp8_grouped_mm as mxfp8_grouped_mm
from .integrations.torchao import permute_mxfp8_fwd_hp_bwd as permute_mxfp8_fwd_hp_bwd
from .integrations.torchao import to_mxfp8_a2a_dequant as to_mxfp8_a2a_dequant
from .integrations.torchao import unpermute_hp_fwd_mxfp8_bwd as unpermute_hp_fwd_mxfp8_bwd
from .layer.fsdp import clip_grad_norm_ as clip_grad_norm_
from .layer.fsdp import shard_moe as shard_moe
from .layer.metrics import MoERecorder as MoERecorder
from .layer.metrics import moe_metrics as moe_metrics
from .layer.moe import GroupedExperts as GroupedExperts
from .layer.moe import MoE as MoE
from .layer.moe import MoEStats as MoEStats
from .layer.numerics import numerics_report as numerics_report
from .layer.parallel import MXFP8ExpertParallel as MXFP8ExpertParallel
from .ops.call import debug_checks as debug_checks
from .ops.capabilities import Capability as Capability
from .ops.capabilities import capabilities as capabilities
from .ops.device import force_implementation as force_implementation
from .ops.mx_tensor import MXTensor as MXTensor
from .overlap.collectives import Collectives as Collectives
from .overlap.copy_engines import CopyEngines as CopyEngines
from .overlap.expert_parallel import expert_parallel_ffn as expert_parallel_ffn
from .overlap.expert_parallel import expert_parallel_mm as expert_parallel_mm
from .overlap.peer_memory import PeerMemory as PeerMemory
from .products.ffn import grouped_swiglu_ffn as grouped_swiglu_ffn
from .products.grouped_mm import grouped_mm as grouped_mm
from .products.groups import RowMap as RowMap
from .products.swiglu import swiglu as swiglu
from .products.weights import QuantizedWeights as QuantizedWeights
from .products.weights import quantize_weights as quantize_weights
from .routing.permute import ExpertOrder as ExpertOrder
from .routing.permute import gather_rows as gather_rows
from .routing.permute import sort_by_expert as sort_by_expert
from .routing.permute import spread_rows as spread_rows
from .routing.router import Routing as Routing
from .routing.router import route as route
from .routing.router import update_selection_bias as update_selection_bias
from .routing.weighted_combine import weighted_combine as weighted_combine
