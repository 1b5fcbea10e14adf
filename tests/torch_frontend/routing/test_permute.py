"""Permute, un-permute and spread: what lands where, and that every backward is the adjoint of its forward."""

import pytest
import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import (
    MXTensor,
    TokenReplicas,
    combine,
    dispatch,
    gather_rows,
    grouped_mm,
    grouped_swiglu_ffn,
    ops,
    sort_by_expert,
    weighted_combine,
)
from mxep.torch_frontend.integrations.torchao import permute_mxfp8_fwd_hp_bwd, unpermute_hp_fwd_mxfp8_bwd
from mxep.torch_frontend.products.gathered_rows import GatheredRows
from mxep.torch_frontend.routing.permute import spread_rows
from torch import Tensor

# Two ranks, three local experts, the second of which nobody chose.
COUNTS, ROWS, K = (2, 0, 3, 40, 0, 1), 46, 64
GROUPS = ([0, 1, *range(5, 45)], [], [2, 3, 4, 45])  # received rows of each expert, rank by rank


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def permute(x: Tensor, dtype: torch.dtype = torch.int64, alignment: int = 32):
    return permute_mxfp8_fwd_hp_bwd(x, torch.tensor(COUNTS, dtype=dtype), 2, 3, alignment)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_every_integer_dtype_of_counts(dtype: torch.dtype) -> None:
    padded_shape, rows, indices, counts, ends = permute(randn(ROWS, K), dtype)
    assert padded_shape == (ROWS + 1, K)
    assert counts.tolist() == [64, 32, 32]
    assert ends.tolist() == [64, 96, 128]
    assert {indices.dtype, counts.dtype, ends.dtype} == {torch.int32}
    assert rows.shape[0] == indices.shape[0]


@pytest.mark.parametrize("alignment", [32, 128])
@pytest.mark.parametrize("kind", ["bf16", "float32", "mx", "mx packed"])
def test_rows_land_in_their_padded_groups(alignment: int, kind: str) -> None:
    x = randn(ROWS, K)
    packed = ops.quantize_row_packed(x)
    given = {
        "bf16": lambda: x,
        "float32": x.float,
        "mx": lambda: MXTensor.quantize(x),
        "mx packed": lambda: MXTensor(packed[:, :K], packed[:, K:]),
    }[kind]()
    _, rows, indices, counts, ends = permute(given, alignment=alignment)
    assert rows.dtype == given.dtype
    source, result = (v.dequantize() if isinstance(v, MXTensor) else v for v in (given, rows))
    for group, count, end in zip(GROUPS, counts.tolist(), ends.tolist(), strict=True):
        start = end - count
        assert indices[start:end].tolist() == group + [-1] * (count - len(group))
        assert torch.equal(result[start : start + len(group)], source[group])
        assert (result[start + len(group) : end] == 0).all()
    if isinstance(rows, MXTensor):
        assert (rows.q[indices < 0] == 0).all()
        assert (rows.sf[indices < 0] == 0).all()


def test_the_gradient_of_mx_rows_is_wide_and_whole() -> None:
    x = randn(ROWS, K).requires_grad_()
    _, rows, indices, _, _ = permute(MXTensor.quantize(x))
    grad = randn(*rows.shape, seed=1)
    (dx,) = torch.autograd.grad(rows, x, grad)
    want = torch.zeros(ROWS, K).bfloat16()
    want[indices[indices >= 0].long()] = grad[indices >= 0]
    assert torch.equal(dx, want)


def test_mx_gradients_are_permuted_as_bytes() -> None:
    padded_shape, rows, indices, _, _ = permute(randn(ROWS, K))
    groups = randn(rows.shape[0], 96).requires_grad_()
    grad = MXTensor.quantize(randn(ROWS, 96, seed=1))
    (dgroups,) = torch.autograd.grad(unpermute_hp_fwd_mxfp8_bwd(groups, indices, padded_shape), groups, grad)
    assert isinstance(dgroups, MXTensor)
    assert torch.equal(dgroups.q, ops.permute_rows(grad.q, indices))
    assert torch.equal(dgroups.sf, ops.permute_rows(grad.sf, indices))


def test_spread_copies_and_adds_up() -> None:
    experts = torch.tensor([2, 0, 1, 2, 0, 1], dtype=torch.int32)  # three tokens, two experts each
    order, inverse, _ = ops.sort_by_expert(experts, 3)
    x = randn(3, K).requires_grad_()
    rows = spread_rows(x, order, inverse, 2)
    assert torch.equal(rows, x[torch.tensor([0, 2, 1, 2, 0, 1])])
    grad = randn(6, K, seed=1)
    (dx,) = torch.autograd.grad(rows, x, grad)
    assert torch.equal(
        dx, torch.stack([grad[0].float() + grad[4], grad[2].float() + grad[5], grad[1].float() + grad[3]]).bfloat16()
    )


