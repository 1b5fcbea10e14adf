"""The quantization kernels against the oracle, byte for byte, in Triton's interpreter."""

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.quantize import oracle
from mxep.core_kernels.quantize import plan as quantize

BF16 = ml_dtypes.bfloat16


def from_bits(bits: np.ndarray, dtype) -> np.ndarray:
    return bits.astype(np.uint16 if dtype == BF16 else np.uint32).view(dtype)


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


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_options(triton_op, rounding, satfinite):
    x = awkward(np.random.default_rng(1), (64, 64), np.float32)
    for name in ("quantize_row", "quantize_col"):
        check(triton_op, name, x, rounding=rounding, satfinite=satfinite)


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


@pytest.mark.parametrize("rounding", list(Rounding))
def test_all_bf16(triton_op, rounding):
    """Each of the 65536 values, in blocks of equal magnitude and in blocks with one 1.0 to scale them."""
    values = from_bits(np.arange(1 << 16), BF16).reshape(-1, 32)
    spread = values.reshape(32, -1).T.copy()
    spread[:, 0] = 1.0
    for x in (values, spread):
        check(triton_op, "quantize_row", x, rounding=rounding)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_scale_boundary(triton_op, rounding):
    """Block maxima around each power of two, each multiple of 448 and their neighbours, at every exponent."""
    mantissa = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x600002, 0x7FFFFF])
    bits = (np.arange(256)[:, None] << 23 | mantissa).reshape(-1, 1)
    x = from_bits(np.repeat(bits, 32, axis=1), np.float32)
    with np.errstate(invalid="ignore"):
        x[:, 1:] *= np.random.default_rng(2).uniform(-1, 1, (len(x), 31)).astype(np.float32)
    check(triton_op, "quantize_row", x, rounding=rounding)


def test_every_e4m3_tie(triton_op):
    """Values halfway between neighbouring E4M3 values and one ulp to either side, under scale 1."""
    values = oracle_math.E4M3_VALUES[:0x7F]
    ties = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    x = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(1e9))])
    x = np.concatenate([x, -x])
    rows = np.full((len(x), 32), 448, np.float32)
    rows[:, 1] = x
    check(triton_op, "quantize_row", rows)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_dequantize_every_pair(triton_op, out_dtype):
    """Every element byte with every scale byte; every NaN has the canonical bit pattern."""
    sf, q = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8), indexing="ij")
    sf = np.ascontiguousarray(sf[:, ::32])
    (got,) = triton_op(quantize.dequantize, q, sf, out_dtype=out_dtype)
    want = oracle.dequantize(q, sf, out_dtype)
    bits = np.uint16 if out_dtype == "bfloat16" else np.uint32
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


@pytest.mark.parametrize("shape", [(0, 32), (33, 96), (2, 3, 160)], ids=str)
def test_dequantize_shapes(triton_op, shape):
    rng = np.random.default_rng(3)
    q = rng.integers(0, 256, shape, np.uint8)
    sf = rng.integers(0, 256, (*shape[:-1], shape[-1] // 32), np.uint8)
    (got,) = triton_op(quantize.dequantize, q, sf, out_dtype="float32")
    np.testing.assert_array_equal(got.view(np.uint32), oracle.dequantize(q, sf, "float32").view(np.uint32))
