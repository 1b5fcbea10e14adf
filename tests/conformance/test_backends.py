"""The ops of each adapter; and every byte of every output is written."""

import os
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.combine.cases import COMBINES
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.grouped_gemm.cases import GEMMS
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize.cases import MATRICES
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.routing.cases import MAPS, SORTS
from mxep.core_kernels.scale_layout import oracle as scale_layout_oracle
from mxep.core_kernels.swiglu.cases import GLUS

from ..cases import sample, sample_arrays
from . import backends, check
from .definitions import DEFINITIONS


def test_every_adapter_of_this_process_runs() -> None:
    expected = {"triton"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cpp", "torch", "jax"}
    assert set(backends.DEFAULT) == expected


def test_an_adapter_has_ops_of_the_suite(backend: str) -> None:
    """Ours have all of them; the C++ table has no products: the frameworks multiply on a CPU."""
    offered = set(backends.adapter(backend).OPS)
    assert offered <= backends.KERNEL_OPS.keys(), "no such op"
    if backend in backends.ADAPTERS:
        assert offered == backends.BYTES | (set() if backend == "cpp" else backends.PRODUCTS)


def test_every_op_has_a_definition() -> None:
    assert backends.KERNEL_OPS.keys() <= DEFINITIONS.keys()


def samples() -> dict[str, tuple[tuple[np.ndarray, ...], dict[str, int]]]:
    """One call of every op, with padding, slack and an empty group, whose bytes a kernel might leave unwritten."""
    x, gemm, layout = MATRICES["normal"], GEMMS["empty_experts"], MAPS["fixed_capacity"]
    rows = routing_oracle.row_map(layout.flat, **layout.options)[0]
    packed = quantize_oracle.quantize_row_packed(x)[: layout.num_rows]
    lhs, rhs = quantize_oracle.quantize_row(gemm.lhs), quantize_oracle.quantize_row(gemm.rhs_t)
    lhs_t, dout_t = quantize_oracle.quantize_col(gemm.lhs), quantize_oracle.quantize_col(gemm.dout)
    ends = gemm.group_ends
    folded, folded_t = (*fold_oracle.fold_rows(*lhs), *fold_oracle.fold_rows(*rhs)), []
    for operand in (dout_t, lhs_t):
        folded_t += fold_oracle.fold_groups(*operand, ends)
    calls = {name: (tuple(sample_arrays(op)), sample(op)[1]) for name, op in backends.KERNEL_OPS.items()}
    calls |= {name: ((x,), {}) for name in backends.BYTES if name.startswith("quantize")}
    calls |= {name: (GLUS["normal"].forward, {}) for name in backends.BYTES if name.startswith("swiglu")}
    calls |= {name: (GLUS["normal"].backward, {}) for name in backends.BYTES if name.startswith("swiglu_bwd")}
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
        "swiglu_bwd_fold": ((*GLUS["normal"].backward, np.int32([32, 32])), {}),
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


@pytest.mark.needs("POISONED")
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.needs(op)) for op in sorted(backends.KERNEL_OPS)])
def test_every_byte_of_every_output_is_written(ops: Mapping[str, Callable], op: str) -> None:
    """The result does not depend on the bytes of the outputs before the call: two poisons give the same bytes."""
    arrays, options = samples()[op]
    check.same_bytes(ops[op](*arrays, **options, poison=0x5A), ops[op](*arrays, **options, poison=0xFF))
