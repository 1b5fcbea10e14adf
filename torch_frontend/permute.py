"""Rows on their way between tokens and padded groups; every step is one gather, forward and backward.

    spread     x (T, D) ------order // top_k--> rows (T K, D), sorted by expert     backward: sum over K
    permute    rows (M, K) ---row_map---------> padded groups (P, K)                backward: inverse
    unpermute  groups (P, N) -inverse---------> rows (M, N)                         backward: row_map

MX rows stay MX, forward and backward; padding (-1 in a map) is zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from . import ops
from ._checks import (
    check_counts,
    check_flag,
    check_floats,
    check_int,
    check_way_back,
    index_map,
    reads_values,
    require_total,
)
from ._differentiable import differentiable
from .combine import sum_slots
from .mx_tensor import MXTensor, plain


class RowMaps(NamedTuple):
    """Where rows go: `row_map` (P,) gathers received rows into padded groups, `inverse` (M,) back;
    `padded_counts` and `group_ends` (local experts,) describe the groups. All int32."""

    row_map: Tensor
    inverse: Tensor
    padded_counts: Tensor
    group_ends: Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_map: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _gather(x, row_map)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grads[0], inverse), None, None


def _gather(x: Tensor, row_map: Tensor) -> Tensor:
    if isinstance(x, MXTensor):
        q, sf = ops.permute_q_sf(x.q, x.sf, row_map)
        return MXTensor(q, sf, x.orig_dtype)
    return ops.permute_rows(x.contiguous(), row_map)


gather = differentiable("gather_rows", _Gather)
"""`gather_rows` without its checks."""


def gather_rows(x: Tensor, row_map: Tensor, inverse: Tensor) -> Tensor:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    x: (M, K) bfloat16, float32 or MXTensor; row_map: (P,), inverse: (M,), the map back; both int32 or int64.
    An MXTensor comes out as one, and an MXTensor gradient goes in as one.

    >>> there, back = torch.tensor([1, -1, 0]), torch.tensor([2, 0])
    >>> gather_rows(torch.tensor([[1.0], [2.0]]), there, back).tolist()
    [[2.0], [0.0], [1.0]]

    Raises TypeError (dtypes) and ValueError (shapes, devices; on a CPU and within `debug_checks()` maps that lead to
    no row, and an inverse that is none).
    """
    op = "gather_rows"
    check_floats(op, "x", x)
    row_map = index_map(op, "row_map", row_map, x.device, x.shape[0], ("P",))
    inverse = index_map(op, "inverse", inverse, x.device, row_map.shape[0], (x.shape[0],))
    check_way_back(op, "row_map", row_map, "inverse", inverse)
    return gather(x, row_map, inverse)


class _Spread(torch.autograd.Function):
    """x (T, D) -> (P, D); backward adds up the copies in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return _gather(x, order // copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        dx = sum_slots(plain(grads[0]), inverse.view(-1, ctx.copies), grads[0].dtype)
        return dx, None, None, None


spread = differentiable("spread_rows", _Spread)
"""`spread_rows` without its checks."""


def spread_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Copy each token to its `copies` slots: out[i] = x[order[i] // copies], zeros where order is -1.

    x: (T, D) bfloat16, float32 or MXTensor, whose bytes are copied; order: (P,), the slot t * copies + c that each
    row of the result fills; inverse: (T * copies,), the way back; both int32 or int64. copies: at least 1. For `order`
    and `inverse` of `sort_by_expert` P is T * copies. The gradient of a token is the fp32 sum over its slots, rounded
    once.

    >>> spread_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0, 1, 3]), torch.tensor([1, 2, 0, 3]), 2).tolist()
    [[2.0], [1.0], [1.0], [2.0]]

    Raises TypeError and ValueError as `gather_rows` does.
    """
    return spread(x, *check_copies("spread_rows", x, order, inverse, copies), copies)


