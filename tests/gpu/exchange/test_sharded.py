"""jax.jit with sharded inputs on one GPU and on two: CUDA C++ calls that XLA divides, Triton calls, the layer."""

from collections.abc import Callable

import jax
import pytest
from jax.sharding import AxisType

from .sharded import CHECKS


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.several_gpus)])
def test_on_gpus(count: int, check: Callable, kind: AxisType) -> None:
    devices = jax.devices("gpu")[:count]
    if len(devices) < count:
        pytest.skip("two devices need two GPUs")
    check(devices, kind)
