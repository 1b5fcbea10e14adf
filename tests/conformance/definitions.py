"""The definition of every op by the op's name, from the oracles of all families."""

from collections.abc import Callable

from mxep.core_kernels.combine import oracle as combine
from mxep.core_kernels.fold import oracle as fold
from mxep.core_kernels.grouped_gemm.blockwise import oracle as grouped_gemm_blockwise
from mxep.core_kernels.grouped_gemm.exact import oracle as grouped_gemm
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded
from mxep.core_kernels.permute import oracle as permute
from mxep.core_kernels.quantize import oracle as quantize
from mxep.core_kernels.quantize import oracle_blockwise as quantize_blockwise
from mxep.core_kernels.router import oracle as router
from mxep.core_kernels.routing import oracle as routing
from mxep.core_kernels.scale_layout import oracle as scale_layout
from mxep.core_kernels.swiglu import oracle as swiglu

ORACLES = (
    *(quantize, quantize_blockwise, permute, router, routing, scale_layout, swiglu, combine, fold),
    *(grouped_gemm, oracle_folded, grouped_gemm_blockwise),
)
DEFINITIONS: dict[str, Callable] = {
    name: value for oracle in ORACLES for name, value in vars(oracle).items() if callable(value)
}