@pytest.mark.parametrize("mx", [False, True])
def test_copies_may_lie_in_padded_groups(mx: bool) -> None:
    x, grad = randn(3, K).requires_grad_(), randn(8, K, seed=1)
    order = torch.tensor([4, -1, 0, 2, -1, 5, 1, 3], dtype=torch.int32)
    inverse = torch.tensor([2, 6, 3, 7, 0, 5], dtype=torch.int32)
    values = MXTensor.quantize(x) if mx else x
    rows = spread_rows(values, order, inverse, 2)
    if mx:
        assert isinstance(rows, MXTensor)
        rows, values = rows.dequantize(), values.dequantize()
    assert torch.equal(rows, torch.where((order < 0)[:, None], 0, values[order // 2]))
    (dx,) = torch.autograd.grad(rows, x, grad)
    assert torch.equal(dx, grad.float()[inverse].view(3, 2, K).sum(1).bfloat16())


X = randn(ROWS, K)
BAD = {
    "float counts": (TypeError, r"dtype torch.float32; allowed: int32", (X, torch.ones(6), 2, 3)),
    "length": (ValueError, r"shape \(5,\); allowed: \(6,\)", (X, torch.tensor(COUNTS[:5]), 2, 3)),
    "total": (ValueError, r"in total 45; .* a total of 46", (X, torch.tensor([1, *COUNTS[1:]]), 2, 3)),
    "negative": (ValueError, r"-1, .*allowed: counts of at least 0", (X, torch.tensor([3, -1, *COUNTS[2:]]), 2, 3)),
    "elsewhere": (ValueError, r"device meta; allowed: cpu", (X, torch.tensor(COUNTS).to("meta"), 2, 3)),
    "alignment": (ValueError, r"multiple_of: got 48; allowed: positive", (X, torch.tensor(COUNTS), 2, 3, 48)),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_to_permute(name: str) -> None:
    error, message, args = BAD[name]
    with pytest.raises(error, match=message):
        permute_mxfp8_fwd_hp_bwd(*args)


def test_bad_input_to_unpermute() -> None:
    indices = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"padded_shape: got \(3,\); allowed: \(rows \+ 1, dim\)"):
        unpermute_hp_fwd_mxfp8_bwd(X[:8], indices, (3,))
    with pytest.raises(ValueError, match=r"permuted_indices: got shape \(8,\); allowed: \(46,\)"):
        unpermute_hp_fwd_mxfp8_bwd(X, indices, (3, K))


def test_whole_graph() -> None:
    torch._dynamo.reset()

    def there_and_back(x: Tensor, counts: Tensor) -> Tensor:
        padded_shape, rows, indices, _, _ = permute_mxfp8_fwd_hp_bwd(MXTensor.quantize(x), counts, 2, 3)
        return unpermute_hp_fwd_mxfp8_bwd(rows.dequantize(), indices, padded_shape)

    x, counts, grad = X.clone().requires_grad_(), torch.tensor(COUNTS), randn(ROWS, K, seed=1)
    got = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x, counts)
    assert torch.equal(got, MXTensor.quantize(X).dequantize())
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], grad)


def test_un_permute_checks_the_indices() -> None:
    _, rows, indices, *_ = permute(randn(ROWS, K))
    with pytest.raises(TypeError, match=r"permuted_indices: got dtype torch\.int16"):
        unpermute_hp_fwd_mxfp8_bwd(rows, indices.short(), (ROWS + 1, K))
    with pytest.raises(ValueError, match=r"permuted_indices: got -1 to 45; allowed: -1 \(none\) or an index below 40"):
        unpermute_hp_fwd_mxfp8_bwd(rows, indices, (41, K))
    with pytest.raises(TypeError, match="input: got a list"):
        unpermute_hp_fwd_mxfp8_bwd([1], indices, (ROWS + 1, K))


