"""Rows to the ranks of their experts, laid out in one padded group per local expert.

    rows (M, K), or TokenReplicas --quantize--> exchange --gather--> groups (P, K), padded_counts, route

`choose_exchange` makes the exchange from the options, once; its class does the rest (route.py draws it). The gradient
of the rows comes back in bf16.
"""

import jax
import jax.numpy as jnp

from ...core_kernels.launch import fail
from ...core_kernels.policy.deduplicate import Deduplicate, check_deduplicate
from ...core_kernels.policy.overflow import OnOverflow, check_on_overflow
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_floats, check_shape, check_type, check_vector
from ..ops.mesh import Axes, axis_size
from ..ops.mx_array import MXArray
from ..ops.shapes import Float, Float32, Int
from ..products.weights import recipe_of
from ..routing.overflow import check_capacity_factor, nan_gradients_of_probs
from .all_to_all import AllToAll, TokenReplicas, check_expert_counts, check_replicas, parts_of
from .local import Local
from .peer_exchange import PeerExchange
from .peer_memory import PeerMemory
from .replicas import Once, Summed
from .route import Route, TokenExchange

_ALL_TO_ALL: dict[str | None, type[AllToAll]] = {None: AllToAll, "dispatch": Once, "both": Summed}


def choose_exchange(
    op: str, of_tokens: bool, axis_name: Axes | None, capacity_factor: float | None, deduplicate: Deduplicate,
    transport: PeerMemory | None, on_overflow: OnOverflow,
) -> TokenExchange:  # fmt: skip
    """The exchange of the options of `dispatch`. of_tokens: of TokenReplicas. Raises ValueError and TypeError."""
    check_deduplicate(op, deduplicate)
    check_on_overflow(op, on_overflow)
    check_type(op, "transport", transport, PeerMemory, type(None))
    check_capacity_factor(op, capacity_factor)
    if deduplicate is not None and not of_tokens:
        allowed = "allowed: None for rows; TokenReplicas, whose rows are copies, take the others"
        fail(ValueError, op, "deduplicate", repr(deduplicate), allowed)
    several = axis_size(op, axis_name) > 1
    if axis_name is None and capacity_factor is None:
        return Local()
    if axis_name is None or not several:
        return AllToAll(axis_name, capacity_factor, on_overflow)
    if transport is None:
        return _ALL_TO_ALL[deduplicate](axis_name, capacity_factor, on_overflow)
    if deduplicate is not None:
        fail(ValueError, op, "deduplicate", repr(deduplicate), "allowed: None with transport=PeerMemory(...)")
    transport.check_axes(op, axis_name)
    return PeerExchange(transport, capacity_factor, on_overflow)


@jax.named_scope("mxep.dispatch")
def dispatch(
    rows: Float[jax.Array, "M K"] | TokenReplicas,
    counts: Int[jax.Array, " E"],
    *,
    recipe: Recipe | str = "mxfp8",
    axis_name: Axes | None = None,
    capacity_factor: float | None = None,
    deduplicate: Deduplicate = None,
    transport: PeerMemory | None = None,
    on_overflow: OnOverflow = "nan",
) -> tuple[Float[jax.Array, "P K"] | MXArray, Int[jax.Array, " G"], Route]:
    """Send rows to the ranks of their experts, into one padded group per local expert; differentiable.

    Args:
        rows: (M, K) bf16 or fp32, sorted by expert; or TokenReplicas. K is a multiple of 32 if the recipe quantizes.
        counts: (E,) of an integer dtype, the rows of each expert; E is a multiple of the ranks, and rank r has the
            experts [r E / ranks, (r + 1) E / ranks). Inside jit on several ranks, counts that do not fit the rows are
            clipped.
        recipe: a `Recipe` or its name. The MXFP8 recipes quantize the rows here and send packed bytes.
        axis_name: a mesh axis of the enclosing shard_map, or a tuple of them; None is one rank.
        capacity_factor: the most rows of a rank, relative to M, the mean if all ranks have M rows. Over an all-to-all
            each pair of ranks has an equal part of them. None drops no row.
        deduplicate: of TokenReplicas, how often a token is sent to a rank with several of its experts. None: a row per
            expert, in both directions. "dispatch": one row, which that rank copies for each expert. It sends one result
            per expert back, and results and gradients are the same bytes. "both": as "dispatch", but that rank sums the
            results of a token in fp32 and sends one row back, in the dtype of the groups. With "dispatch" and "both" a
            pair of ranks has a buffer for at most T tokens.
        transport: None: all-to-alls, collectives of XLA. A `PeerMemory` along axis_name: kernels read the rows in the
            memory of the other GPUs of a host, into their groups and, summed, into their tokens. On CPUs rows are read
            from an all-gather of the rows. The same bytes, with deduplicate=None. All ranks share the buffer of a rank.
        on_overflow: what a row that does not fit the capacity makes of its row or token after `combine`. "nan": NaN, in
            the result, in the gradient of the row or token, and in the gradient of its weight. "drop": zeros, in the
            sum of a token and in the gradients.

    Returns:
        (groups, padded_counts, route): groups (P, K), an MXArray if the recipe quantizes, with padding rows of zeros;
        padded_counts (E / ranks,) int32, multiples of the recipe's alignment; route for `combine`. The gradient of the
        rows has their dtype. A row that does not fit the capacity is in no group; `route.overflow` counts such rows.

    Raises:
        ValueError: shapes, a mesh axis that does not exist or does not divide E; counts that do not fit the rows in
            eager calls and under checkify.
        TypeError: dtypes.

    Example:
        >>> order, inverse, counts = sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)
        >>> tokens = TokenReplicas(jnp.ones((2, 32)), order, inverse, top_k=2)
        >>> groups, padded_counts, route = dispatch(tokens, counts)
        >>> groups.shape, padded_counts.tolist(), combine(groups.dequantize(), route)[:, 0].tolist()
        ((128, 32), [32, 32, 32], [2.0, 2.0])
    """
    op, recipe = "dispatch", recipe_of("dispatch", recipe)
    of_tokens = isinstance(rows, TokenReplicas)
    x = rows.x if of_tokens else rows
    check_floats(op, "rows", x, " or TokenReplicas")
    if x.ndim != 2:
        fail(ValueError, op, "rows", f"shape {x.shape}", "allowed: (M, K)")
    check_vector(op, "counts", counts)
    if of_tokens:
        check_replicas(op, rows)
    exchange = choose_exchange(op, of_tokens, axis_name, capacity_factor, deduplicate, transport, on_overflow)
    check_expert_counts(op, counts, axis_name, parts_of(rows)[2])
    groups, route = exchange.dispatch(rows, counts, recipe)
    return groups, route.row_map.padded_counts, route


def dispatch_probs(
    probs: Float32[jax.Array, "T top_k"] | Float32[jax.Array, " M"], route: Route
) -> Float32[jax.Array, " P"]:
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
        >>> order, inverse, counts = sort_by_expert(jnp.array([[1], [0]]), num_experts=2)
        >>> _, _, route = dispatch(TokenReplicas(jnp.ones((2, 32)), order, inverse, 1), counts)
        >>> dispatch_probs(jnp.array([[0.25], [0.5]]), route)[:64:32].tolist()
        [0.5, 0.25]
    """
    op = "dispatch_probs"
    check_type(op, "route", route, Route)
    check_shape(op, "probs", probs, route.probs_shape, "one weight per row of the dispatch", "float32")
    column = nan_gradients_of_probs(op, jnp.asarray(probs), route.lost).reshape(-1, 1)
    return route.exchange.dispatch_probs(op, column, route)[:, 0]
