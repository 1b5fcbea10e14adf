"""Groups of rows: their ends, as a product takes them, and rows padded to whole blocks in each group."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...core_kernels.launch import fail
from .. import ops
from ..ops import RowMap
from ..ops.checks import check_counts, check_shape, check_values, warn_caller
from ..ops.mx_array import MXArray
from .gathers import gather


class LaidOut(Protocol):
    """What laid rows out in groups: a `Route`."""

    @property
    def row_map(self) -> RowMap: ...


def ends_of(op: str, group_ends: Any, group_sizes: Any, x: jax.Array | MXArray, groups: int) -> jax.Array:
    """The ends (groups,) of the groups of x: group_ends, or the ends in the RowMap or Route of x, or the sums of
    group_sizes. An MXArray from `permute` or `dispatch` has ends of its own, which a product takes. Other ends are an
    error where their values are known.

    Raises TypeError (dtype) and ValueError (shape, both or none of ends and sizes, other ends, a Route of other rows).
    """
    rows, own = x.shape[0], x.group_ends if isinstance(x, MXArray) else None
    if (group_ends is None) == (group_sizes is None):
        got = "none" if group_ends is None else "both"
        fail(ValueError, op, "group_ends, group_sizes", got, "allowed: one of them, the ends or the counts of groups")
    maps = group_ends if isinstance(group_ends, RowMap) else getattr(group_ends, "row_map", None)
    by_hand = group_ends is not None and not isinstance(maps, RowMap)
    if isinstance(maps, RowMap):
        if maps.row_map.shape[0] != rows:
            got = f"ends of {maps.row_map.shape[0]} rows"
            fail(ValueError, op, "group_ends", got, f"allowed: the RowMap or Route that laid out these {rows} rows")
        group_ends = maps.group_ends
    elif group_ends is None:
        group_ends = ends_of_sizes(op, group_sizes, rows, groups, "weights")
    check_shape(op, "group_ends", group_ends, (groups,), "one end per group of the weights", "int")
    given = jnp.asarray(group_ends)
    if own is None and by_hand:
        _warn_if_sizes(op, given, rows)
    if own is None or own is given:
        # In another dtype ends would wrap where they are clipped, and never decrease where it has no sign.
        ends = given.astype(jnp.int32)
        if given.dtype != jnp.int32:
            held = ends.astype(given.dtype) == given
            check_values(held, op, "group_ends", given, "allowed: ends that an int32 holds")
        return ends
    check_shape(op, "group_ends", given, own.shape, "the ends of x", "int")
    check_values(
        (given == own).all(), op, "group_ends", given, "allowed: the ends of x; pass the RowMap or Route of its rows"
    )
    return own


def ends_of_sizes(op: str, group_sizes: Any, rows: int, groups: int, of: str) -> jax.Array:
    """(groups,) int32: the ends of groups of group_sizes rows. Raises TypeError (dtype) and ValueError (shape, counts
    that do not fit the rows)."""
    check_shape(op, "group_sizes", group_sizes, (groups,), f"one count per group of the {of}", "int")
    check_counts(op, group_sizes, 1, rows, "group_sizes")
    return jnp.cumsum(jnp.asarray(group_sizes).astype(jnp.int32), dtype=jnp.int32)


def _warn_if_sizes(op: str, group_ends: jax.Array, rows: int) -> None:
    """In an eager call, where the last end is known: counts in place of ends leave most rows out."""
    if not group_ends.size or not rows:
        return
    few = group_ends[-1].astype(jnp.int32) < (rows + 1) // 2
    if not isinstance(few, Tracer) and few:
        text = (
            "{}: group_ends: the last end is {} of {} rows, and the rows past it give zeros; counts go to group_sizes="
        )
        warn_caller(text.format(op, group_ends[-1], rows))


def map_groups(counts: jax.Array, rows: int, alignment: int) -> RowMap:
    """Between `rows` rows, whose groups of counts (G,) follow each other, and groups padded to the alignment."""
    return ops.row_map(
        counts.astype(jnp.int32), num_rows=rows, num_local_experts=counts.shape[0], alignment=alignment, rank_rows=0
    )


def pad_groups(op: str, x: Any, group_ends: jax.Array, alignment: int) -> tuple[Any, RowMap]:
    """Pad each group to a multiple of `alignment` rows; `gathers.ungather` removes the padding."""
    # Inside jit no check of values stops wrong ends: they are clipped, so that counts fit the rows.
    ends = jax.lax.cummax(jnp.clip(group_ends, 0, x.shape[0]))
    maps = map_groups(jnp.diff(ends, prepend=0), x.shape[0], alignment)
    return laid_out(gather(op, x, maps.row_map, maps.inverse), maps), maps


def laid_out(groups: Any, maps: RowMap) -> Any:
    """MX rows with the ends of their groups; an array as it is."""
    return groups.laid_out(maps.group_ends) if isinstance(groups, MXArray) else groups
