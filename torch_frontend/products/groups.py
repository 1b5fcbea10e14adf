"""Groups of rows: the maps that laid them out, and what stands for their ends in a product.

group_ends    a tensor, or the RowMap or Route that laid the rows out --ends_of--> (G,) the end of each group
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from ...core_kernels.launch import fail


class RowMap(NamedTuple):
    """The maps between received rows and padded groups, one group per local expert; all int32.

    Attributes:
        row_map: (P,), the received row of each padded row, -1 for padding.
        inverse: (M,), the padded row of each received row.
        padded_counts: (local experts,), rows of each group with padding.
        group_ends: (local experts,), the end of each group.
    """

    row_map: Tensor
    inverse: Tensor
    padded_counts: Tensor
    group_ends: Tensor

    @property
    def padded_rows(self) -> int:
        """P."""
        return self.row_map.shape[0]

    def run(self, experts: "Multiplied", groups: Tensor, prob: Tensor | None) -> Tensor:
        """What the experts compute of the groups that this map has laid out."""
        return experts.multiply(groups, self, prob)


class Multiplied(Protocol):
    """Experts of this rank. prob (P,): a weight for each row, or None."""

    def multiply(self, groups: Tensor, group_ends: "GroupEnds", prob: Tensor | None) -> Tensor: ...


class LaidOut(Protocol):
    """A RowMap or a Route: what has laid out `padded_rows` rows in groups with these ends."""

    @property
    def group_ends(self) -> Tensor: ...
    @property
    def padded_rows(self) -> int: ...


GroupEnds = Tensor | LaidOut


def ends_of(op: str, group_ends: GroupEnds, x: Tensor) -> Tensor:
    """group_ends, or the ends of the RowMap or Route that laid out the rows x; ValueError if it laid out other rows."""
    if isinstance(group_ends, Tensor) or not hasattr(group_ends, "padded_rows"):
        return group_ends  # type: ignore[return-value] -- `check_group_ends` refuses what is no tensor
    rows = group_ends.padded_rows
    if isinstance(x, Tensor) and x.shape[0] != rows:
        allowed = f"allowed: the RowMap or Route that laid out these {x.shape[0]} rows"
        fail(ValueError, op, "group_ends", f"ends of {rows} rows", allowed)
    return group_ends.group_ends
