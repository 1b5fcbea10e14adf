"""The shapes that benchmarks run. M tokens, K row length, G local experts."""

from typing import NamedTuple


class Matrix(NamedTuple):
    M: int
    K: int


class Received(NamedTuple):
    """What a rank holds after an all-to-all: M rows of K values from `ranks` ranks for G local experts."""

    M: int
    K: int
    G: int
    ranks: int


CPU_MATRICES = (Matrix(8192, 4096), Matrix(1024, 2048))
CPU_RECEIVED = (Received(8192, 4096, G=8, ranks=4), Received(1024, 2048, G=4, ranks=2))
