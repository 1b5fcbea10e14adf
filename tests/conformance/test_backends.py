"""Which backend runs which op: the table, that nobody is missing from it, and that nobody leaves a byte unwritten."""

import os

import numpy as np
import pytest
from mxep.core_kernels.combine import plan as combine
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.fold import plan_both as both_fold
from mxep.core_kernels.fold import plan_loss as fold_loss
from mxep.core_kernels.grouped_gemm import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm import plan_folded as folded_gemm
from mxep.core_kernels.launch import KernelOp
from mxep.core_kernels.permute import plan as permute
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.routing import plan as routing
from mxep.core_kernels.scale_layout import oracle as scale_layout_oracle
from mxep.core_kernels.scale_layout import plan as scale_layout
from mxep.core_kernels.swiglu import plan as swiglu

from . import backends, check
from .cases import COMBINES, GEMMS, GLUS, MAPS, QUANTIZE, SORTS
from .definitions import DEFINITIONS

BYTES = {
    *("quantize_row", "quantize_row_packed", "quantize_col", "quantize_both", "dequantize"),
    *("permute_rows", "permute_mx", "sort_by_expert", "row_map"),
    *("fold_rows", "quantize_row_fold", "fold_groups", "block_scales", "unblock_scales"),
    *("quantize_rowwise", "quantize_both_fold", "count_fold_loss"),
    *("combine", "combine_bwd"),
    *("swiglu", "swiglu_row", "swiglu_col"),
    *("swiglu_bwd", "swiglu_bwd_row", "swiglu_bwd_col", "swiglu_bwd_both"),
}
PRODUCTS = {
    *("grouped_mm_mx", "grouped_mm_bf16", "grouped_wgrad_mx", "grouped_wgrad_bf16"),
    *("grouped_mm_fold", "grouped_mm_fold_bias", "grouped_wgrad_fold", "grouped_wgrad_bf16_t"),
}
OPS_OF = {"cpp": BYTES, "triton": BYTES | PRODUCTS, "torch": BYTES | PRODUCTS, "jax": BYTES | PRODUCTS}


def test_the_backends_of_this_process() -> None:
    expected = {"triton"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cpp", "torch", "jax"}
    assert set(backends.NAMES) == expected


@pytest.mark.parametrize("name", backends.NAMES)
def test_a_backend_has_every_op(name: str) -> None:
    assert set(backends.ops(name)) == OPS_OF[name]


def test_every_op_is_in_the_table_and_in_the_oracle() -> None:
    modules = (
        *(quantize, permute, routing, fold, both_fold, scale_layout),
        *(fold_loss, combine, swiglu, grouped_gemm, folded_gemm),
    )
    ops = {op.name for module in modules for op in vars(module).values() if isinstance(op, KernelOp)}
    assert ops == BYTES | PRODUCTS
    assert ops <= set(DEFINITIONS)


def samples() -> dict[str, tuple[tuple[np.ndarray, ...], dict[str, int]]]:
    """One call of every op, with padding, slack and an empty group in it: what a kernel might leave out."""
    x, gemm, layout = QUANTIZE["normal"], GEMMS["empty_experts"], MAPS["fixed_capacity"]
    rows = routing_oracle.row_map(layout.flat, **layout.options)[0]
    packed = quantize_oracle.quantize_row_packed(x)[: layout.num_rows]
    lhs, rhs = quantize_oracle.quantize_row(gemm.lhs), quantize_oracle.quantize_row(gemm.rhs_t)
    lhs_t, dout_t = quantize_oracle.quantize_col(gemm.lhs), quantize_oracle.quantize_col(gemm.dout)
    ends = gemm.group_ends
    folded, folded_t = (*fold_oracle.fold_rows(*lhs), *fold_oracle.fold_rows(*rhs)), []
    for operand in (dout_t, lhs_t):
        folded_t += fold_oracle.fold_groups(*operand, ends)
    calls = {name: ((x,), {}) for name in BYTES if name.startswith("quantize")}
    calls |= {name: (GLUS["normal"].forward, {}) for name in BYTES if name.startswith("swiglu")}
    calls |= {name: (GLUS["normal"].backward, {}) for name in BYTES if name.startswith("swiglu_bwd")}
    return calls | {
        "dequantize": (quantize_oracle.quantize_row(x), {}),
        "permute_rows": ((x, rows), {}),
        "permute_mx": ((packed, rows), {}),
        "sort_by_expert": ((SORTS["empty_experts"][0],), {"num_experts": SORTS["empty_experts"][1]}),
        "row_map": ((layout.flat,), layout.options),
        "fold_rows": (lhs, {}),
        "block_scales": ((lhs[1], ends), {}),
        "unblock_scales": (
            (scale_layout_oracle.block_scales(lhs[1], ends), ends),
            {"num_rows": len(lhs[1]), "num_scales": lhs[1].shape[1]},
        ),
        "fold_groups": ((*lhs_t, ends), {}),
        "quantize_both_fold": ((gemm.lhs, ends), {}),
        "count_fold_loss": ((*lhs, np.full_like(lhs[1], 127)), {}),
        "combine": (COMBINES["padding"].inputs, {}),
        "combine_bwd": (COMBINES["padding"].bwd_inputs, {}),
        "grouped_mm_mx": ((*lhs, *rhs, ends), {}),
        "grouped_mm_bf16": ((gemm.lhs, gemm.rhs_t, ends), {}),
        "grouped_wgrad_mx": ((*dout_t, *lhs_t, ends), {}),
        "grouped_wgrad_bf16": ((gemm.dout, gemm.lhs, ends), {}),
        "grouped_wgrad_bf16_t": ((np.ascontiguousarray(gemm.dout.T), np.ascontiguousarray(gemm.lhs.T), ends), {}),
        "grouped_mm_fold": ((*folded, ends), {}),
        "grouped_mm_fold_bias": ((*folded, np.ones(folded[3].shape, np.float32), ends), {}),
        "grouped_wgrad_fold": ((*folded_t, ends), {}),
    }


@pytest.mark.parametrize(("name", "op"), [(name, op) for name in backends.POISONED for op in sorted(OPS_OF[name])])
def test_every_byte_of_every_output_is_written(name: str, op: str) -> None:
    """What was in the outputs before the call does not show: two poisons, the same bytes."""
    arrays, options = samples()[op]
    run = backends.ops(name)[op]
    check.same_bytes(run(*arrays, **options, poison=0x5A), run(*arrays, **options, poison=0xFF))
