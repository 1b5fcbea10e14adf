"""A token goes once to each rank that has one of its experts: the copies of its row, and its replicas there.

    tokens (T, K) --copy per rank--> copies (U, K) ==wire==> copies (R, K) --replica per expert--> groups (P, K)
    tokens (T, N) <--sum over ranks-- (U, N) <==wire== (R, N) <--sum over a rank's replicas-- groups (P, N)     summed
    tokens (T, N) <--sum over replicas-- (S, N) <==wire== (M, N) <------------ gather ------------ groups (P, N)   once

Both steps to the right are gathers. A row is sent with 4 bytes per replica: the slot of the replica in its copy,
`copy * top_k + k`, in the order of the replicas. So the receiver has the replicas of its copies in the form of
`TokenReplicas`. The padded groups are the same as with replicas sent one by one.

"dispatch": forward and backward return replicas, and every byte is the same as with replicas sent one by one. "both":
sums are fp32, of a rank's replicas with k ascending, rounded to the dtype of the rows, sent, and added with ranks
ascending.

T tokens, S = T top_k replicas, U copies of this rank; R copies and M replicas received; P rows of padded groups.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.policy.recipe import Recipe
from ..ops import direct as ops
from ..ops.differentiable import differentiable
from ..ops.mx_tensor import MXTensor, dequantized
from ..products.groups import RowMap
from ..routing.permute import gather
from ..routing.weighted_combine import combine_slots, sum_slots
from .all_to_all import TokenReplicas, all_to_all, exchange_rows, packed_rows
from .process_groups import Splits


class Layout(NamedTuple):
    """The copies of a rank's tokens before their number is known to the host.

    counts (ranks,) int32: copies for each rank. rows (ranks, T) int32: the row of each copy, rank-major, tokens
    ascending; -1 of none. slots (S,) int32: of each replica, the slot in its copy among the copies for its rank; -1
    of none.
    """

    counts: Tensor
    rows: Tensor
    slots: Tensor


def lay_out(tokens: TokenReplicas, counts: Tensor, ranks: int) -> Layout:
    """The layout of tokens with int32 maps. counts (E,): of replicas per expert; wrong ones give a wrong layout, no
    error."""
    x, order, _, top_k = tokens
    device, tops = order.device, x.shape[0] * ranks
    ends = counts.reshape(ranks, -1).sum(1, dtype=torch.int64).cumsum(0)
    replica = torch.arange(order.shape[0], device=device)
    rank = torch.searchsorted(ends, replica, right=True).clamp_max(ranks - 1)
    # The last position takes the replicas of no token.
    position = torch.where(order < 0, tops, rank * x.shape[0] + order // top_k)
    hit = torch.zeros(tops + 1, dtype=torch.bool, device=device)
    hit[position] = True
    row = hit.cumsum(0, dtype=torch.int32) - 1
    of_rank = hit[:-1].view(ranks, -1).sum(1, dtype=torch.int32)
    first = of_rank.cumsum(0, dtype=torch.int32) - of_rank
    slots = (row[position] - first[rank]) * top_k + order % top_k
    rows = torch.where(hit, row, -1)[:-1].view(ranks, -1)
    return Layout(of_rank, rows, torch.where(order < 0, -1, slots).to(torch.int32))


class Copies(NamedTuple):
    """Maps between tokens, copies and padded groups; all int32.

    order (U,), inverse (T * width,): as `TokenReplicas`, of the copies of a token, ranks ascending; width: the most
    ranks of a token. replica_order (M,), replica_slots (R * top_k,): the same of the replicas of a copy received, in
    the order of arrival. group_order (P,), group_slots (R, top_k): the same in the padded groups. -1 is none.
    output_splits, input_splits: copies per rank, received and sent. summed: whether a rank's replicas return as a sum.
    """

    order: Tensor
    inverse: Tensor
    width: int
    replica_order: Tensor
    replica_slots: Tensor
    group_order: Tensor
    group_slots: Tensor
    output_splits: list[int]
    input_splits: list[int]
    summed: bool


@torch.compiler.allow_in_graph  # Dynamo cannot look up a group
def exchange_slots(slots: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> Tensor:
    """(M,) the slots of the replicas received. The splits are of replicas."""
    return all_to_all(slots[:, None], output_splits, input_splits, group_name)[:, 0]


def map_copies(
    layout: Layout, slots: Tensor, replicas: Tensor, copies: Tensor, row_map: RowMap, top_k: int,
    output_splits: list[int], input_splits: list[int], summed: bool,
) -> Copies:  # fmt: skip
    """The maps. slots: of `exchange_slots`. replicas, copies (ranks,): received from each rank. The splits are of
    copies."""
    ranks, tokens = layout.rows.shape
    sent, received, width = sum(input_splits), sum(output_splits), min(top_k, ranks)
    hit, token = layout.rows >= 0, torch.arange(tokens, device=slots.device)
    slot = token * width + hit.cumsum(0, dtype=torch.int32) - 1
    order = _scatter(sent, torch.where(hit, layout.rows, sent), slot)
    inverse = _scatter(tokens * width, torch.where(hit, slot, tokens * width), layout.rows)
    first = (copies.cumsum(0) - copies) * top_k
    first = torch.repeat_interleave(first, replicas.long(), output_size=slots.shape[0])
    replica_order = torch.where(slots < 0, -1, slots + first).to(torch.int32)
    num_slots, arrival = received * top_k, torch.arange(slots.shape[0], device=slots.device)
    replica_slots = _scatter(num_slots, torch.where(slots < 0, num_slots, replica_order), arrival)
    # A padding row, and a slot without a replica, picks the -1 at the end.
    group_order, group_slots = _followed(replica_order, row_map.row_map), _followed(row_map.inverse, replica_slots)
    group_slots = group_slots.view(-1, top_k)
    return Copies(
        order, inverse, width, replica_order, replica_slots, group_order, group_slots, output_splits, input_splits,
        summed,
    )  # fmt: skip


def _scatter(size: int, positions: Tensor, values: Tensor) -> Tensor:
    """(size,) int32: the value of each position, -1 without one. Values at the position `size` are dropped."""
    out = torch.full((size + 1,), -1, dtype=torch.int32, device=values.device)
    out[positions.reshape(-1)] = values.reshape(-1).to(torch.int32)
    return out[:size]


def _followed(map: Tensor, by: Tensor) -> Tensor:
    """map[by], -1 where `by` is -1."""
    return torch.cat([map, map.new_full((1,), -1)])[by]


def exchange_sums(
    groups: Tensor, probs: Tensor | None, copies: Copies, recipe: Recipe, group_name: str, out_dtype: torch.dtype
) -> Tensor:
    """(T, N): the sums over a rank's replicas, weighted by probs (R, top_k), sent back and added; differentiable."""
    rounding, mx = int(recipe.rounding), recipe.sends_mx("combine")
    mx_grad = recipe.sends_mx("combine_grad")
    of_gradient = rounding if mx_grad else None
    sums = combine_slots(groups, probs, copies.group_slots, copies.group_order, groups.dtype, of_gradient)
    sums = exchange_rows(sums, copies.input_splits, copies.output_splits, group_name, mx, mx_grad, rounding)
    sums = sums.dequantize() if mx else sums
    return combine_slots(sums, None, copies.inverse.view(-1, copies.width), copies.order, out_dtype, None)


