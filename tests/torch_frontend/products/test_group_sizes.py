"""The rows of groups as counts, group_sizes=, and counts that are given as ends by mistake."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxep.torch_frontend import (
    GroupedExperts,
    Recipe,
    dispatch,
    expert_parallel_ffn,
    grouped_mm,
    grouped_swiglu_ffn,
    quantize_weights,
)
from mxep.torch_frontend.integrations.convert import titan_forward
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_mm
from mxep.torch_frontend.products.groups import RowMap
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..inputs import ints, rows

SIZES, ENDS = (10, 0, 86), ints(10, 10, 96)
X, W = rows(96, 64), rows(3, 32, 64)
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "grouped_mm": lambda **groups: grouped_mm(X, W, **groups),
    "grouped_swiglu_ffn": lambda **groups: grouped_swiglu_ffn(X, W, W, W.mT.contiguous(), **groups),
}
each_product = pytest.mark.parametrize("name", PRODUCTS)


@pytest.fixture(autouse=True)
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@each_product
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_counts_in_place_of_ends(name: str, dtype: torch.dtype) -> None:
    product, sizes = PRODUCTS[name], torch.tensor(SIZES, dtype=dtype)
    want = product(group_ends=ENDS)
    assert torch.equal(product(group_sizes=sizes), want)
    torch._dynamo.reset()
    compiled = torch.compile(lambda sizes: product(group_sizes=sizes), fullgraph=True, backend="aot_eager")
    if dtype == torch.int64:
        assert torch.equal(compiled(sizes), want)


def test_quantized_weights_and_tensors_without_values() -> None:
    sizes = ints(*SIZES)
    want = grouped_mm(X, W, ENDS)
    assert torch.equal(grouped_mm(X, quantize_weights(W), group_sizes=sizes), want)
    with FakeTensorMode() as mode:
        x, w, sizes = (mode.from_tensor(t) for t in (X, W, sizes))
        assert grouped_mm(x, w, group_sizes=sizes).shape == (96, 32)
        assert grouped_mm(x, w, sizes).shape == (96, 32)


BAD = {
    "none": (ValueError, "group_ends, group_sizes: got none; allowed: one of them, the ends or the counts", {}),
    "both": (ValueError, "group_ends, group_sizes: got both", {"group_ends": ENDS, "group_sizes": ints(*SIZES)}),
    "a float": (TypeError, r"group_sizes: got dtype torch\.float32", {"group_sizes": torch.tensor([10.0, 0, 86])}),
    "a list": (TypeError, "group_sizes: got a list", {"group_sizes": [*SIZES]}),
    "too few": (ValueError, r"group_sizes: got shape \(2,\); allowed: \(3,\)", {"group_sizes": ints(10, 86)}),
    "too many rows": (ValueError, r"group_sizes: got \[10, 1, 86\], in total 97", {"group_sizes": ints(10, 1, 86)}),
    "negative": (ValueError, r"group_sizes: got \[-1, 0, 86\]", {"group_sizes": ints(-1, 0, 86)}),
    "elsewhere": (ValueError, "group_sizes: got device meta; allowed: cpu", {"group_sizes": ints(*SIZES).to("meta")}),
    "counts as ends": (ValueError, r"group_ends: got \[10, 0, 86\]; .*counts go to group_sizes=",
                       {"group_ends": ints(*SIZES)}),
}  # fmt: skip


@each_product
@pytest.mark.parametrize("case", BAD)
def test_bad_input(name: str, case: str) -> None:
    error, message, groups = BAD[case]
    with pytest.raises(error, match=f"{name}: {message}"):
        PRODUCTS[name](**groups)


@each_product
def test_counts_as_ends_are_warned_of_where_they_lose_most_rows(name: str) -> None:
    product = PRODUCTS[name]
    message = f"{name}: group_ends: the last end is 47 of 96 rows, and the rows past it give zeros; counts go to"
    with pytest.warns(UserWarning, match=message) as found:
        product(group_ends=ints(20, 29, 47))
    assert found[0].filename == __file__
    product(group_ends=ints(20, 29, 48))  # half of the rows
    product(group_sizes=ints(10, 0, 2))


def test_ends_of_a_layer_and_of_a_map_are_not_warned_of() -> None:
    """A padded buffer has more rows than its groups."""
    counts, padded = ints(1, 0, 0), ints(32, 32, 32)
    groups, padded, route = dispatch(X[:1], counts, recipe="bf16")
    assert isinstance(route.row_map, RowMap)
    for layout in (route, route.row_map):
        grouped_mm(groups, W, layout)
    expert_parallel_mm(X[:1], W, counts)
    expert_parallel_ffn(X[:1], counts, W, W, W.mT.contiguous())
    experts = GroupedExperts(64, 32, 3)
    experts(X, padded * 0)
    titan = torch.nn.Module()
    for name, w in (("w1", W), ("w2", W.mT.contiguous()), ("w3", W)):
        setattr(titan, name, torch.nn.Parameter(w))
    titan_forward(titan, X, counts, recipe=Recipe.parse("bf16"))
