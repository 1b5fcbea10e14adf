"""The quantization kernels between guards, in Triton's interpreter; tests/conformance has every value and option."""

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.quantize import oracle
from mxep.core_kernels.quantize import plan as quantize

BF16 = ml_dtypes.bfloat16


def awkward(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Blocks of every magnitude from subnormal to the largest, with zeros of both signs, and a few NaN and inf."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-149, 127, (*shape[:-1], 1)).astype(np.float64))
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(dtype)
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 8)] = 0.0
    flat[rng.integers(0, flat.size, flat.size // 8)] = -0.0
    specials = rng.integers(0, flat.size, 6)
    flat[specials] = np.array([np.nan, -np.nan, np.inf, -np.inf, np.inf, np.nan], dtype)
    return x


def check(triton_op, name: str, x: np.ndarray, **options) -> None:
    got = triton_op(getattr(quantize, name), x, **options)
    want = getattr(oracle, name)(x, **options)
    want = want if isinstance(want, tuple) else (want,)
    for out, g, w in zip(getattr(quantize, name).outputs, got, want, strict=True):
        np.testing.assert_array_equal(g, w, err_msg=f"{name}: {out}")


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("shape", [(64, 64), (96, 160), (2, 32, 96)], ids=str)
@pytest.mark.parametrize("name", ["quantize_row", "quantize_row_packed", "quantize_col"])
def test_bytes(triton_op, name, shape, dtype):
    if name == "quantize_row_packed":
        shape = (int(np.prod(shape[:-1])), shape[-1])
    x = awkward(np.random.default_rng(0), shape, dtype)
    check(triton_op, name, x)


@pytest.mark.parametrize("rows", [1, 33, 65])
def test_any_number_of_rows(triton_op, rows):
    x = awkward(np.random.default_rng(rows), (rows, 96), BF16)
    check(triton_op, "quantize_row", x)
    check(triton_op, "quantize_row_packed", x)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("quantize_row", (0, 64)),
        ("quantize_row_packed", (0, 64)),
        ("quantize_col", (0, 64)),
        ("quantize_col", (2, 0, 64)),
        ("quantize_col", (0, 32, 64)),
        ("quantize_row", (4, 0)),
    ],
)
def test_nothing_to_do(triton_op, name, shape):
    check(triton_op, name, np.zeros(shape, BF16))


def test_every_e4m3_tie(triton_op):
    """Values halfway between neighbouring E4M3 values and one ulp to either side, under scale 1."""
    values = oracle_math.E4M3_VALUES[:0x7F]
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    x = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(1e9))])
    x = np.concatenate([x, -x])
    rows = np.full((len(x), 32), 448, np.float32)
    rows[:, 1] = x
    check(triton_op, "quantize_row", rows)
