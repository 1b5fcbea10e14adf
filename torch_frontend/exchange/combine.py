"""Outputs of experts back to the ranks and rows that `dispatch` took them from.

    groups (P, N), route --gather--> all-to-all [--sum over each token's replicas-->] rows (M, N), or tokens (T, N)

The gradient of the groups is sent in MXFP8 if the recipe quantizes. On one rank the sum reads the groups directly;
`groups_to_tokens` is this step without checks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_probs, check_shape, out_dtype_of
from ..ops.mx_tensor import MXTensor
from ..ops.private import captures_splits
from ..ops.ranges import named
from ..routing.permute import gather
from ..routing.weighted_combine import combine_slots, plain_sum, weighted_sum
from .all_to_all import exchange_rows
from .process_groups import check_rows_to_send
from .replicas import exchange_sums, probs_of_copies, return_each
from .route import Route, folds


@named("mxep.combine")
def combine(
    groups: Tensor, route: Route, probs: Tensor | None = None, *, out_dtype: torch.dtype | str | None = None
) -> Tensor:
    """Take expert outputs back to the ranks and rows that `dispatch` took them from; differentiable.

    Args:
        groups: (P, N) bfloat16 or float32.
        route: of `dispatch`.
        probs: of TokenReplicas, (T, top_k) float32, the weight of each replica in its token's sum; None is a weight of
            1.
        out_dtype: of that sum; None is the dtype of groups.

    Returns:
        (M, N) rows; or, of TokenReplicas, (T, N), each token's weighted sum over its replicas in fp32, rounded once. If
        the recipe quantizes, the gradient of groups is an MXTensor.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> groups, _, route = dispatch(torch.ones(3, 32), torch.tensor([1, 2]))
        >>> combine(groups.dequantize(), route).shape
        torch.Size([3, 32])
    """
    op = "combine"
    if not isinstance(route, Route):
        fail(TypeError, op, "route", type(route).__name__, "allowed: the Route of a dispatch")
    check_rows_to_send(op, "groups", groups, route.recipe.mx or bool(route.recipe.mxfp8_all_to_all))
    check_shape(op, "groups", groups, (route.row_map.row_map.shape[0], "N"))
    out_dtype = groups.dtype if out_dtype is None else out_dtype_of(op, out_dtype)
    if route.order is None or route.slots is None:
        if probs is not None:
            allowed = "allowed: None for rows; the sum over replicas, of TokenReplicas, is weighted"
            fail(ValueError, op, "probs", "a tensor", allowed)
        rows = _receive_rows(groups, route)
        return rows.to(out_dtype)
    if probs is not None:
        check_probs(op, "probs", probs, (route.slots.shape[0] // route.top_k, route.top_k), groups.device)
    slots, rounding = route.slots.view(-1, route.top_k), None
    if len(route.input_splits) == 1:
        rows, rounding = _rows_to_sum(groups, route.recipe)
    elif route.copies is not None and (route.copies.summed or probs is None):
        exchange = captures_splits()
        return (_receive_sums if exchange else _receive_sums_eagerly)(groups, probs, route, out_dtype)
    else:
        rows = _receive_rows(groups, route)
    return combine_slots(rows, probs, slots, route.order, out_dtype, rounding, folds(route.recipe, rows))


@named("mxep.combine")
def groups_to_tokens(groups: Tensor, route: Route, probs: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`combine` of TokenReplicas on one rank, unchecked."""
    assert route.slots is not None
    slots, (rows, rounding) = route.slots.view(-1, route.top_k), _rows_to_sum(groups, route.recipe)
    if probs is None:
        return plain_sum(rows, slots, route.token, out_dtype, rounding, folds(route.recipe, rows))
    return weighted_sum(rows, probs, slots, route.order, out_dtype, rounding)


def _rows_to_sum(groups: Tensor, recipe: Recipe) -> tuple[Tensor, int | None]:
    """The groups with the values that they have after they were sent, and the rounding of their gradient."""
    if recipe.sends_mx("combine"):
        groups = MXTensor.quantize(groups, recipe.rounding).dequantize()
    return groups, int(recipe.rounding) if recipe.sends_mx("combine_grad") else None


def _receive_rows(groups: Tensor, route: Route) -> Tensor:
    exchange = captures_splits() or len(route.input_splits) == 1
    return (_receive if exchange else _receive_eagerly)(groups, route)


def _receive(groups: Tensor, route: Route) -> Tensor:
    recipe = route.recipe
    rows = gather(groups, route.row_map.inverse, route.row_map.row_map, folds(recipe, groups))
    mx, mx_grad = recipe.sends_mx("combine"), recipe.sends_mx("combine_grad")
    received = exchange_rows(
        rows, route.input_splits, route.output_splits, route.group_name, mx, mx_grad, int(recipe.rounding)
    )
    return received.dequantize() if mx else received


def _receive_sums(groups: Tensor, probs: Tensor | None, route: Route, out_dtype: torch.dtype) -> Tensor:
    """Of the copies of tokens."""
    copies, recipe = route.copies, route.recipe
    assert copies is not None
    if not copies.summed:
        mx, mx_grad = recipe.sends_mx("combine"), recipe.sends_mx("combine_grad")
        return return_each(groups, route.dedup_plan, mx, mx_grad, int(recipe.rounding), out_dtype)
    if probs is not None:
        column = gather(probs.reshape(-1, 1), route.order, route.slots)
        sent = exchange_rows(column, route.output_splits, route.input_splits, route.group_name, False, False, 0)
        probs = probs_of_copies(sent, copies)
    return exchange_sums(groups, probs, copies, recipe, route.group_name, out_dtype)


# As in dispatch.py.
_receive_sums_eagerly: Callable[..., Any] = torch.compiler.disable(_receive_sums)
_receive_eagerly: Callable[..., Any] = torch.compiler.disable(_receive)
