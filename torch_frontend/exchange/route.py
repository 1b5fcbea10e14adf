"""What `dispatch` has done with the rows, as a value: whoever holds it can combine."""

from typing import NamedTuple

from torch import Tensor

from ...core_kernels.policy.recipe import Recipe
from ..products.groups import RowMap
from ..products.weights import format_of
from .replicas import Copies, DedupPlan, DedupSplits


class Route(NamedTuple):
    """Where `dispatch` put each row; `combine` takes it.

    Attributes:
        row_map: between received rows and padded groups.
        counts: (E,) int32, rows of all ranks per expert.
        recipe: of `dispatch`.
        group_name: of the ranks' process group; "" is this process alone.
        output_splits: rows received from each rank.
        input_splits: rows sent to each rank.
        order: of TokenReplicas, the slot of each row, as `weighted_combine` takes it; None for rows.
        slots: of TokenReplicas, the row of each slot, as `weighted_combine` takes it; None for rows.
        top_k: of TokenReplicas, experts per token; 0 for rows.
        copies: where a token is sent once to each rank, the layout of its copies.
        token: of TokenReplicas on one rank, the token of each row of the groups.
    """

    row_map: RowMap
    counts: Tensor
    recipe: Recipe
    group_name: str
    output_splits: list[int]
    input_splits: list[int]
    order: Tensor | None = None
    slots: Tensor | None = None
    top_k: int = 0
    copies: Copies | None = None
    token: Tensor | None = None

    @property
    def group_ends(self) -> Tensor:
        """(local experts,) int32, the end of each padded group."""
        return self.row_map.group_ends

    @property
    def padded_rows(self) -> int:
        return self.row_map.padded_rows

    @property
    def layout(self) -> RowMap:
        """The layout that the experts take together with their groups."""
        return self.row_map

    @property
    def dedup_plan(self) -> DedupPlan:
        """Of the copies of a token there, and of its replicas back."""
        copies = self.copies
        assert copies is not None
        assert self.slots is not None
        copy, slots = copies.group_order // self.top_k, self.slots.view(-1, self.top_k)
        splits = DedupSplits(copies.output_splits, copies.input_splits, self.input_splits, self.output_splits)
        return DedupPlan(copies.order // copies.width, copy, self.row_map.inverse, slots, splits, self.group_name)


def folds(recipe: Recipe, rows: Tensor) -> bool:
    """Whether the experts' products read MXFP8 rows and their gradients folded, both of them: then dispatch and the
    gradient of combine leave the gather to the products."""
    return recipe.wgrad_mx and format_of(recipe, rows.device).name == "fold"