def probs_of_copies(probs: Tensor, copies: Copies) -> Tensor:
    """probs (M, 1) of the replicas received -> (R, top_k), zeros for slots without a replica; differentiable."""
    return gather(probs, copies.replica_slots, copies.replica_order).view(copies.group_slots.shape)


class DedupSplits(NamedTuple):
    """Rows of each rank: of copies sent to the experts, and of replicas sent back."""

    copies_received: list[int]
    copies_sent: list[int]
    replicas_received: list[int]
    replicas_sent: list[int]


class DedupPlan(NamedTuple):
    """Between tokens and groups, with copies on the way there and replicas on the way back.

    token (U,): of each copy. copy (P,): of each row of the groups. inverse (M,): the row of each replica. slots
    (T, top_k): the replicas of each token.
    """

    token: Tensor
    copy: Tensor
    inverse: Tensor
    slots: Tensor
    splits: DedupSplits
    group_name: str

    def save(self, ctx: Any) -> None:
        ctx.save_for_backward(self.token, self.copy, self.inverse, self.slots)
        ctx.splits, ctx.group_name = self.splits, self.group_name

    @classmethod
    def saved_by(cls, ctx: Any) -> "DedupPlan":
        token, copy, inverse, slots = ctx.saved_tensors
        return cls(token, copy, inverse, slots, ctx.splits, ctx.group_name)


