"""Rows whose experts are on their rank: one gather into padded groups, and one sum back.

tokens (T, K) --order // top_k--> padded groups (P, K)      tokens (T, N) <--slots-- padded groups (P, N)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...core_kernels.policy.recipe import Recipe
from ..ops.mx_array import MXArray
from ..products.gathers import HERE, Reader, gather
from ..products.groups import map_groups
from ..routing.permute import spread
from ..routing.weighted_combine import combine_slots
from .all_to_all import TokenReplicas, parts_of
from .route import Route, named_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMaps:
    """Between slots t * top_k + k, or rows, and padded groups; int32, -1 is none. order (P,): the slot of each padded
    row. slots (M,): the padded row of each slot. overflow (): local rows that did not fit."""

    order: jax.Array
    slots: jax.Array
    overflow: jax.Array

    @property
    def num_rows(self) -> int:
        return self.slots.shape[0]


@dataclasses.dataclass(frozen=True)
class Local:
    """The exchange of one rank, which drops no row."""

    def dispatch(self, rows: Any, counts: jax.Array, recipe: Recipe) -> tuple[Any, Route]:
        x, top_k, num_rows = parts_of(rows)
        row_map = map_groups(counts, num_rows, recipe.alignment)
        order, slots = row_map.row_map, row_map.inverse
        if isinstance(rows, TokenReplicas):
            # order[-1] is the appended -1: a padding row is the replica of no token.
            order, slots = jnp.append(rows.order, -1)[order], slots[rows.inverse]
        route = Route(row_map, SlotMaps(order, slots, jnp.zeros((), jnp.int32)), self, recipe, top_k)
        return read_groups(x, route, HERE), route

    def dispatch_probs(self, op: str, probs: jax.Array, route: Route) -> jax.Array:
        return gather(op, probs, route.maps.order, route.maps.slots)

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        return sum_groups(groups, route, route.maps.slots, route.maps.order, probs, out_dtype, HERE)


def read_groups(x: jax.Array, route: Route, reader: Reader) -> Any:
    """One gather from rows, or from tokens, to padded groups, by the SlotMaps of the route."""
    values: Any = MXArray.quantize(x, route.recipe.rounding) if route.recipe.mx else x
    groups = spread("dispatch", values, route.maps.order, route.maps.slots, max(route.top_k, 1), reader)
    return named_groups(groups, route.row_map)


def sum_groups(
    rows: Any, route: Route, slots: jax.Array, order: jax.Array, probs: jax.Array | None, out_dtype: str, reader: Reader
) -> jax.Array:
    """One sum from rows to tokens, or one gather to rows."""
    slots, rounding = slots.reshape(-1, max(route.top_k, 1)), route.recipe.rounding
    options = {"out_dtype": out_dtype, "rounding": rounding, "reader": reader}
    return combine_slots("combine", rows, probs, slots, order, **options)
