"""mxep for PyTorch: MXFP8 grouped products, expert parallelism and a complete MoE layer.

from mxep.torch_frontend import MoE, MXFP8ExpertParallel
from mxep.torch_frontend import a2a_dispatch_mxfp8_fwd_hp_bwd, permute_mxfp8_fwd_hp_bwd   # the building blocks
"""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "mxep.torch_frontend: PyTorch is missing; install it with `pip install 'mxep[torch]'`"
    ) from error

from ..core_kernels.fold.report import NumericsReport
from ..core_kernels.formats import Rounding
from ..core_kernels.recipe import Recipe
from . import ops
from ._call import debug_checks
from ._device import force_implementation
from .autograd import (
    _to_mxfp8_then_scaled_grouped_mm,
    bf16_grouped_mm,
    fp8_rowwise_grouped_mm,
    mxfp8_grouped_mm,
)
from .capabilities import Capability, capabilities
from .combine import weighted_combine
from .ep import (
    TokenCopies,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)
from .ffn import grouped_swiglu_ffn
from .moe import GroupedExperts, MoE, MoEStats
from .mx_tensor import MXTensor
from .numerics import numerics_report
from .parallel import MXFP8ExpertParallel
from .permute import gather_rows, permute_mxfp8_fwd_hp_bwd, spread_rows, unpermute_hp_fwd_mxfp8_bwd
from .swiglu import swiglu
from .weights import QuantizedWeights, quantize_weights

ScaleCalculationMode = Rounding

__all__ = [
    "Capability",
    "GroupedExperts",
    "MXFP8ExpertParallel",
    "MXTensor",
    "MoE",
    "MoEStats",
    "NumericsReport",
    "QuantizedWeights",
    "Recipe",
    "Rounding",
    "ScaleCalculationMode",
    "TokenCopies",
    "_to_mxfp8_then_scaled_grouped_mm",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "bf16_grouped_mm",
    "capabilities",
    "debug_checks",
    "force_implementation",
    "fp8_rowwise_grouped_mm",
    "gather_rows",
    "grouped_swiglu_ffn",
    "mxfp8_grouped_mm",
    "numerics_report",
    "ops",
    "permute_mxfp8_fwd_hp_bwd",
    "quantize_weights",
    "spread_rows",
    "swiglu",
    "to_mxfp8_a2a_dequant",
    "unpermute_hp_fwd_mxfp8_bwd",
    "weighted_combine",
]
