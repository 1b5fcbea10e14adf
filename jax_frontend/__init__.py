"""MXFP8 for Mixture-of-Experts training in JAX: kernels, gradients, expert parallelism in shard_map, a layer.

moe.init / moe.apply            the whole layer
plan_exchange, a2a_*, permute_*, grouped_swiglu_ffn, mxfp8_grouped_mm, swiglu, unpermute_*, weighted_combine
                                its parts, differentiable
ragged_dot_mxfp8                jax.lax.ragged_dot in MXFP8
quantize_weights                weights quantized once per optimizer step, for all of these
ops                             the kernels as plain functions on bytes
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
from .combine import weighted_combine
from .ep import (
    Exchange,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    of_tokens,
    plan_exchange,
    to_mxfp8_a2a_dequant,
)
from .ffn import grouped_swiglu_ffn
from .moe import MoEConfig, MoEStats
from .mx_array import MXArray, MXGradArray
from .numerics import numerics_report
from .ops import ExpertOrder, RowMap
from .permute import (
    gather_rows,
    permute,
    permute_mxfp8_fwd_hp_bwd,
    spread_rows,
    unpermute_hp_fwd_mxfp8_bwd,
)
from .ragged_dot import ragged_dot_mxfp8
from .swiglu import swiglu
from .vjp import mxfp8_grouped_mm
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
    "RowMap",
    "a2a_combine_hp_fwd_mxfp8_bwd",
    "a2a_dispatch",
    "a2a_dispatch_mxfp8_fwd_hp_bwd",
    "capabilities",
    "force_implementation",
    "gather_rows",
    "grouped_swiglu_ffn",
    "lower_for",
    "moe",
    "mxfp8_grouped_mm",
    "numerics_report",
    "of_tokens",
    "ops",
    "permute",
    "permute_mxfp8_fwd_hp_bwd",
    "plan_exchange",
    "quantize_weights",
    "ragged_dot_mxfp8",
    "spread_rows",
    "swiglu",
    "to_mxfp8_a2a_dequant",
    "unpermute_hp_fwd_mxfp8_bwd",
    "weighted_combine",
]
