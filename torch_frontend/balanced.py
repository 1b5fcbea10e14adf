"""The operands of form "balanced": MX bytes that a product folds by the levels of both of its operands.

    rows    q, sf --level-----.--own------> fold_rows_balanced --> Folded --.
                               X other                                      +--> the folded products
    weights q, sf --level-----'--own------> fold_rows_balanced --> Folded --'

Two weights that the same rows multiply share their level, the smaller one of each block, so that the rows are folded
once. The conformance suite has the definition: ../core_kernels/fold/oracle_balanced.py.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from . import _direct as ops
from .weights import Balanced, Folded, WeightOperand


class GroupedRows(NamedTuple):
    """MX rows q (R, K), sf (R, K/32), and where each group of them ends, (G,) int32."""

    q: Tensor
    sf: Tensor
    ends: Tensor

    @classmethod
    def of_weights(cls, q: Tensor, sf: Tensor) -> "GroupedRows":
        """The rows of q (G, N, K), a group of each matrix."""
        groups, n, _ = q.shape
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device=q.device) * n
        return cls(q.flatten(0, 1), sf.flatten(0, 1), ends)

    def level(self) -> Tensor:
        """(G, K/32) uint8, see `group_levels`."""
        return ops.group_levels(ops.span_levels(self.sf, self.ends), self.ends)

    def folded(self, own: Tensor, other: Tensor) -> Folded:
        return Folded(*ops.fold_rows_balanced(self.q, self.sf, own, other, self.ends))


def balanced(rows: Balanced, weights: Sequence[WeightOperand], group_ends: Tensor) -> tuple[Folded, list[Folded]]:
    """rows (M, K) and Balanced weights (G, N, K) that they are multiplied by, folded."""
    x, sides = GroupedRows(*rows, group_ends), []
    for w in weights:
        assert isinstance(w, Balanced)
        sides.append((w.q.shape, GroupedRows.of_weights(*w)))
    own, other = x.level(), reduce(torch.minimum, [w.level() for _, w in sides])
    folded = []
    for shape, w in sides:
        q, sf = w.folded(other, own)
        folded.append(Folded(q.view(shape), sf.view(shape[:-1])))
    return x.folded(own, other), folded
