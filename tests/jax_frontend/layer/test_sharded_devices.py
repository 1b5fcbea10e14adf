"""The checks that tests/gpu/exchange/test_sharded.py runs on GPUs, on two CPU devices. On four devices, and more of it:
../ops/test_split.py, test_sharded.py and ../exchange/test_peer_memory.py."""

from collections.abc import Callable

import jax
import pytest
from jax.sharding import AxisType

from ...gpu.exchange.sharded import CHECKS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_cpu_devices(check: Callable) -> None:
    """On automatic axes; test_split.py and test_sharded.py have the explicit ones."""
    check(jax.devices("cpu")[:2], AxisType.Auto)
