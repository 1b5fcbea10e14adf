"""The exchange of rows between ranks, and its gradient, in numpy. Bytes are exact."""

from collections.abc import Sequence

import numpy as np

from ..oracle_math import Array


def all_to_all(inputs: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """inputs[r]: the rows of rank r; splits[r][s]: the number of rows that rank r sends to rank s -> received rows.

    Received rows are in the order of the sending ranks.
    """
    ranks = range(len(inputs))
    parts = [np.split(x, np.cumsum(split)[:-1]) for x, split in zip(inputs, splits, strict=True)]
    return [np.concatenate([parts[sender][receiver] for sender in ranks]) for receiver in ranks]


def all_to_all_vjp(douts: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """Cotangents of `inputs`: the inverse exchange."""
    return all_to_all(douts, np.transpose(splits).tolist())
