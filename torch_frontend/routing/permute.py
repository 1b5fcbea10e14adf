"""Rows between tokens and padded groups. Every step is one gather, forward and backward.

    sort_by_expert   experts (T, K) --> order, inverse (T K,), counts (E,)
    spread_rows      x (T, D) --order // top_k--> rows (T K, D), sorted by expert     backward: sum over K
    gather_rows      rows (M, K) --row_map------> padded groups (P, K)                backward: inverse
                     groups (P, N) --inverse----> rows (M, N)                         backward: row_map

MX rows stay MX, forward and backward. A -1 in a map is padding, a row of zeros. Where the next product folds, the
gather is left to it: `GatheredRows`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ..ops import direct as ops
from ..ops.checks import (
    check_counts,
    check_floats,
    check_int,
    check_way_back,
    index_map,
    reads_values,
    require_total,
)
from ..ops.differentiable import differentiable
from ..ops.mx_tensor import MXTensor, dequantized
from ..products.gathered_rows import mapped_rows, quantized_rows
from ..products.groups import RowMap
from .weighted_combine import sum_slots, token_of


class ExpertOrder(NamedTuple):
    """The order of slots by expert; all int32.

    Attributes:
        order: (S,), slots sorted by expert, stable.
        inverse: (S,), the row of each slot.
        counts: (E,), slots of each expert.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> ExpertOrder:
    """Sort the slots of a routing by expert, stably.

    Args:
        expert_ids: (T, top_k) or (S,) of an integer dtype, values in [0, num_experts): the expert of slot t * top_k +
            k.
        num_experts: E, at least 1.

    Returns:
        An `ExpertOrder`: order (S,), inverse (S,) and counts (E,), int32; S = T * top_k.

    Raises:
        TypeError: dtype.
        ValueError: shape; values, on a CPU.

    Example:
        >>> sort_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=3).order.tolist()
        [1, 0, 2, 3]
    """
    op = "sort_by_expert"
    check_counts(op, "expert_ids", expert_ids, None)
    if expert_ids.dim() not in (1, 2):
        fail(ValueError, op, "expert_ids", f"shape {tuple(expert_ids.shape)}", "allowed: (T, top_k) or (S,)")
    check_int(op, "num_experts", num_experts, 1)
    if expert_ids.dtype == torch.int64:  # ids that int32 does not hold stay wrong
        expert_ids = expert_ids.clamp(-1, 2**31 - 1)
    return ExpertOrder(*ops.sort_by_expert(expert_ids.reshape(-1).to(torch.int32), num_experts))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row_map: Tensor, inverse: Tensor, folds: bool = False) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.folds = folds
        return _gather(x, row_map, folds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grads[0], inverse, ctx.folds), None, None, None


def _gather(x: Tensor, row_map: Tensor, folds: bool = False) -> Tensor:
    if isinstance(x, MXTensor):
        return mapped_rows(x, row_map, x.orig_dtype, folds)
    return ops.permute_rows(x.contiguous(), row_map)


gather = differentiable("gather_rows", _Gather)
"""gather(x, row_map, inverse, folds): `gather_rows` without its checks. folds: a folded product reads them next."""


def gather_rows(x: Tensor, row_map: Tensor, inverse: Tensor) -> Tensor:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    Args:
        x: (M, K) bfloat16, float32 or MXTensor.
        row_map: (P,) int32 or int64, the row of x for each row of the result, -1 for a row of zeros.
        inverse: (M,) int32 or int64, the map back: the row of the result for each row of x, -1 for none.

    Returns:
        (P, K) of x's kind: MX rows stay MX, forward and backward.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, devices. On a CPU and within `debug_checks()` it also raises for indices outside of the rows
            and for an inverse that is not the map back.

    Example:
        >>> there, back = torch.tensor([1, -1, 0]), torch.tensor([2, 0])
        >>> gather_rows(torch.tensor([[1.0], [2.0]]), there, back).tolist()
        [[2.0], [0.0], [1.0]]
    """
    op = "gather_rows"
    check_floats(op, "x", x)
    row_map = index_map(op, "row_map", row_map, x.device, x.shape[0], ("P",))
    inverse = index_map(op, "inverse", inverse, x.device, row_map.shape[0], (x.shape[0],))
    check_way_back(op, "row_map", row_map, "inverse", inverse)
    return gather(x, row_map, inverse)


class _Spread(torch.autograd.Function):
    """x (T, D) -> (P, D). The backward sums the replicas in fp32, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return _gather(x, token_of(order, top_k))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        dx = sum_slots(dequantized(grads[0]), inverse.view(-1, ctx.top_k), grads[0].dtype)
        return dx, None, None, None


