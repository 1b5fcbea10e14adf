"""Two folded products with one operand in common: the bytes of the same products one by one."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.grouped_gemm.cases import GEMMS, M_GROUPED
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded

from .. import check
from .test_grouped_gemm_folded import by_group, by_row

Ops = Mapping[str, Callable]
pytestmark = [pytest.mark.needs("grouped_mm_fold_pair", "grouped_wgrad_fold_pair"), pytest.mark.composed]
ENDS = ("empty_experts", "rows_past_the_end", "nan_and_inf_in_one_row", "no_rows")


@pytest.mark.parametrize("name", [*ENDS, "ragged_tiles"])
def test_two_weights(ops: Ops, name: str) -> None:
    case, ends = M_GROUPED[name], M_GROUPED[name].group_ends
    second = seeded(f"pair {name}").standard_normal(case.rhs_t.shape).astype(BF16)
    rows, weights = by_row(case.lhs), (by_row(case.rhs_t), by_row(second))
    got = ops["grouped_mm_fold_pair"](*rows, *weights[0], *weights[1], ends)
    check.same_bytes(got, [ops["grouped_mm_fold"](*rows, *w, ends) for w in weights])


@pytest.mark.parametrize("name", [*ENDS, "wide"])
def test_two_gradients(ops: Ops, name: str) -> None:
    case, ends = GEMMS[name], GEMMS[name].group_ends
    second = seeded(f"pair {name}").standard_normal(case.dout.shape).astype(BF16)
    tokens, gradients = by_group(case.lhs, ends), (by_group(case.dout, ends), by_group(second, ends))
    got = ops["grouped_wgrad_fold_pair"](*gradients[0], *tokens, *gradients[1], ends)
    check.same_bytes(got, [ops["grouped_wgrad_fold"](*dout, *tokens, ends) for dout in gradients])


def test_each_output_has_its_own_scales(ops: Ops) -> None:
    """GEMMs of ones, whose scales differ; the scales of the second gradient rise from span to span."""
    ends, ones = np.int32([512]), np.full((8, 512), 0x38, np.uint8)
    plain, rising = np.full((3, 8), 127, np.uint8), np.repeat(np.uint8([[128], [130], [0]]), 8, axis=1)
    got = ops["grouped_wgrad_fold_pair"](ones, plain, ones, plain, ones, rising, ends, out_dtype="float32")
    check.same_bytes(got, [np.full((1, 8, 8), total, np.float32) for total in (512, 256 * (2 + 8))])
    rows, w, ends = (ones[:, :32], np.full(8, 127, np.uint8)), ones[None, :, :32], np.int32([8])
    weights = w, plain[:1], w, rising[:1]
    got = ops["grouped_mm_fold_pair"](*rows, *weights, ends, out_dtype="float32")
    check.same_bytes(got, oracle_folded.grouped_mm_fold_pair(*rows, *weights, ends, "float32"))
    check.same_bytes(got, [np.full((8, 8), total, np.float32) for total in (32, 64)])