def check_copies(op: str, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """order and inverse as int32; raises unless they lay out `copies` copies of the rows of x."""
    check_floats(op, "x", x)
    check_int(op, "copies", copies, 1)
    slots = x.shape[0] * copies
    order = index_map(op, "order", order, x.device, slots, ("P",))
    inverse = index_map(op, "inverse", inverse, x.device, order.shape[0], (slots,))
    check_way_back(op, "order", order, "inverse", inverse)
    return order, inverse


def map_rows(op: str, x: Tensor, counts: Tensor, ep_degree: int, num_local_experts: int, alignment: int) -> RowMaps:
    """Check counts (ep_degree * num_local_experts,) of any integer dtype and plan the padded groups of x's rows."""
    check_counts(op, "num_tokens_per_expert", counts, x.device)
    if counts.shape != (ep_degree * num_local_experts,):
        allowed = f"allowed: ({ep_degree * num_local_experts},) = ep_degree * num_local_experts"
        fail(ValueError, op, "num_tokens_per_expert", f"shape {tuple(counts.shape)}", allowed)
    if reads_values(counts):
        require_total(op, "num_tokens_per_expert", counts, x.shape[0])
    counts = counts.to(torch.int32).contiguous()
    return RowMaps(*ops.row_map(counts, x.shape[0], num_local_experts, alignment))


def permute_mxfp8_fwd_hp_bwd(
    mx_tensor: Tensor,
    num_tokens_per_expert: Tensor,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    use_mxfp8: bool = True,
    use_triton_for_bwd: bool = True,
) -> tuple[torch.Size, Tensor, Tensor, Tensor, Tensor]:
    """Bring received rows, rank-major, into one padded group per local expert.

    mx_tensor: MXTensor (M, K), or bf16/fp32 rows. num_tokens_per_expert: (ep_degree * num_local_experts,),
    any integer dtype, on the rows' device. group_size_multiple_of: a positive multiple of 32; an empty
    expert still gets one aligned group. The last two arguments are torchao's, bools, and change nothing here.

    Returns (padded_shape, rows, permuted_indices, padded_counts, group_end_offsets): padded_shape =
    (M + 1, K); rows (P, K) like mx_tensor; permuted_indices (P,) int32, -1 for padding, which is zeros;
    padded_counts and group_end_offsets (num_local_experts,) int32. The gradient of the rows is bf16
    (or what it came as) and goes back to M rows. Raises ValueError and TypeError on counts that do not fit.
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    check_floats(op, "mx_tensor", mx_tensor)
    check_int(op, "ep_degree", ep_degree, 1)
    check_int(op, "num_local_experts", num_local_experts, 1)
    check_int(op, "group_size_multiple_of", group_size_multiple_of, BLOCK)
    if group_size_multiple_of % BLOCK:
        allowed = f"allowed: positive multiples of {BLOCK}"
        fail(ValueError, op, "group_size_multiple_of", group_size_multiple_of, allowed)
    check_flag(op, "use_mxfp8", use_mxfp8)
    check_flag(op, "use_triton_for_bwd", use_triton_for_bwd)
    maps = map_rows(op, mx_tensor, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of)
    rows = gather(mx_tensor, maps.row_map, maps.inverse)
    padded_shape = torch.Size((mx_tensor.shape[0] + 1, mx_tensor.shape[1]))
    return padded_shape, rows, maps.row_map, maps.padded_counts, maps.group_ends


def unpermute_hp_fwd_mxfp8_bwd(input: Tensor, permuted_indices: Tensor, padded_shape: Sequence[int]) -> Tensor:
    """Bring expert outputs back to the order in which the rows were received.

    input: (P, N) bfloat16 or float32; permuted_indices (P,) int32 or int64 and padded_shape (M + 1, K or N) as
    `permute_mxfp8_fwd_hp_bwd` returned them. Returns (M, N). The gradient is permuted as it comes:
    an MXTensor leaves as an MXTensor, without being dequantized. Raises ValueError on other shapes.
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    check_floats(op, "input", input)
    if not isinstance(padded_shape, tuple | list):
        fail(TypeError, op, "padded_shape", repr(padded_shape), "allowed: (rows + 1, dim)")
    if len(padded_shape) != 2:
        fail(ValueError, op, "padded_shape", tuple(padded_shape), "allowed: (rows + 1, dim)")
    for size, least in zip(padded_shape, (1, 0), strict=True):
        check_int(op, "padded_shape", size, least)
    rows = padded_shape[0] - 1
    shape = input.shape[:1]
    permuted_indices = index_map(op, "permuted_indices", permuted_indices, input.device, rows, shape)
    if reads_values(permuted_indices):
        used = permuted_indices[permuted_indices >= 0]
        if used.unique().numel() < used.numel():
            twice = f"{used.numel() - used.unique().numel()} indices that came before"
            fail(ValueError, op, "permuted_indices", twice, "allowed: each row of padded_shape once")
    # Padding rows all write the one slot behind the real ones, which is dropped.
    targets = torch.where(permuted_indices < 0, rows, permuted_indices).long()
    sources = torch.arange(input.shape[0], dtype=torch.int32, device=input.device)
    inverse = permuted_indices.new_full((rows + 1,), -1).scatter_(0, targets, sources)[:rows]
    return gather(input, inverse, permuted_indices)
