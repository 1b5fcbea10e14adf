"""Rows to the ranks of their experts, laid out in one padded group per local expert.

    rows (M, K), or TokenReplicas --quantize--> all-to-all --gather--> groups (P, K), padded_counts, route

The gradient of the rows is sent in bf16. `Recipe.mxfp8_all_to_all` chooses other all-to-alls that send MXFP8. The
choice holds on one rank too, so that results do not depend on the ranks. On one rank there is no exchange: the replicas
of a token are gathered directly into the groups. `tokens_to_groups` is this step without checks, for a layer that has
made its arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.deduplicate import Deduplicate, check_deduplicate
from ...core_kernels.policy.recipe import RECIPES, Recipe
from ..ops import direct as ops
from ..ops.checks import check_probs
from ..ops.mx_tensor import MXTensor
from ..ops.private import captures_splits
from ..ops.ranges import named
from ..products.groups import RowMap
from ..routing.permute import gather, map_rows, spread, spread_tokens
from ..routing.weighted_combine import token_of
from .all_to_all import TokenReplicas, exchange_rows, exchange_tokens, sent_rows
from .counts import Request, agree_on_counts, agreed_splits, checked_rows
from .process_groups import degree_of, name_of
from .replicas import exchange_slots, map_copies, send_once
from .route import Route, folds
from .shards import Ranks


def dispatch(
    rows: Tensor | TokenReplicas,
    counts: Tensor,
    *,
    recipe: Recipe | str = "mxfp8",
    group: "str | dist.ProcessGroup | None" = None,
    deduplicate: Deduplicate = None,
) -> tuple[Tensor, Tensor, Route]:
    """Send rows to the ranks of their experts, into one padded group per local expert; differentiable.

    Args:
        rows: (M, K) bfloat16 or float32, sorted by expert; or TokenReplicas. K is a multiple of 32 if the recipe
            quantizes.
        counts: (E,) of any integer dtype, the rows of each expert; E is a multiple of the group's ranks, and rank r has
            the experts [r E / ranks, (r + 1) E / ranks).
        recipe: a `Recipe` or its name. The MXFP8 recipes quantize the rows here and send packed bytes.
        group: a process group or its name; None is the default group, or this process alone where torch.distributed is
            not initialised.
        deduplicate: of TokenReplicas, how often a token is sent to a rank with several of its experts. None: a row per
            expert, in both directions. "dispatch": one row, from which that rank makes the other rows. It returns the
            result of each row, and results and gradients are the same bytes. "both": the rank also sums the results of
            a token, in fp32, and returns one row. The row has the dtype of the groups, or of the recipe's all-to-all.

    Returns:
        (groups, padded_counts, route): groups (P, K), an MXTensor if the recipe quantizes, with padding rows of zeros;
        padded_counts (E / ranks,) int32, multiples of the recipe's alignment; route for `combine`. Where products and
        weight gradients fold, the MXTensor is `GatheredRows`, which these read without storing the groups. The gradient
        of the rows has their dtype. Several ranks synchronize once with the host, which reads the splits.

    Raises:
        TypeError: dtypes; arguments of another type.
        ValueError: shapes, counts that do not fit the rows or the ranks, options that exclude each other. An error on
            one rank raises on all ranks, and no row is sent.

    Example:
        >>> order, inverse, counts = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=3)
        >>> tokens = TokenReplicas(torch.ones(2, 32), order, inverse, top_k=2)
        >>> groups, padded_counts, route = dispatch(tokens, counts)
        >>> groups.shape, padded_counts.tolist(), combine(groups.dequantize(), route)[:, 0].tolist()
        (torch.Size([128, 32]), [32, 32, 32], [2.0, 2.0])
    """
    name = name_of("dispatch", "group", group)
    request = Request("dispatch", rows, counts, RECIPES["bf16"], Ranks(name, degree_of(name), 0, ""))
    try:
        check_deduplicate("dispatch", deduplicate)
        request = request._replace(recipe=Recipe.parse(recipe))
    except (TypeError, ValueError) as error:
        if request.ranks.degree > 1:
            agree_on_counts(request._replace(error=error))
        raise
    return dispatch_over(request, deduplicate)


@named("mxep.dispatch")
def dispatch_over(request: Request, deduplicate: Deduplicate = None) -> tuple[Tensor, Tensor, Route]:
    """`dispatch` of a request. Its probs are the argument of the `dispatch_probs` that follows, or of `combine`,
    checked here, before any rank sends rows."""
    ranks = request.ranks
    if ranks.degree == 1:
        (rows, num_rows), counts, recipe = checked_rows(request, deduplicate), request.counts, request.recipe
        row_map = map_rows("dispatch", "counts", num_rows, counts, 1, counts.shape[0], recipe.alignment)
        if isinstance(rows, TokenReplicas):
            maps = _maps_of_slots(rows, row_map)
            groups, _, route = _replicas_to_groups(rows, counts, row_map, maps, recipe, ranks.group_name)
        else:
            route = Route(row_map, counts, recipe, ranks.group_name, [num_rows], [num_rows])
            x = MXTensor.quantize(rows, recipe.rounding, packed=True) if recipe.sends_mx("dispatch") else rows
            groups = gather(x, row_map.row_map, row_map.inverse, folds(recipe, x))
        if recipe.sends_mx("dispatch_grad"):
            groups = sent_rows(groups, True, int(recipe.rounding))
        return groups, row_map.padded_counts, route
    return (_send if captures_splits() else _send_eagerly)(request, deduplicate)


@named("mxep.dispatch")
def tokens_to_groups(
    tokens: TokenReplicas, counts: Tensor, recipe: Recipe, group_name: str, probs: Tensor | None
) -> tuple[Tensor, Tensor | None, Route]:
    """`dispatch_over` and, of probs, `dispatch_probs` on one rank, unchecked: groups, weights of their rows, route. All
    maps are from `sort_by_expert`. The route's row map is the map of the slots."""
    order, top_k = tokens.order, tokens.top_k
    if probs is None:
        weights = torch.empty(0, dtype=torch.float32, device=order.device)
    else:
        weights = probs.detach().contiguous().view(-1)
    order, token, slots, padded_counts, ends, prob = ops.slot_map(counts, order, weights, top_k, recipe.alignment)
    row_map, maps = RowMap(order, slots, padded_counts, ends), (order, token, slots)
    prob = None if probs is None else prob
    groups, prob, route = _replicas_to_groups(tokens, counts, row_map, maps, recipe, group_name, probs, prob)
    if recipe.sends_mx("dispatch_grad"):
        groups = sent_rows(groups, True, int(recipe.rounding))
    return groups, prob, route