spread = differentiable("spread_rows", _Spread)
"""`spread_rows` without its checks."""


def spread_rows(x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Replicate each token for its top_k experts: out[i] = x[order[i] // top_k], zeros where order is -1.

    Args:
        x: (T, D) bfloat16, float32 or MXTensor.
        order: (P,) int32 or int64, the slot t * top_k + k of each row of the result, -1 for a row of zeros.
        inverse: (T * top_k,) int32 or int64, the row of each slot. P = T * top_k for maps of `sort_by_expert`.
        top_k: experts per token.

    Returns:
        (P, D) of x's kind. The gradient of a token is the fp32 sum over its replicas, rounded once.

    Raises:
        TypeError: dtypes.
        ValueError: shapes, devices, and maps as in `gather_rows`.

    Example:
        >>> order, inverse = torch.tensor([2, 0, 1, 3]), torch.tensor([1, 2, 0, 3])
        >>> spread_rows(torch.tensor([[1.0], [2.0]]), order, inverse, 2).tolist()
        [[2.0], [1.0], [1.0], [2.0]]
    """
    order, inverse = check_replicas("spread_rows", x, order, inverse, top_k)
    return spread(x, order, inverse, top_k)


class _SpreadTokens(torch.autograd.Function):
    """Tokens x (T, D) -> rows (P, D), and weights (T, top_k), if there are any, as (P,), which the caller has."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, of_rows: Tensor | None, token: Tensor, slots: Tensor,
        rounding: int | None, folds: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        ctx.save_for_backward(slots)
        ctx.set_materialize_grads(False)
        if rounding is None:
            return ops.permute_rows(x.contiguous(), token), of_rows
        return quantized_rows(x, rounding, token, folds), of_rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (slots,), (drows, dof_rows), dx, dweights = ctx.saved_tensors, grads, None, None
        if drows is not None and ctx.needs_input_grad[0]:
            dx = sum_slots(dequantized(drows), slots, drows.dtype)
        if dof_rows is not None:
            dweights = ops.permute_rows(dof_rows.contiguous().view(-1, 1), slots.view(-1)).view(slots.shape)
        return dx, dweights, None, None, None, None, None


spread_tokens = differentiable("spread_rows", _SpreadTokens)
"""spread_tokens(x, weights, of_rows, token, slots, rounding, folds): the rows of tokens, quantized before if there is a
rounding, gathered by the next product if it folds; and of_rows, the weight of each row. Weights get the gradient of
of_rows; both are None without weights. token (P,): of each row, -1 for padding. slots (T, top_k): the rows of each
token. Unchecked."""


def check_replicas(op: str, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """order and inverse as int32; raises unless they have `top_k` replicas of each row of x."""
    check_floats(op, "x", x)
    check_int(op, "top_k", top_k, 1)
    slots = x.shape[0] * top_k
    order = index_map(op, "order", order, x.device, slots, ("P",))
    inverse = index_map(op, "inverse", inverse, x.device, order.shape[0], (slots,))
    check_way_back(op, "order", order, "inverse", inverse)
    return order, inverse


def map_rows(
    op: str, name: str, rows: Any, counts: Tensor, ep_degree: int, num_local_experts: int, alignment: int
) -> RowMap:
    """Plan the padded groups of `rows` rows; raises unless counts, named `name`, are (ep_degree * num_local_experts,)
    of an integer dtype and add up to them."""
    check_counts(op, name, counts, None)
    if counts.shape != (ep_degree * num_local_experts,):
        allowed = f"allowed: ({ep_degree * num_local_experts},) = ep_degree * num_local_experts"
        fail(ValueError, op, name, f"shape {tuple(counts.shape)}", allowed)
    if reads_values(counts):
        require_total(op, name, counts, rows)
    counts = counts.to(torch.int32).contiguous()
    return RowMap(*ops.row_map(counts, rows, num_local_experts, alignment))