def test_maps_may_be_int64() -> None:
    """What `cumsum` and advanced indexing give, forward and backward."""
    x, order, inverse = (
        randn(3, K).requires_grad_(),
        torch.tensor([4, -1, 0, 2, 5, 1, 3]),
        torch.tensor([2, 5, 3, 6, 0, 4]),
    )
    probs = torch.rand(3, 2).requires_grad_()
    results = []
    for dtype in (torch.int32, torch.int64):
        there, back = order.to(dtype), inverse.to(dtype)
        rows = spread_rows(x, there, back, 2)
        kept = gather_rows(rows, back, there)
        rows = unpermute_hp_fwd_mxfp8_bwd(kept, back, (rows.shape[0] + 1, K))
        y = weighted_combine(rows, probs, back.view(3, 2), there)
        results.append([y, *torch.autograd.grad(y, (x, probs), randn(3, K, seed=1))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_map_that_is_not_the_way_back() -> None:
    there, back = torch.tensor([2, -1, 0, 1]), torch.tensor([2, 3, 0])
    gather_rows(randn(3, K), there, back)
    for wrong in ([2, 3, 1], [3, 2, 0], [2, 3, -1]):
        with pytest.raises(ValueError, match=r"gather_rows: (inverse|row_map): got -?\d at \d; allowed: \d, since"):
            gather_rows(randn(3, K), there, torch.tensor(wrong))
    with pytest.raises(ValueError, match="permuted_indices: got 1 repeated indices"):
        unpermute_hp_fwd_mxfp8_bwd(randn(4, K), torch.tensor([2, -1, 0, 2]), (4, K))


def test_the_rows_bring_their_group_ends() -> None:
    """A Route or a RowMap stands for its group ends, and only for rows that it laid out."""
    order, inverse, counts = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), 3)
    groups, _, laid = dispatch(TokenReplicas(torch.ones(2, 32), order, inverse, 2), counts)
    w = torch.ones(3, 32, 32)
    for product in (grouped_mm, lambda x, w, ends: grouped_swiglu_ffn(x, w, w, w, ends)):
        want = product(groups, w, laid.group_ends)
        for ends in (laid, laid.row_map):
            assert torch.equal(product(groups, w, ends), want)
        with pytest.raises(ValueError, match=r"group_ends: got ends of 128 rows; allowed: the RowMap or Route"):
            product(groups.dequantize()[:64], w, laid)


@pytest.mark.parametrize("shape", [(), (1, 2, 2)])
def test_ids_are_of_slots_or_of_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"sort_by_expert: expert_ids: got shape \(.*\); allowed: \(T, top_k\) or \(S,\)"
    ):
        sort_by_expert(torch.zeros(shape, dtype=torch.int64), 2)


def test_ids_that_int32_does_not_hold_are_wrong() -> None:
    for wrong in (2**32, -(2**32)):
        with pytest.raises(ValueError, match="sort_by_expert: expert_ids"):
            sort_by_expert(torch.tensor([[0, wrong]]), 2)


def test_rows_of_a_folded_recipe_stay_packed() -> None:
    """Dispatch, and the gradient of combine, leave the gather to the products; the bytes are equal to stored rows'."""
    folded, (t, e, top_k) = Recipe.parse("mxfp8", compute="fold"), (50, 4, 2)
    experts = torch.randint(0, e, (t, top_k), generator=torch.Generator().manual_seed(0))
    order, inverse, counts = sort_by_expert(experts, e)
    x, weights = randn(t, K).requires_grad_(), [randn(e, K, K, seed=s).requires_grad_() for s in (1, 2, 3)]
    leaves, arrived, results = [x, *weights], [], []
    for stored in (False, True):
        groups, _, route = dispatch(TokenReplicas(x, order, inverse, top_k), counts, recipe=folded)
        assert isinstance(groups, GatheredRows)
        rows = _Stored.apply(groups) if stored else groups
        out = grouped_swiglu_ffn(rows, *weights, route, recipe=folded, pad_token_groups=False)
        out.register_hook(arrived.append)
        y = combine(out, route)
        results.append([y, *torch.autograd.grad(y, leaves, randn(t, K, seed=4))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert {type(grad) for grad in arrived} == {GatheredRows}
    exact, _, _ = dispatch(TokenReplicas(x, order, inverse, top_k), counts, recipe="mxfp8")
    assert type(exact) is MXTensor
    for same in (groups, groups.detach(), groups.clone(), groups.to(torch.float32), groups.cpu()):
        assert isinstance(same, GatheredRows)
        assert torch.equal(same.q, exact.q)
        assert torch.equal(same.sf, exact.sf)
    assert torch.equal(groups.dequantize(), exact.dequantize())


class _Stored(torch.autograd.Function):
    """The rows as an MXTensor with q and sf of its own."""

    @staticmethod
    def forward(ctx, rows: MXTensor) -> MXTensor:
        return MXTensor(rows.q, rows.sf, rows.orig_dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0]
