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

import jax
import jax.numpy as jnp

from . import ops
from .weights import KN, Balanced, Folded, Quantized


class GroupedRows(NamedTuple):
    """MX rows q (R, K), sf (R, K/32), and where each group of them ends, (G,) int32."""

    q: jax.Array
    sf: jax.Array
    ends: jax.Array

    @classmethod
    def of_weights(cls, q: jax.Array, sf: jax.Array) -> "GroupedRows":
        """The rows of q (G, N, K), a group of each matrix."""
        groups, n, _ = q.shape
        ends = jnp.arange(1, groups + 1, dtype=jnp.int32) * n
        return cls(q.reshape(groups * n, q.shape[2]), sf.reshape(groups * n, sf.shape[2]), ends)

    def level(self) -> jax.Array:
        """(G, K/32) uint8, see `group_levels`."""
        return ops.group_levels(ops.span_levels(self.sf, self.ends), self.ends)

    def folded(self, own: jax.Array, other: jax.Array) -> Folded:
        return Folded(*ops.fold_rows_balanced(self.q, self.sf, own, other, self.ends))


def balanced(
    rows: Balanced, weights: Sequence[jax.Array | Quantized | KN], group_ends: jax.Array
) -> tuple[Folded, list[Folded]]:
    """rows (M, K) and Balanced weights (G, N, K) that they are multiplied by, folded."""
    x, sides = GroupedRows(*rows, group_ends), []
    for w in weights:
        assert isinstance(w, Balanced)
        sides.append((w.q.shape, GroupedRows.of_weights(*w)))
    own, other = x.level(), reduce(jnp.minimum, [w.level() for _, w in sides])
    folded = []
    for shape, w in sides:
        q, sf = w.folded(other, own)
        folded.append(Folded(q.reshape(shape), sf.reshape(shape[:-1])))
    return x.folded(own, other), folded
