"""Metrics of a step of a layer: balance of the experts and bytes between the ranks, from the counts of rows.

counts (E,), overflow --moe_metrics, in a frontend--> describe --> dict of numbers
"""

from collections.abc import Sequence
from typing import TypedDict, get_args

from ..formats import BLOCK
from ..launch import fail
from .prob_in import ProbIn, check_prob_in
from .recipe import LegName, Recipe


class MoEMetrics(TypedDict):
    """Metrics of one layer.

    Attributes:
        tokens_per_expert: rows of each expert, of all ranks that share the experts.
        imbalance: the largest of them divided by their mean; 1 is balanced, E is one expert with everything, 0 no
            tokens.
        dead_experts: experts without a row.
        overflow: rows that found no room; always 0 in PyTorch.
        wire_nbytes: bytes of the rows in the four all-to-alls of a forward and backward, of all ranks together. Rows of
            a rank's own experts are in it: 1 / ranks of the rows if experts are chosen evenly. 0 on one rank. A row per
            expert of a token counts, as deduplicate=None sends it; the counts do not tell how much less the others
            send.
    """

    tokens_per_expert: list[int]
    imbalance: float
    dead_experts: int
    overflow: int
    wire_nbytes: int


def row_nbytes(dim: int, recipe: Recipe) -> int:
    """Bytes of one row on its four ways: dispatch and combine, forward and backward.

    Args:
        dim: values of a row.
        recipe: of the layer.

    Returns:
        Bytes.

    Example:
        >>> row_nbytes(64, Recipe.parse("bf16")), row_nbytes(64, Recipe.parse("mxfp8"))
        (512, 388)
        >>> row_nbytes(64, Recipe.parse("mxfp8", mxfp8_all_to_all=("dispatch",)))
        450
    """
    bf16, quantized = 2 * dim, dim + dim // BLOCK
    return sum(quantized if recipe.sends_mx(leg) else bf16 for leg in get_args(LegName))


def describe(counts: Sequence[int], overflow: int, dim: int, recipe: Recipe, ranks: int, prob_in: ProbIn) -> MoEMetrics:
    """The metrics of counts.

    Args:
        counts: (E,) rows of each expert.
        overflow: rows that did not fit.
        dim: values of a row.
        recipe: of the layer.
        ranks: that share the experts.
        prob_in: of the layer.

    Returns:
        The metrics.

    Raises:
        TypeError: sizes that are no integers, in the name of `moe_metrics`.
        ValueError: sizes and names that are not allowed, in the name of `moe_metrics`.

    Example:
        >>> describe([6, 2, 0, 0], 0, 64, Recipe.parse("mxfp8"), 2, "combine")["imbalance"]
        3.0
    """
    op = "moe_metrics"
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
