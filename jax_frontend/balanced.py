"""The operands of form "balanced": MX bytes that a product folds by the levels of both of its operands.

    rows    q, sf --levels----.--own------> fold_rows_balanced --> Folded --.
                               X other                                      +--> the folded products
    weights q, sf --levels----'--own------> fold_rows_balanced --> Folded --'

Two weights that the same rows multiply share their levels, the smaller one of each block, so that the rows are folded
once. The conformance suite has the definition: ../core_kernels/fold/oracle_balanced.py.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from . import ops
from .weights import Balanced, Folded


def balanced(rows: Balanced, weights: Sequence[Balanced], group_ends: jax.Array) -> tuple[Folded, list[Folded]]:
    """rows (M, K) and weights (G, N, K) that they are multiplied by, folded."""
    flat = [Balanced(*(x.reshape(-1, x.shape[-1]) for x in w)) for w in weights]
    ends = [jnp.arange(1, w.q.shape[0] + 1, dtype=jnp.int32) * w.q.shape[1] for w in weights]
    own, other = group_levels(rows.sf, group_ends), reduce(jnp.minimum, map(group_levels, (w.sf for w in flat), ends))
    folded = []
    for w, of, shaped in zip(flat, ends, weights, strict=True):
        qf, row_sf = ops.fold_rows_balanced(*w, other, own, of)
        folded.append(Folded(qf.reshape(shaped.q.shape), row_sf.reshape(shaped.q.shape[:-1])))
    return Folded(*ops.fold_rows_balanced(*rows, own, other, group_ends)), folded


def group_levels(sf: jax.Array, group_ends: jax.Array) -> jax.Array:
    """sf (M, K/32) -> (G, K/32)."""
    return ops.group_levels(ops.span_levels(sf, group_ends), group_ends)