def _maps_of_slots(tokens: TokenReplicas, row_map: RowMap) -> tuple[Tensor, Tensor, Tensor]:
    """The slot and the token of each padded row, -1 for padding, and the padded row of each slot: the composition of
    two maps."""
    # A padding row, -1 in the map, takes the -1 in front: it is the replica of no token. `index_select` reads int32;
    # indexing with [] would copy the map to int64.
    order = torch.cat([tokens.order.new_full((1,), -1), tokens.order]).index_select(0, row_map.row_map + 1)
    return order, token_of(order, tokens.top_k), row_map.inverse.index_select(0, tokens.inverse)


def _replicas_to_groups(
    tokens: TokenReplicas, counts: Tensor, row_map: RowMap, maps: tuple[Tensor, Tensor, Tensor], recipe: Recipe,
    group_name: str, probs: Tensor | None = None, prob: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Route]:  # fmt: skip
    """One gather from tokens to padded groups. maps: of `_maps_of_slots`. prob: of each row, if there are probs."""
    x, top_k, (order, token, slots) = tokens.x, tokens.top_k, maps
    replicas = tokens.order.shape[0]
    rounding = int(recipe.rounding) if recipe.sends_mx("dispatch") else None
    groups, prob = spread_tokens(x, probs, prob, token, slots.view(-1, top_k), rounding, folds(recipe, x))
    return (
        groups,
        prob,
        Route(row_map, counts, recipe, group_name, [replicas], [replicas], order, slots, top_k, None, token),
    )


