"""Group ends that break the contract, which nobody looks at on a GPU: NaN for the groups beside them, as
tests/kernels/test_triton_ends.py has it in Triton's interpreter. Here in CUDA C++ too, on more tiles than one."""

import pytest
import torch
from mxep.torch_frontend import force_implementation, ops
from torch import Tensor

from .cases import DEVICE, floats, same_bytes

TOKENS = 1440
NO_MULTIPLES = {
    "both sides": ([20, 64, 1440], [0, 1]),
    "one after the other": ([33, 33, 320, 1440], [0, 1, 2]),
    "within one block": ([65, 70, 96], [0, 1, 2]),
    "a later span": ([288, 564, 1248], [1, 2]),
}
OUT_OF_ORDER = {
    "before it begins": ([64, 32, 1440], [1]),
    "beyond all tokens": ([0, 64, 1472], [2]),
    "below zero": ([-32, 64], [0, 1]),
}
BROKEN = NO_MULTIPLES | OUT_OF_ORDER
"""Ends, and the groups that are not whole."""
implementations = pytest.mark.parametrize("implementation", ["cuda", "triton"])


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sums_of_ones(ends: list[int], broken: list[int]) -> Tensor:
    """(G, 1, 1): as many ones as a group has tokens."""
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
def test_the_folded_product(name: str, implementation: str, out_dtype: str) -> None:
    ends, broken = BROKEN[name]
    lhs, rhs = (torch.full((n, TOKENS), 0x38, dtype=torch.uint8, device=DEVICE) for n in (712, 328))  # 1.0
    slots = TOKENS // 256 + len(ends)
    with force_implementation(implementation):
        got = ops.grouped_wgrad_fold(lhs, scales(slots, 712), rhs, scales(slots, 328), ints(ends), out_dtype)
    same(got, sums_of_ones(ends, broken))


@pytest.mark.parametrize("name", BROKEN)
def test_the_exact_product(name: str) -> None:
    ends, broken = BROKEN[name]
    lhs, rhs = (torch.full((n, TOKENS), 0x38, dtype=torch.uint8, device=DEVICE) for n in (200, 328))
    got = ops.grouped_wgrad_mx(lhs, scales(200, TOKENS // 32), rhs, scales(328, TOKENS // 32), ints(ends), "float32")
    same(got, sums_of_ones(ends, broken))


@implementations
@pytest.mark.parametrize("name", BROKEN)
def test_products_of_bf16_take_any_ends_in_order(name: str, implementation: str) -> None:
    ends, broken = BROKEN[name]
    want = sums_of_ones(ends, broken if name in OUT_OF_ORDER else [])
    lhs, rhs = (torch.ones(TOKENS, n, dtype=torch.bfloat16, device=DEVICE) for n in (328, 808))
    with force_implementation(implementation):
        same(ops.grouped_wgrad_bf16(lhs, rhs, ints(ends), "float32"), want)
        same(ops.grouped_wgrad_bf16_t(lhs.T.contiguous(), rhs.T.contiguous(), ints(ends), "float32"), want)


@pytest.mark.parametrize("name", NO_MULTIPLES)
def test_both_folded_operands(name: str) -> None:
    """Every byte that its parts write, and scales that are NaN where a group is not whole."""
    ends, broken = NO_MULTIPLES[name]
    x = floats(torch.Generator().manual_seed(0), TOKENS, 288).to(DEVICE)
    with force_implementation("triton"):
        parts = ops.quantize_both_fold(x, ints(ends))
    with force_implementation("cuda"):
        got = ops.quantize_both_fold(x, ints(ends))
    same_bytes(got, parts)
    for g, end in enumerate(ends):
        begin = ends[g - 1] if g else 0
        slots = got[3][begin // 32 * 32 // 256 + g : end // 32 * 32 // 256 + g + 1]
        assert slots.eq(255).all() if g in broken else slots.ne(255).all()
