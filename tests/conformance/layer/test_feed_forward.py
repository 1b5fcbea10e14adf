"""The cases of mxep.conformance of a whole feed-forward, with exact products, on every adapter that has one."""

import numpy as np
import pytest
from mxep.core_kernels.cases import Array
from mxep.core_kernels.conformance import check
from mxep.core_kernels.conformance.cases import FEED_FORWARD

from ..backends import adapter, loaded
from .layers import RUNS

REST = [name for name in FEED_FORWARD if name != "swiglu_ffn-one_term"]
"""JAX compiles each; other tests of this folder compare a feed-forward in dB."""


@pytest.mark.needs("swiglu_ffn")
@pytest.mark.parametrize(
    "name", ["swiglu_ffn-one_term", *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def test_the_feed_forward_is_as_defined(backend: str, name: str) -> None:
    of = check.Definition(FEED_FORWARD[name])

    def swiglu_ffn(x: Array, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array) -> Array:
        weights, given = {"w1": w1, "w3": w3, "w2": w2}, prob if len(prob) else np.ones(len(x), np.float32)
        return adapter(backend).swiglu_ffn(x, weights, group_ends, given, np.zeros_like(x), RUNS["mxfp8"])["out"]

    check.as_defined(loaded(backend), of, swiglu_ffn(*of.arrays))
