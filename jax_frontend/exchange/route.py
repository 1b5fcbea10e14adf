"""What `dispatch` has done with the rows, as a value: whoever holds it can combine.

dispatch.py --chooses--> Local (local.py) | AllToAll (all_to_all.py) | PeerMemory (peer_exchange.py)

exchange.dispatch(rows, counts, recipe) -----------> groups (P, K), route
exchange.dispatch_probs(op, probs, route) ---------> the weight of each row of the groups
exchange.combine(groups, route, probs, out_dtype) -> rows (M, N), or tokens (T, N)
"""

import dataclasses
from typing import Any, Protocol

import jax

from ...core_kernels.policy.recipe import Recipe
from ..ops import RowMap
from ..ops.remat import ROWS, named
from ..products.groups import laid_out


class TokenExchange(Protocol):
    """Sends rows to the experts and back, with its options; static. The callers have checked the arguments."""

    def dispatch(self, rows: Any, counts: jax.Array, recipe: Recipe) -> "tuple[Any, Route]":
        """rows: (M, K), or TokenReplicas. counts (E,). Returns groups, an MXArray if the recipe quantizes."""
        ...

    def dispatch_probs(self, op: str, probs: jax.Array, route: "Route") -> jax.Array:
        """(M, 1) fp32, a weight per row -> (P, 1)."""
        ...

    def combine(self, groups: Any, route: "Route", probs: jax.Array | None, out_dtype: str) -> jax.Array:
        """groups (P, N), an MXGradArray if the recipe quantizes -> (M, N) or (T, N), zeros for dropped rows."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where `dispatch` put each row; `combine` takes it.

    Attributes:
        row_map: between received rows and padded groups.
        maps: of the exchange, `local.SlotMaps` or `all_to_all.Sent`.
        exchange: that `dispatch` chose, static.
        recipe: of `dispatch`, static.
        top_k: experts per token of TokenReplicas; 0 for rows; static.
        lost: (M,) bool of rows or (T, top_k) of tokens, the dropped rows, which make NaN. None if no row can be
            dropped, or on_overflow="drop".
    """

    row_map: RowMap
    maps: Any
    exchange: TokenExchange = dataclasses.field(metadata={"static": True})
    recipe: Recipe = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    lost: jax.Array | None = None

    @property
    def group_ends(self) -> jax.Array:
        """(local experts,) int32, the end of each padded group."""
        return self.row_map.group_ends

    @property
    def num_rows(self) -> int:
        """M, local rows."""
        return self.maps.num_rows

    @property
    def overflow(self) -> jax.Array:
        """() int32, local rows that did not fit the capacity."""
        return self.maps.overflow

    @property
    def probs_shape(self) -> tuple[int, ...]:
        """(T, top_k); (M,) for rows."""
        return (self.num_rows // self.top_k, self.top_k) if self.top_k else (self.num_rows,)


def named_groups(groups: Any, row_map: RowMap) -> Any:
    """Groups with the name that policies of jax.checkpoint save, and MX rows with the ends of their groups."""
    return laid_out(named(groups, ROWS), row_map)