def _dispatch(x: Tensor, dedup: DedupPlan, mx: bool, rounding: int) -> Tensor:
    x, received, sent = x.contiguous(), dedup.splits.copies_received, dedup.splits.copies_sent
    if not mx:
        rows = all_to_all(ops.permute_rows(x, dedup.token), received, sent, dedup.group_name)
        return ops.permute_rows(rows, dedup.copy)
    rows = ops.permute_rows(ops.quantize_row_packed(x, rounding), dedup.token)
    q, sf = ops.permute_mx(all_to_all(rows, received, sent, dedup.group_name), dedup.copy)
    return MXTensor(q, sf, x.dtype)


def _combine(groups: Tensor, dedup: DedupPlan, mx: bool, rounding: int, dtype: torch.dtype) -> Tensor:
    rows = ops.permute_rows(dequantized(groups).contiguous(), dedup.inverse)
    received, sent = dedup.splits.replicas_received, dedup.splits.replicas_sent
    if mx:
        rows = packed_rows(rows, received, sent, dedup.group_name, rounding)
    else:
        rows = all_to_all(rows, received, sent, dedup.group_name)
    return sum_slots(dequantized(rows), dedup.slots, dtype)


class _SendOnce(torch.autograd.Function):
    """Tokens to groups: one copy per rank there, the gradients of all replicas back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dedup: DedupPlan, mx: bool, mx_grad: bool, rounding: int) -> Tensor:
        dedup.save(ctx)
        ctx.mx_grad, ctx.rounding = mx_grad, rounding
        return _dispatch(x, dedup, mx, rounding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dedup = DedupPlan.saved_by(ctx)
        return _combine(grads[0], dedup, ctx.mx_grad, ctx.rounding, grads[0].dtype), None, None, None, None


class _ReturnEach(torch.autograd.Function):
    """Groups to the unweighted sums of tokens: all replicas back, one copy of the gradient per rank there."""

    @staticmethod
    def forward(
        ctx: Any, groups: Tensor, dedup: DedupPlan, mx: bool, mx_grad: bool, rounding: int, out_dtype: torch.dtype
    ) -> Tensor:
        dedup.save(ctx)
        ctx.mx_grad, ctx.rounding, ctx.dtype = mx_grad, rounding, groups.dtype
        return _combine(groups, dedup, mx, rounding, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = dequantized(grads[0]).to(ctx.dtype)
        dedup = DedupPlan.saved_by(ctx)
        return _dispatch(dy, dedup, ctx.mx_grad, ctx.rounding), None, None, None, None, None


send_once = differentiable("dispatch", _SendOnce)
"""send_once(x, dedup, mx, mx_grad, rounding): tokens (T, K) -> groups (P, K), unchecked."""
return_each = differentiable("combine", _ReturnEach)
"""return_each(groups, dedup, mx, mx_grad, rounding, out_dtype): groups (P, N) -> sums (T, N), unchecked."""
