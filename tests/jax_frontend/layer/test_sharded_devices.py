"""The checks that tests/gpu/exchange/test_sharded.py runs on GPUs, on two CPU devices."""

from collections.abc import Callable

import jax
import pytest
from jax.sharding import AxisType

from ...gpu.exchange.sharded import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_cpu_devices(check: Callable) -> None:
    """On automatic axes; test_split.py and test_sharded.py have the explicit ones."""
    check(jax.devices("cpu")[:2], AxisType.Auto)
