"""The samples of a clock."""

from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Median time in microseconds, spread = (p90 - p10) / median, and the number of rounds."""

    us: float
    spread: float
    n: int


def summarize(seconds: list[float]) -> Sample:
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Sample(us=round(median * 1e6, 2), spread=round((high - low) / median, 3), n=len(seconds))
