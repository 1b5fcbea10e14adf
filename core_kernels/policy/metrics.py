"""Metrics of a step of a layer: balance of the experts and bytes between the ranks, from the counts of rows.

counts (E,), overflow --MoEStats.metrics, in a frontend--> describe --> dict of numbers
"""

from collections.abc import Sequence
from typing import TypedDict, get_args

from ..formats import BLOCK
from ..launch import fail
from .prob_in import ProbIn, check_prob_in
from .recipe import Recipe, TransferName


class MoEMetrics(TypedDict):
    """Metrics of one layer.

    Args:
        tokens_per_expert: Rows of each expert, of all ranks that share the experts.
        imbalance: The largest of them divided by their mean. 1 is balanced; E is one expert with all rows; 0 is no
            row.
        dead_experts: Experts without a row.
        overflow: Rows that did not fit; always 0 in PyTorch.
        wire_nbytes: Bytes of the rows in the four all-to-alls of a forward and backward, of all ranks together; 0 on
            one rank. It includes the rows of a rank's own experts: 1 / ranks of the rows if experts are chosen evenly.
            It counts a row per expert of a token, as `deduplicate=None` sends rows, because the counts do not show how
            many rows the other choices save.
    """

    tokens_per_expert: list[int]
    imbalance: float
    dead_experts: int
    overflow: int
    wire_nbytes: int


def row_nbytes(dim: int, recipe: Recipe) -> int:
    """Compute the bytes of one row in its four all-to-alls: dispatch and combine, forward and backward.

    Args:
        dim: Values of the row, a multiple of 32.
        recipe: The recipe, which has the all-to-alls in MXFP8.

    Returns:
        The bytes.

    Example:
        >>> row_nbytes(64, Recipe.parse("bf16")), row_nbytes(64, Recipe.parse("mxfp8"))
        (512, 388)
        >>> row_nbytes(64, Recipe.parse("mxfp8", mxfp8_all_to_all=("dispatch",)))
        450
    """
    bf16, quantized = 2 * dim, dim + dim // BLOCK
    return sum(quantized if recipe.sends_mx(transfer) else bf16 for transfer in get_args(TransferName))


def describe(counts: Sequence[int], overflow: int, dim: int, recipe: Recipe, ranks: int, prob_in: ProbIn) -> MoEMetrics:
    """Compute the metrics of counts.

    Args:
        counts: Rows of each expert.
        overflow: Rows that did not fit.
        dim: Values of a row, a positive multiple of 32.
        recipe: Of the layer.
        ranks: Ranks that share the experts, a divisor of their number.
        prob_in: Of the layer.

    Returns:
        The metrics.

    Raises:
        TypeError: For sizes that are no int. The message names `MoEStats.metrics`.
        ValueError: For sizes and names that are not allowed.

    Example:
        >>> describe([6, 2, 0, 0], 0, 64, Recipe.parse("mxfp8"), 2, "combine")["imbalance"]
        3.0
    """
    op = "MoEStats.metrics"
    for name, size, multiple in (("dim", dim, BLOCK), ("ranks", ranks, 1)):
        if not isinstance(size, int) or isinstance(size, bool):
            fail(TypeError, op, name, f"a {type(size).__name__}", "allowed: an int")
        if not 1 <= size < 2**31 or size % multiple:
            fail(ValueError, op, name, size, f"allowed: positive multiples of {multiple} below 2^31")
    if len(counts) % ranks:
        fail(ValueError, op, "ranks", ranks, f"allowed: divisors of {len(counts)}, the experts, which the ranks share")
    check_prob_in(op, prob_in)
    rows = sum(counts)
    nbytes = row_nbytes(dim, recipe) + (8 if prob_in == "swiglu" else 0)  # a weight of fp32 each way
    return MoEMetrics(
        tokens_per_expert=list(counts),
        imbalance=max(counts) * len(counts) / rows if rows else 0.0,
        dead_experts=sum(count == 0 for count in counts),
        overflow=overflow,
        wire_nbytes=rows * nbytes if ranks > 1 else 0,
    )
