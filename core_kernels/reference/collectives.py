"""The exchange of rows between ranks and its gradient, in numpy: bytes, exact."""

from collections.abc import Sequence

import numpy as np

from ..oracle_math import Array


def all_to_all(inputs: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """inputs[r] is rank r's rows, splits[r][s] how many of them go to rank s; returns what each rank holds after.

    Received rows lie in the order of the sending rank.
    """
    ranks = range(len(inputs))
    parts = [np.split(x, np.cumsum(split)[:-1]) for x, split in zip(inputs, splits, strict=True)]
    return [np.concatenate([parts[sender][receiver] for sender in ranks]) for receiver in ranks]


def all_to_all_vjp(douts: Sequence[Array], splits: Sequence[Sequence[int]]) -> list[Array]:
    """Cotangents of `inputs`: the rows go back where they came from."""
    return all_to_all(douts, np.transpose(splits).tolist())
