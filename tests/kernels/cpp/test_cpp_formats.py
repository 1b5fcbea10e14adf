"""The constants of formats.h, which C++ and CUDA share, equal the constants of formats.py."""

import re
from pathlib import Path

import numpy as np
import pytest
from mxep.core_kernels import formats
from mxep.core_kernels.swiglu import oracle as swiglu_oracle

HEADER = (Path(__file__).resolve().parents[3] / "core_kernels/formats.h").read_text()
FOUND = dict(re.findall(r"\b(k\w+) = ([-\w.]+?)[fu]?[,; ]", HEADER))


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


EXPECTED = {
    "kBlock": formats.BLOCK,
    "kSpan": formats.SPAN,
    "kSquare": formats.SQUARE,
    "kSmallestScale": bits(formats.SMALLEST_SCALE),
    "kHeadroom": formats.HEADROOM,
    "kWeightHeadroom": formats.WEIGHT_HEADROOM,
    "kGradientHeadroom": formats.GRADIENT_HEADROOM,
    "kE4m3Nan": formats.E4M3_NAN,
    "kE8m0Max": formats.E8M0_MAX,
    "kE8m0Nan": formats.E8M0_NAN,
    "kInf": bits(np.inf),
    "kNan": bits(np.nan),
    "kE8m0Smallest": bits(2.0**-formats.E8M0_BIAS),
    "kQuotientRoundsDown": bits(formats.E4M3_MAX * 2.0**-formats.E8M0_BIAS) + 1,
    "kRceil": int(formats.Rounding.RCEIL),
    "kFloor": int(formats.Rounding.FLOOR),
}
FLOATS = {
    "kLog2e": formats.LOG2E,
    **{f"kExp2C{i}": value for i, value in enumerate(formats.EXP2_COEFFICIENTS, 1)},
    "kRoundToInteger": float(swiglu_oracle.MAGIC),
}


def test_every_constant_is_compared() -> None:
    assert set(FOUND) == set(EXPECTED) | set(FLOATS)


@pytest.mark.parametrize("name", EXPECTED)
def test_integers(name: str) -> None:
    assert int(FOUND[name].rstrip("u"), 0) == EXPECTED[name]


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    assert np.float32(FOUND[name]) == np.float32(FLOATS[name])
