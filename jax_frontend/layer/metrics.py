"""What a step tells: balance of the experts and bytes between ranks, from the statistics of a layer.

y, stats = moe.apply(...)      inside jit
moe_metrics(stats, ...)        outside, on the host
"""

import numpy as np

from ...core_kernels.policy.metrics import MoEMetrics, describe
from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from .moe import MoEStats


def moe_metrics(
    stats: MoEStats, dim: int, *, recipe: Recipe | str = "mxfp8", ranks: int = 1, prob_in: ProbIn = "swiglu"
) -> MoEMetrics:
    """The metrics of one forward of a layer as a dict of Python numbers; the host waits for the device.

    stats: of `moe.apply`, outside of jit. dim, recipe, prob_in: of the layer. ranks: that share its experts, a divisor
    of their number. `MoEMetrics` names the entries; wire_nbytes counts rows, not the unused rows of buffers with a
    capacity. Raises TypeError and ValueError for other sizes and names.

    >>> import jax
    >>> config = MoEConfig(dim=32, hidden_dim=64, num_experts=4, top_k=2, force_balance=True)
    >>> _, stats = moe.apply(moe.init(jax.random.key(0), config), jax.numpy.ones((6, 32)), config)
    >>> metrics = moe_metrics(stats, 32, ranks=2)
    >>> metrics["tokens_per_expert"], metrics["imbalance"], metrics["wire_nbytes"]
    ([3, 3, 3, 3], 1.0, 2424)
    """
    counts = np.asarray(stats.counts).tolist()
    return describe(counts, int(stats.overflow), dim, Recipe.parse(recipe), ranks, prob_in)
