"""Launches with dims of 1 or below every tile become machine code; test_cross_compile.py has realistic sizes."""

import pytest
from mxep.core_kernels.combine import plan as combine
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.fold.gathered import plan_permute as fold_permute
from mxep.core_kernels.grouped_gemm.blockwise import plan as blockwise_gemm
from mxep.core_kernels.grouped_gemm.exact import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm.exact import plan_kn
from mxep.core_kernels.grouped_gemm.folded import plan as folded_gemm
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.quantize import plan_blockwise as blockwise
from mxep.core_kernels.router import plan as router
from mxep.core_kernels.router import plan_logits as router_logits
from mxep.core_kernels.routing import plan as routing
from mxep.core_kernels.scale_layout import plan as scale_layout
from mxep.core_kernels.swiglu import plan as swiglu
from mxep.core_kernels.swiglu import plan_blockwise as swiglu_blockwise

from ...cases import PRODUCTS
from .test_cross_compile import ARCHS, bf16, compile_plan, f32, glu, i32, mx, u8

SMALL = {
    "quantize_row": (quantize.quantize_row, (bf16(1, 32),)),
    "quantize_row_packed": (quantize.quantize_row_packed, (bf16(1, 32),)),
    "quantize_col": (quantize.quantize_col, (bf16(32, 32),)),
    "dequantize": (quantize.dequantize, mx(1, 32)),
    "permute_rows": (permute.permute_rows, (bf16(1, 3), i32(1))),
    "permute_mx": (permute.permute_mx, (u8(1, 33), i32(1))),
    "fold_rows": (fold.fold_rows, mx(1, 32)),
    "permute_mx_fold": (fold_permute.permute_mx_fold, (u8(1, 33), i32(1))),
    "quantize_row_fold": (fold.quantize_row_fold, (bf16(1, 32),)),
    "quantize_rowwise": (quantize.quantize_rowwise, (bf16(1, 32),)),
    "quantize_blockwise": (blockwise.quantize_blockwise, (bf16(1, 3),)),
    "quantize_squares": (blockwise.quantize_squares, (bf16(1, 3),)),
    "quantize_squares_both": (blockwise.quantize_squares_both, (bf16(1, 3),)),
    "fold_groups": (fold.fold_groups, (*mx(1, 32), i32(1))),
    "block_scales": (scale_layout.block_scales, (u8(1, 1), i32(1))),
    "swiglu": (swiglu.swiglu, glu(1, 3)),
    "swiglu_blockwise": (swiglu_blockwise.swiglu_blockwise, glu(1, 3)),
    "swiglu_bwd": (swiglu.swiglu_bwd, (bf16(1, 3), *glu(1, 3))),
    "swiglu_bwd without prob": (swiglu.swiglu_bwd, (bf16(1, 3), *glu(1, 3, False))),
    "logits_bwd": (router_logits.logits_bwd, (bf16(1, 6), bf16(3, 5), bf16(1, 5))),
    "route_bwd": (router.route_bwd, (f32(1, 1), f32(3), f32(1, 3), i32(1, 1))),
    "combine": (combine.combine, (bf16(1, 3), i32(1, 1), f32(1, 1))),
    "combine_bwd": (combine.combine_bwd, (bf16(1, 3), bf16(1, 3), i32(1, 1), i32(1), f32(1, 1))),
    "combine_bwd_row": (combine.combine_bwd_row, (bf16(1, 32), bf16(1, 32), i32(1, 1), i32(1), f32(1, 1))),
    "grouped_mm_mx": (grouped_gemm.grouped_mm_mx, (*mx(1, 32), *mx(1, 8, 32), i32(1))),
    "grouped_wgrad_mx": (grouped_gemm.grouped_wgrad_mx, (*mx(8, 32), *mx(8, 32), i32(1))),
    "grouped_mm_bf16": (grouped_gemm.grouped_mm_bf16, (bf16(1, 5), bf16(1, 3, 5), i32(1))),
    "grouped_mm_bf16_kn": (plan_kn.grouped_mm_bf16_kn, (bf16(1, 5), bf16(1, 5, 3), i32(1))),
    "grouped_mm_bf16_kn_sum": (plan_kn.grouped_mm_bf16_kn_sum, (*(bf16(1, 5), bf16(1, 5, 3)) * 2, i32(1))),
    "grouped_wgrad_bf16": (grouped_gemm.grouped_wgrad_bf16, (bf16(1, 3), bf16(1, 5), i32(1))),
    "grouped_wgrad_bf16_t": (grouped_gemm.grouped_wgrad_bf16_t, (bf16(3, 1), bf16(5, 1), i32(1))),
    "grouped_mm_fold": (folded_gemm.grouped_mm_fold, (u8(1, 32), u8(1), u8(1, 8, 32), u8(1, 8), i32(1))),
    "grouped_mm_fold_bias": (
        folded_gemm.grouped_mm_fold_bias,
        (u8(1, 32), u8(1), u8(1, 8, 32), u8(1, 8), f32(1, 8), i32(1)),
    ),
    "grouped_mm_fold_sum": (
        folded_gemm.grouped_mm_fold_sum,
        (*(u8(1, 32), u8(1), u8(1, 8, 32), u8(1, 8)) * 2, i32(1)),
    ),
    "grouped_mm_blockwise": (
        blockwise_gemm.grouped_mm_blockwise,
        (u8(1, 32), f32(1, 1), u8(1, 8, 32), f32(1, 1, 1), i32(1)),
    ),
    "grouped_mm_blockwise_sum": (
        blockwise_gemm.grouped_mm_blockwise_sum,
        (*(u8(1, 32), f32(1, 1), u8(1, 8, 32), f32(1, 1, 1)) * 2, i32(1)),
    ),
    "grouped_wgrad_fold": (folded_gemm.grouped_wgrad_fold, (u8(1, 32), u8(1, 1), u8(8, 32), u8(1, 8), i32(1))),
}


# The code of products differs between the architectures.
LAUNCHES = [(name, arch) for name in SMALL for arch in ARCHS if arch == "sm_90" or name.split()[0] in PRODUCTS]


@pytest.mark.parametrize(("name", "arch"), LAUNCHES)
def test_one_row(name, arch):
    """Launchers turn a scalar of 1 into a constant, which has no `.to()`; dims here are below every tile."""
    op, inputs = SMALL[name]
    assert compile_plan(op, inputs, arch, {}).asm["cubin"]


def test_one_slot():
    assert compile_plan(routing.sort_by_expert, (i32(1),), "sm_90", {"num_experts": 1}).asm["cubin"]
    assert compile_plan(router.route, (bf16(1, 1), f32(1)), "sm_90", {"top_k": 1}).asm["cubin"]
    options = {"num_rows": 1, "num_local_experts": 1}
    assert compile_plan(routing.row_map, (i32(1),), "sm_90", options).asm["cubin"]
