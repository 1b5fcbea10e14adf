"""quantize_*, dequantize: exact bytes."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
from mxep.core_kernels.formats import BLOCK, Rounding
from mxep.core_kernels.quantize import oracle

from .. import check
from ..cases import QUANTIZE, ROW_ONLY

Ops = Mapping[str, Callable]
MODES = [(rounding, satfinite) for rounding in Rounding for satfinite in (False, True)]
MODE_NAMES = [f"{rounding.name.lower()}{'_satfinite' * satfinite}" for rounding, satfinite in MODES]


@cache
def expected(op: str, name: str, rounding: Rounding, satfinite: bool):
    return getattr(oracle, op)(QUANTIZE[name], rounding=rounding, satfinite=satfinite)


OPS_OF_A_CASE = [
    pytest.param(op, name, id=f"{op}-{name}", marks=[pytest.mark.composed(op)] * (op == "quantize_both"))
    for name, x in QUANTIZE.items()
    for op in ("quantize_row", "quantize_row_packed", "quantize_col", "quantize_both")
    if not (op == "quantize_row_packed" and x.ndim == 3)
    if not (op in ("quantize_col", "quantize_both") and name in ROW_ONLY)
]


@pytest.mark.parametrize(("op", "name"), OPS_OF_A_CASE)
@pytest.mark.parametrize(("rounding", "satfinite"), MODES, ids=MODE_NAMES)
def test_quantize_bytes(ops: Ops, op: str, name: str, rounding: Rounding, satfinite: bool) -> None:
    got = ops[op](QUANTIZE[name], rounding=rounding, satfinite=satfinite)
    check.same_bytes(got, expected(op, name, rounding, satfinite))


def test_the_one_magnitude_whose_quotient_rounds_down_to_a_power_of_two(ops: Ops) -> None:
    """In docs/concepts/recipes.md: 0x1.c00002p-119 / 448 is 2^-127 in fp32. Its neighbours have scales of their own."""
    x = np.zeros((1, 3 * BLOCK), np.float32)
    x[0, ::BLOCK] = np.array(
        [float.fromhex("0x1.cp-119"), float.fromhex("0x1.c00002p-119"), float.fromhex("0x1.c00004p-119")]
    )
    q, sf = ops["quantize_row"](x, rounding=Rounding.RCEIL)
    assert np.asarray(sf).tolist() == [[0, 0, 1]]
    assert np.asarray(q)[0, ::BLOCK].tolist() == [0x7E, 0x7E, 0x76]


def all_byte_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Every element under every scale: q (256, 256), sf (256, 8)."""
    q = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return q, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 // BLOCK, axis=1)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_dequantize_every_element_under_every_scale(ops: Ops, out_dtype: str) -> None:
    q, sf = all_byte_pairs()
    check.same_bytes(ops["dequantize"](q, sf, out_dtype=out_dtype), oracle.dequantize(q, sf, out_dtype=out_dtype))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 5, 96)])
def test_dequantize_shapes(ops: Ops, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, 256, shape, np.uint8)
    sf = rng.integers(0, 256, (*shape[:-1], shape[-1] // BLOCK), np.uint8)
    check.same_bytes(ops["dequantize"](q, sf, out_dtype="float32"), oracle.dequantize(q, sf, out_dtype="float32"))
