"""Group ends that break the contract. The kernels do not check them on a GPU; groups with a broken end become NaN.

tests/kernels/interpreter/test_triton_ends.py tests the same in Triton's interpreter. This file adds CUDA C++ and
several tiles.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from mxep.core_kernels.registry import OPS
from mxep.torch_frontend import force_implementation, ops
from torch import Tensor

from .cases import DEVICE, floats, same_bytes

TOKENS = 1440
UNALIGNED = {
    "an end inside a block": ([20, 64, 1440], [0, 1]),
    "two equal ends inside a block": ([33, 33, 320, 1440], [0, 1, 2]),
    "a group inside one block": ([65, 70, 96], [0, 1, 2]),
    "an end in a later span of 256 tokens": ([288, 564, 1248], [1, 2]),
}
OUT_OF_ORDER = {
    "an end before its begin": ([64, 32, 1440], [1]),
    "an end past the last token": ([0, 64, 1472], [2]),
    "a negative end": ([-32, 64], [0, 1]),
}
BROKEN = UNALIGNED | OUT_OF_ORDER
"""Group ends, and the groups that become NaN."""
implementations = pytest.mark.parametrize("implementation", ["cuda", "triton"])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sums_of_ones(ends: list[int], broken: list[int]) -> Tensor:
    """(G, 1, 1): the number of tokens of each group, NaN for broken groups."""
    sums = torch.diff(torch.tensor([0, *ends], dtype=torch.float32, device=DEVICE))
    sums[broken] = torch.nan
    return sums[:, None, None]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.expand_as(got).to(got.dtype), rtol=0, atol=0, equal_nan=True)


def scales(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@implementations
@pytest.mark.parametrize("name", BROKEN)
def test_folded_wgrad(name: str, implementation: str, out_dtype: str) -> None:
    ends, broken = BROKEN[name]
    lhs, rhs = (torch.full((n, TOKENS), 0x38, dtype=torch.uint8, device=DEVICE) for n in (712, 328))  # 1.0
    slots = TOKENS // 256 + len(ends)
    with force_implementation(implementation):
        operands = lhs, scales(slots, 712), rhs, scales(slots, 328)
        got = ops.grouped_wgrad_fold(*operands, ints(ends), out_dtype)
        pair = ops.grouped_wgrad_fold_pair(*operands, lhs, scales(slots, 712) + 1, ints(ends), out_dtype)
    for dw, factor in ((got, 1), (pair[0], 1), (pair[1], 2)):
        same(dw, sums_of_ones(ends, broken) * factor)


@pytest.mark.parametrize("name", BROKEN)
def test_exact_wgrad(name: str) -> None:
    ends, broken = BROKEN[name]
    lhs, rhs = (torch.full((n, TOKENS), 0x38, dtype=torch.uint8, device=DEVICE) for n in (200, 328))
    got = ops.grouped_wgrad_mx(lhs, scales(200, TOKENS // 32), rhs, scales(328, TOKENS // 32), ints(ends), "float32")
    same(got, sums_of_ones(ends, broken))


@implementations
@pytest.mark.parametrize("name", BROKEN)
def test_bf16_wgrad_takes_unaligned_ends(name: str, implementation: str) -> None:
    ends, broken = BROKEN[name]
    want = sums_of_ones(ends, broken if name in OUT_OF_ORDER else [])
    lhs, rhs = (torch.ones(TOKENS, n, dtype=torch.bfloat16, device=DEVICE) for n in (328, 808))
    with force_implementation(implementation):
        same(ops.grouped_wgrad_bf16(lhs, rhs, ints(ends), "float32"), want)
        same(ops.grouped_wgrad_bf16_t(lhs.T.contiguous(), rhs.T.contiguous(), ints(ends), "float32"), want)


@pytest.mark.parametrize("name", UNALIGNED)
def test_quantize_both_fold(name: str) -> None:
    """Results are bitwise equal to the ops that it combines. The scales of broken groups are NaN."""
    ends, broken = UNALIGNED[name]
    x = floats(np.random.default_rng(0), TOKENS, 288).to(DEVICE)
    with force_implementation("triton"):
        want = ops.quantize_both_fold(x, ints(ends))
    with force_implementation("cuda"):
        got = ops.quantize_both_fold(x, ints(ends))
    same_bytes(upto("quantize_both_fold", ends, got), upto("quantize_both_fold", ends, want))
    broken_scales_are_nan(got[3], ends, broken)


@pytest.mark.parametrize("name", UNALIGNED)
def test_swiglu_bwd_fold(name: str) -> None:
    """As quantize_both_fold, for the columns of dgate, dup and h."""
    ends, broken = UNALIGNED[name]
    rng = np.random.default_rng(0)
    arrays = *(floats(rng, TOKENS, 288).to(DEVICE) for _ in range(3)), torch.ones(0, device=DEVICE), ints(ends)
    with force_implementation("triton"):
        want = ops.swiglu_bwd_fold(*arrays)
    with force_implementation("cuda"):
        got = ops.swiglu_bwd_fold(*arrays)
    same_bytes(upto("swiglu_bwd_fold", ends, got), upto("swiglu_bwd_fold", ends, want))
    for span_sf in (got[3], got[7], got[9]):
        broken_scales_are_nan(span_sf, ends, broken)


@pytest.mark.parametrize("name", [*UNALIGNED, "an end past the last token"])
def test_fold_groups(name: str) -> None:
    """Results are bitwise equal to Triton. The scales of broken groups are NaN."""
    ends, broken = BROKEN[name]
    x = floats(np.random.default_rng(0), TOKENS, 72).to(DEVICE)
    operand = ops.quantize_col(x)
    with force_implementation("triton"):
        want = ops.fold_groups(*operand, ints(ends))
    with force_implementation("cuda"):
        got = ops.fold_groups(*operand, ints(ends))
    same_bytes(upto("fold_groups", ends, got), upto("fold_groups", ends, want))
    broken_scales_are_nan(got[1], ends, broken)


def upto(name: str, ends: list[int], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs up to the last block of the last group."""
    op = OPS[name]
    return op.specified([ints([ends[-1] // 32 * 32])] * len(op.inputs), outputs)


def broken_scales_are_nan(span_sf: Tensor, ends: list[int], broken: list[int]) -> None:
    """Broken groups have NaN scales alone, the others none."""
    for g, end in enumerate(ends):
        begin = ends[g - 1] if g else 0
        slots = span_sf[begin // 32 * 32 // 256 + g : end // 32 * 32 // 256 + g + 1]
        assert slots.eq(255).all() if g in broken else slots.ne(255).all()
