"""Products of rows with many groups, most of them empty: a warp of the Hopper kernels looks at 32 groups at a time."""

import pytest
import torch
from mxep.torch_frontend import ops
from torch import Tensor

from .cases import DEVICE, same_bytes

GROUPS, N, K = 600, 384, 256
PRODUCTS = ["fold", "fold_bias", "fold_pair", "fold_sum", "blockwise", "bf16", "bf16_kn"]


def operands(rows: int) -> dict[str, tuple[Tensor, ...]]:
    """The inputs of each product without the ends."""
    rng = torch.Generator(DEVICE).manual_seed(0)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 120, shape, generator=rng, device=DEVICE, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(120, 130, shape, generator=rng, device=DEVICE, dtype=torch.uint8)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=DEVICE)

    first, second = ((codes(rows, K), scales(rows), codes(GROUPS, N, K), scales(GROUPS, N)) for _ in range(2))
    x, w = values(rows, K).bfloat16(), values(GROUPS, N, K).bfloat16()
    return {
        "fold": first,
        "fold_bias": (*first, values(GROUPS, N)),
        "fold_pair": (*first, *second[2:]),
        "fold_sum": (*first, *second),
        "blockwise": (first[0], values(rows, K // 128), first[2], values(GROUPS, N // 128, K // 128)),
        "bf16": (x, w),
        "bf16_kn": (x, w.mT.contiguous()),
    }


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("rows", [1, 40, 900])
def test_empty_groups_change_no_byte(product: str, rows: int) -> None:
    group = torch.randint(0, GROUPS, (rows,), generator=torch.Generator().manual_seed(rows)) // 2 * 2
    counts = torch.bincount(group, minlength=GROUPS)
    ends, used = counts.cumsum(0).int().to(DEVICE), counts.nonzero()[:, 0].to(DEVICE)
    inputs, op = operands(rows)[product], getattr(ops, f"grouped_mm_{product}")
    of_used = [array[used] if array.shape[0] == GROUPS else array for array in inputs]
    same_bytes(op(*inputs, ends), op(*of_used, ends[used]))
