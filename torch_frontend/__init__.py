"""mxep for PyTorch: MXFP8 grouped products, expert parallelism and a complete Mixture-of-Experts layer.

The layer      MoE, GroupedExperts, MoEStats, MXFP8ExpertParallel
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine, Route (docs/pipeline.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, quantize_weights, QuantizedWeights
Rows           MXTensor, spread_rows, gather_rows, weighted_combine, RowMap, ExpertOrder, a2a_dispatch
torchao's      mxfp8_grouped_mm, a2a_*, permute_*, unpermute_* and others, under torchao's signatures (docs/torchao.md)
Kernels        ops, capabilities, force_implementation, debug_checks, numerics_report
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mxep.torch_frontend: PyTorch is missing; install it with `pip install 'mxep[torch]'`"
    ) from error

from ..core_kernels.fold.report import NumericsReport
from ..core_kernels.formats import Rounding
from ..core_kernels.recipe import RECIPES, Recipe
from . import ops
from ._call import debug_checks
from ._device import force_implementation
from .capabilities import Capability, capabilities
from .ep import TokenReplicas, a2a_dispatch
from .ffn import grouped_swiglu_ffn
from .grouped_mm import grouped_mm
from .moe import GroupedExperts, MoE, MoEStats
from .mx_tensor import MXTensor
from .numerics import numerics_report
from .parallel import MXFP8ExpertParallel
from .permute import ExpertOrder, RowMap, gather_rows, sort_by_expert, spread_rows
from .pipeline import Route, combine, dispatch, dispatch_probs
from .swiglu import swiglu
from .torchao import (
    ScaleCalculationMode,
    _to_mxfp8_then_scaled_grouped_mm,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    bf16_grouped_mm,
    fp8_rowwise_grouped_mm,
    mxfp8_grouped_mm,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
    unpermute_hp_fwd_mxfp8_bwd,
)
from .weighted_combine import weighted_combine
from .weights import QuantizedWeights, quantize_weights

__all__ = [
    "RECIPES",
    "Capability",
    "ExpertOrder",
    "GroupedExperts",
    "MXFP8ExpertParallel",
    "MXTensor",
    "MoE",
    "MoEStats",
    "NumericsReport",
    "QuantizedWeights",
    "Recipe",
    "Rounding",
    "Route",
    "RowMap",
    "ScaleCalculationMode",
    "TokenReplicas",
    "_to_mxfp8_then_scaled_grouped_mm",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "bf16_grouped_mm",
    "capabilities",
    "combine",
    "debug_checks",
    "dispatch",
    "dispatch_probs",
    "force_implementation",
    "fp8_rowwise_grouped_mm",
    "gather_rows",
    "grouped_mm",
    "grouped_swiglu_ffn",
    "mxfp8_grouped_mm",
    "numerics_report",
    "ops",
    "permute_mxfp8_fwd_hp_bwd",
    "quantize_weights",
    "sort_by_expert",
    "spread_rows",
    "swiglu",
    "to_mxfp8_a2a_dequant",
    "unpermute_hp_fwd_mxfp8_bwd",
    "weighted_combine",
]
