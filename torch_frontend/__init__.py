"""mxep for PyTorch: MXFP8 grouped products, expert parallelism and a complete Mixture-of-Experts layer.

The layer      MoE, RouterConfig, SharedExpert, GroupedExperts, MoEStats (docs/guides/metrics.md), ExpertParallel
FSDP2          shard_moe, clip_grad_norm_ (docs/guides/fsdp.md)
The router     route, update_selection_bias
The pipeline   sort_by_expert, TokenReplicas, dispatch, dispatch_probs, combine (docs/concepts/pipeline.md)
Overlapped     expert_parallel_ffn, PeerMemory (docs/guides/overlap.md)
Products       grouped_mm, grouped_swiglu_ffn, swiglu, SwiGLU, quantize_weights
Dense layers   linear, MXLinear, convert_linear (docs/guides/linear.md)
Recipes        Recipe, RECIPES
Rows           MXTensor, gather_rows, weighted_combine
Kernels        ops, capabilities, force_implementation, debug_checks, numerics_report

Other libraries have modules of their own in `integrations`: torchao (docs/migrate/torchao.md), transformers and convert
(docs/guides/transformers.md), frozen (docs/guides/lora.md), layouts (docs/guides/models.md), torchtitan
(docs/guides/torchtitan.md). The record that a function returns is in the function's module.

`help(grouped_mm)` and `help(ops.quantize_row)` show shapes, dtypes and errors.
"""

from typing import TYPE_CHECKING, NoReturn

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mxep.torch_frontend: PyTorch is missing; install it with `pip install 'mxep[torch]'`"
    ) from error

from ..core_kernels.policy.recipe import RECIPES, Recipe
from ..core_kernels.policy.router import RouterConfig, SharedExpert
from ..core_kernels.swiglu.activation import SwiGLU
from . import ops
from .exchange.all_to_all import TokenReplicas
from .exchange.combine import combine
from .exchange.dispatch import dispatch, dispatch_probs
from .layer.convert_linear import convert_linear
from .layer.fsdp import clip_grad_norm_, shard_moe
from .layer.linear import MXLinear
from .layer.moe import GroupedExperts, MoE, MoEStats
from .layer.numerics import numerics_report
from .layer.parallel import ExpertParallel
from .ops.call import debug_checks
from .ops.capabilities import capabilities
from .ops.device import force_implementation
from .ops.mx_tensor import MXTensor
from .overlap.expert_parallel import expert_parallel_ffn
from .overlap.peer_memory import PeerMemory
from .products.ffn import grouped_swiglu_ffn
from .products.grouped_mm import grouped_mm
from .products.linear import linear
from .products.swiglu import swiglu
from .products.weights import quantize_weights
from .routing.permute import gather_rows, sort_by_expert
from .routing.router import route, update_selection_bias
from .routing.weighted_combine import weighted_combine

MXFP8ExpertParallel = ExpertParallel
"""Another name of `ExpertParallel`."""

__all__ = [
    "RECIPES",
    "ExpertParallel",
    "GroupedExperts",
    "MXLinear",
    "MXTensor",
    "MoE",
    "MoEStats",
    "PeerMemory",
    "Recipe",
    "RouterConfig",
    "SharedExpert",
    "SwiGLU",
    "TokenReplicas",
    "capabilities",
    "clip_grad_norm_",
    "combine",
    "convert_linear",
    "debug_checks",
    "dispatch",
    "dispatch_probs",
    "expert_parallel_ffn",
    "force_implementation",
    "gather_rows",
    "grouped_mm",
    "grouped_swiglu_ffn",
    "linear",
    "numerics_report",
    "ops",
    "quantize_weights",
    "route",
    "shard_moe",
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
    "torch_frontend.exchange.all_to_all": ["a2a_dispatch"],
    "torch_frontend.exchange.route": ["Route"],
    "torch_frontend.integrations.convert": ["ConversionReport", "ConvertedExperts", "convert_moe"],
    "torch_frontend.integrations.frozen": ["freeze_weights"],
    "torch_frontend.integrations.layouts": ["pack_expert_weights", "unpack_expert_weights"],
    "torch_frontend.integrations.torchao": [
        "ScaleCalculationMode",
        "_to_mxfp8_then_scaled_grouped_mm",
        "a2a_combine_hp_fwd_mxfp8_bwd",
        "a2a_dispatch_mxfp8_fwd_hp_bwd",
        "bf16_grouped_mm",
        "fp8_rowwise_grouped_mm",
        "mxfp8_grouped_mm",
        "permute_mxfp8_fwd_hp_bwd",
        "to_mxfp8_a2a_dequant",
        "unpermute_hp_fwd_mxfp8_bwd",
    ],
    "torch_frontend.layer.convert_linear": ["ConvertedLinear", "LinearReport"],
    "torch_frontend.layer.metrics": ["MoERecorder"],
    "torch_frontend.overlap.expert_parallel": ["expert_parallel_mm"],
    "torch_frontend.products.groups": ["RowMap"],
    "torch_frontend.products.weights": ["QuantizedWeights"],
    "torch_frontend.routing.permute": ["ExpertOrder", "spread_rows"],
    "torch_frontend.routing.router": ["Routing"],
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
