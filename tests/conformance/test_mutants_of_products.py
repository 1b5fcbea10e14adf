"""mxep.conformance: a grouped product that reads one scale wrong differs in a case."""

from collections.abc import Callable

import numpy as np
import pytest
from mxep.core_kernels.conformance.cases import CONFORMANCE
from mxep.core_kernels.conformance.definitions import DEFINITIONS
from mxep.core_kernels.formats import E8M0_BIAS, E8M0_NAN
from mxep.core_kernels.registry import OPS

from .test_runner import report

Array = np.ndarray
Change = Callable[[Array], Array]
SCALED = [op for op in dict.fromkeys(case.op for case in CONFORMANCE.values())
          if op.startswith("grouped_") and any(name.endswith("sf") for name in OPS[op].inputs)]  # fmt: skip
SIDES = [(op, name) for op in SCALED for name in OPS[op].inputs if name.endswith("sf")]


def clip(sf: Array) -> Array:
    """To bytes 63 to 191; a NaN too."""
    return np.clip(np.where(np.isnan(sf), 2.0**128, sf), 2.0**-64, 2.0**64)


def read_nan_as_largest(sf: Array) -> Array:
    return np.where(np.isnan(sf), 2.0**127, sf)


def lose_the_largest(sf: Array) -> Array:
    return np.where(sf == 2.0**127, 2.0**126, sf)


def lose_the_smallest(sf: Array) -> Array:
    """2^-127, and 2^-126 of fp32 scales."""
    return np.where(sf == sf.min(initial=np.inf, where=sf < 2.0**-125), 2.0**-125, sf)


def read(change: Change, sf: Array) -> Array:
    """Scales, bytes or fp32, as a backend reads them that has the fault `change`."""
    if sf.dtype != np.uint8:
        return change(sf).astype(sf.dtype)
    value = change(np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, sf.astype(np.int32) - E8M0_BIAS)))
    return np.where(np.isnan(value), E8M0_NAN, np.log2(value) + E8M0_BIAS).astype(np.uint8)


def mutant(op: str, change: Change, *sides: str) -> Callable[..., Array]:
    """The definition with scales of these inputs that are read wrong."""

    def wrong(*arrays: Array, out_dtype: str = "bfloat16") -> Array:
        named = zip(OPS[op].inputs, arrays, strict=True)
        given = [read(change, x) if name in sides else x for name, x in named]
        return DEFINITIONS[op](*given, out_dtype=out_dtype)

    return wrong


def differs(op: str, wrong: Callable[..., Array], dtype: str) -> bool:
    return not report(f"{op}-extreme_scales-{dtype}", **{op: wrong}).agrees


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", SCALED)
def test_scales_that_are_clipped_on_both_sides_differ(op: str, dtype: str) -> None:
    both = [name for name in OPS[op].inputs if name.endswith("sf")]
    assert differs(op, mutant(op, clip, *both), dtype)
    assert not differs(op, DEFINITIONS[op], dtype)


@pytest.mark.parametrize("change", [clip, read_nan_as_largest, lose_the_largest, lose_the_smallest])
@pytest.mark.parametrize(("op", "side"), SIDES)
def test_a_scale_that_one_side_reads_wrong_differs(op: str, side: str, change: Change) -> None:
    """`fold_groups` writes no NaN scale: weight gradients of its operands have none."""
    nan = op != "grouped_wgrad_fold" or change is not read_nan_as_largest
    assert differs(op, mutant(op, change, side), "bfloat16") == nan


def test_every_end_of_the_scales_is_on_both_sides() -> None:
    for op, side in SIDES:
        case = CONFORMANCE[f"{op}-extreme_scales-float32"]
        sf = dict(zip(OPS[op].inputs, case.arrays(), strict=True))[side]
        if sf.dtype == np.uint8:
            wanted = {0, 1, 254} | ({E8M0_NAN} if op != "grouped_wgrad_fold" else set())
            assert wanted <= set(sf.flat), (op, side)