def _send(request: Request, deduplicate: Deduplicate) -> tuple[Tensor, Tensor, Route]:
    agreed, recipe, ranks = agree_on_counts(request, deduplicate), request.recipe, request.ranks
    rows, received = agreed.rows, agreed.received
    # torch's all-to-all takes its splits from the host: the one sync of the layer.
    (output_splits, input_splits), of_copies = agreed_splits(request.counts, agreed, ranks.group_name)
    local, name = received.shape[0] // ranks.degree, ranks.group_name

    def laid_out(num_rows: int) -> RowMap:
        return map_rows("dispatch", "counts", num_rows, received, ranks.degree, local, recipe.alignment)

    if agreed.layout is None:
        arrived = exchange_tokens(rows, output_splits, input_splits, recipe, name)
        row_map = laid_out(arrived.shape[0])
        groups = gather(arrived, row_map.row_map, row_map.inverse, folds(recipe, arrived))
        route = Route(row_map, agreed.totals, recipe, name, output_splits, input_splits)
        if isinstance(rows, TokenReplicas):
            route = route._replace(order=rows.order, slots=rows.inverse, top_k=rows.top_k)
        return groups, row_map.padded_counts, route
    assert isinstance(rows, TokenReplicas)
    slots = exchange_slots(agreed.layout.slots, output_splits, input_splits, name)
    row_map = laid_out(slots.shape[0])
    of_ranks, (copies_out, copies_in), summed = received.view(ranks.degree, -1).sum(1), of_copies, deduplicate == "both"
    copies = map_copies(
        agreed.layout, slots, of_ranks, agreed.copies[:, 0], row_map, rows.top_k, copies_out, copies_in, summed
    )
    route = Route(
        row_map, agreed.totals, recipe, name, output_splits, input_splits, rows.order, rows.inverse, rows.top_k, copies
    )
    if summed:
        sent = TokenReplicas(rows.x, copies.order, copies.inverse, copies.width)
        arrived = exchange_tokens(sent, copies_out, copies_in, recipe, name)
        groups = spread(arrived, copies.group_order, copies.group_slots.view(-1), rows.top_k)
    else:
        mx, mx_grad = recipe.sends_mx("dispatch"), recipe.sends_mx("dispatch_grad")
        groups = send_once(rows.x, route.dedup_plan, mx, mx_grad, int(recipe.rounding))
    return groups, row_map.padded_counts, route


def dispatch_probs(probs: Tensor, route: Route) -> Tensor:
    """Send a weight per row where `dispatch` sent the row; differentiable.

    Args:
        probs: (M,) float32; (T, top_k) for TokenReplicas.
        route: of `dispatch`.

    Returns:
        (P,) float32, zeros for padding: the `prob` of `grouped_swiglu_ffn`. One all-to-all of 4 bytes a row, and one
        back for the gradient.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> order, inverse, counts = sort_by_expert(torch.tensor([[1], [0]]), num_experts=2)
        >>> _, _, route = dispatch(TokenReplicas(torch.ones(2, 32), order, inverse, 1), counts)
        >>> dispatch_probs(torch.tensor([[0.25], [0.5]]), route)[:64:32].tolist()
        [0.5, 0.25]
    """
    if not isinstance(route, Route):
        fail(TypeError, "dispatch_probs", "route", type(route).__name__, "allowed: the Route of a dispatch")
    shape = (sum(route.input_splits),) if route.order is None else (sum(route.input_splits) // route.top_k, route.top_k)
    check_probs("dispatch_probs", "probs", probs, shape, route.row_map.row_map.device)
    column = probs.reshape(-1, 1)
    if route.order is not None and route.slots is not None:
        column = gather(column, route.order, route.slots)
        if len(route.input_splits) == 1:
            return column.squeeze(1)
    exchange = captures_splits() or len(route.input_splits) == 1
    return (_send_probs if exchange else _send_probs_eagerly)(column, route).squeeze(1)


def _send_probs(column: Tensor, route: Route) -> Tensor:
    received = exchange_rows(column, route.output_splits, route.input_splits, route.group_name, False, False, 0)
    return gather(received, route.row_map.row_map, route.row_map.inverse)


# AOTAutograd traces a backward with tangents of the outputs' types. Here an MX output has a plain gradient and a plain
# output an MX gradient (pytorch/pytorch#172556), so exchanges run outside of compiled graphs, unless Dynamo may keep
# the splits as symbols and trace on.
_send_eagerly: Callable[..., Any] = torch.compiler.disable(_send)
_send_probs_eagerly: Callable[..., Any] = torch.compiler.disable(_send_probs)
