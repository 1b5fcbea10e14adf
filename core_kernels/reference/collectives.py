"""The all-to-all of rows between ranks and its gradient, in numpy: exact bytes."""

from collections.abc import Sequence

import numpy as np

from ..oracle_math import Array


def all_to_all(inputs: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """inputs[r]: rows of rank r. splits[r][s]: number of rows from rank r to rank s. -> rows that each rank receives.

    Received rows are in the order of their sending ranks.
    """
    ranks = range(len(inputs))
    parts = [np.split(x, np.cumsum(split)[:-1]) for x, split in zip(inputs, splits, strict=True)]
    return [np.concatenate([parts[sender][receiver] for sender in ranks]) for receiver in ranks]


def all_to_all_vjp(douts: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """Cotangents of `inputs`: each row returns to its sending rank."""
    return all_to_all(douts, np.transpose(splits).tolist())
