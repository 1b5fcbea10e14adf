"""The oracle against two independent references: ONNX's reference evaluator and gfloat.

Both agree with the oracle on every byte, except for the rows of the table. A test asserts each row: the inputs that
differ are exactly those named, and the reference gives the bytes named.

| reference | inputs | oracle | reference | why |
| --- | --- | --- | --- | --- |
| onnx, up | 0 < fp32(amax/448) <= 2^-127 | byte 0 | byte 1 | Cast adds one to the exponent field for any fraction bit; a subnormal at or below 2^-127 already fits under byte 0 = 2^-127 |
| onnx, both | an element of a NaN block | 0x7F | 0x7F or 0xFF | Cast keeps the sign of a NaN; the contract writes one NaN |
| gfloat, exact ceil | amax = the fp32 after 448 * 2^-127 | byte 0 | byte 1 | the contract rounds amax/448 to fp32 first, which lands on 2^-127; the values are the same, since 448.00005 saturates to 448 |
| gfloat, floor | amax infinite | byte 255, all NaN | byte 254, saturated | gfloat clips the scale; that is the contract's `satfinite`, byte for byte |
"""  # noqa: E501

import math

import gfloat
import numpy as np
import pytest
from gfloat.formats import format_info_mxfp8_e4m3, format_info_ocp_e4m3, format_info_ocp_e8m0
from mxep.core_kernels import oracle_math
from mxep.core_kernels.formats import BLOCK, E4M3_NAN, Rounding
from mxep.core_kernels.quantize import oracle
from onnx import TensorProto as T
from onnx import helper
from onnx.reference import ReferenceEvaluator

BLOCKS = [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
CHUNK = 50_000


def random_blocks(rng: np.random.Generator, count: int) -> np.ndarray:
    """fp32 blocks (count, 32): magnitudes from the smallest subnormal to the largest finite value, one block in
    eight of raw random bits (NaN and infinity among them), one in eight with an amax at or next to 448 * 2^k."""
    magnitude = np.exp2(rng.uniform(-149, 121, (count, 1)))
    x = np.clip(rng.standard_t(3, (count, BLOCK)) * magnitude, -3.4e38, 3.4e38).astype(np.float32)
    eighth = count // 8
    x[:eighth] = rng.integers(0, 2**32, (eighth, BLOCK), np.uint32).view(np.float32)
    edge = np.ldexp(np.float32(448), rng.integers(-157, 119, eighth)).astype(np.float32).view(np.uint32)
    edge = (edge + rng.integers(-1, 2, eighth)).astype(np.uint32).view(np.float32)
    x[eighth : 2 * eighth] = rng.uniform(-1, 1, (eighth, BLOCK)).astype(np.float32) * edge[:, None]
    x[eighth : 2 * eighth, 0] = edge
    return x


def onnx_quantizer(divisor: float, round_mode: str) -> ReferenceEvaluator:
    """x (B, 32) -> E8M0 of amax/divisor, E4M3 of x/scale: the whole conversion as an ONNX graph."""
    nodes = [
        helper.make_node("Abs", ["x"], ["abs"]),
        helper.make_node("ReduceMax", ["abs", "axes"], ["amax"], keepdims=1),
        helper.make_node("Div", ["amax", "divisor"], ["ratio"]),
        helper.make_node("Cast", ["ratio"], ["sf"], to=T.FLOAT8E8M0, saturate=1, round_mode=round_mode),
        helper.make_node("Cast", ["sf"], ["scale"], to=T.FLOAT),
        helper.make_node("Div", ["x", "scale"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["q"], to=T.FLOAT8E4M3FN, saturate=1),
    ]
    constants = [
        helper.make_tensor("axes", T.INT64, [1], [1]),
        helper.make_tensor("divisor", T.FLOAT, [], [divisor]),
    ]
    graph = helper.make_graph(
        nodes,
        "mx",
        [helper.make_tensor_value_info("x", T.FLOAT, [None, BLOCK])],
        [
            helper.make_tensor_value_info("sf", T.FLOAT8E8M0, None),
            helper.make_tensor_value_info("q", T.FLOAT8E4M3FN, None),
        ],
        constants,
    )
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]))


@pytest.mark.parametrize(
    ("rounding", "divisor", "round_mode"), [(Rounding.RCEIL, 448.0, "up"), (Rounding.FLOOR, 256.0, "down")]
)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_onnx_agrees_on_a_million_blocks(rounding: Rounding, divisor: float, round_mode: str, blocks: int) -> None:
    rng = np.random.default_rng(7)
    reference = onnx_quantizer(divisor, round_mode)
    seen = {"nan": 0, "tiny": 0, "byte 0": 0}
    for _ in range(blocks // CHUNK):
        x = random_blocks(rng, CHUNK)
        with np.errstate(all="ignore"):
            ref_sf, ref_q = (np.asarray(a).view(np.uint8) for a in reference.run(None, {"x": x}))
            ratio = np.abs(x).max(-1) / np.float32(divisor)
        q, sf = oracle.quantize_row(x, rounding)
        sf, ref_sf = sf[:, 0], ref_sf[:, 0]

        tiny = (ratio > 0) & (ratio <= np.float32(2.0**-127)) & (rounding is Rounding.RCEIL)
        np.testing.assert_array_equal(sf != ref_sf, tiny)
        assert (sf[tiny] == 0).all()
        assert (ref_sf[tiny] == 1).all()

        nan = sf == 255
        np.testing.assert_array_equal(nan, ~np.isfinite(ratio))
        assert (q[nan] == E4M3_NAN).all()
        assert (ref_q[nan] & 0x7F == E4M3_NAN).all()

        rest = ~nan & ~tiny
        np.testing.assert_array_equal(q[rest], ref_q[rest])
        seen["nan"] += nan.sum()
        seen["tiny"] += tiny.sum()
        seen["byte 0"] += (sf == 0).sum()
    # the random blocks contain the edges
    assert seen["nan"] > 1000
    assert seen["byte 0"] > 1000
    assert (seen["tiny"] > 1000) == (rounding is Rounding.RCEIL)


def exact_ceil_scale(_emax: float, vals: np.ndarray) -> float:
    """The smallest power of two >= amax/448 with no fp32 quotient in between, at least 2^-127."""
    mantissa, exponent = math.frexp(float(np.abs(vals).max()))  # amax = m * 2^e, 448 = 0.875 * 2^9
    return 2.0 ** max(exponent - 9 + (mantissa > 0.875), -127) if mantissa else 2.0**-127


def gfloat_bytes(x: np.ndarray, compute_scale) -> tuple[np.ndarray, np.ndarray]:
    """x (B, 32) fp32 -> q (B, 32), sf (B,) by gfloat's scale choice and block encoding."""
    out = np.empty((len(x), 1 + BLOCK), np.uint8)
    for row, vals in zip(out, x.astype(np.float64), strict=True):
        scale = compute_scale(format_info_ocp_e4m3.emax, vals)
        row[:] = list(gfloat.encode_block(format_info_mxfp8_e4m3, scale, vals / scale))
    return out[:, 1:], out[:, 0]


@pytest.mark.parametrize(
    ("rounding", "compute_scale"),
    [(Rounding.RCEIL, exact_ceil_scale), (Rounding.FLOOR, gfloat.compute_scale_amax)],
)
def test_gfloat_agrees_on_a_sample(rounding: Rounding, compute_scale) -> None:
    x = random_blocks(np.random.default_rng(11), 2400)
    x = np.concatenate([x[np.isfinite(x).all(-1)], np.zeros((1, BLOCK), np.float32)])
    # the one amax of the table would differ if the sample held it
    x = x[np.abs(x).max(-1) != np.nextafter(np.float32(448 * 2.0**-127), np.float32(1))]
    assert len(x) > 2000
    q, sf = oracle.quantize_row(x, rounding)
    ref_q, ref_sf = gfloat_bytes(x, compute_scale)
    np.testing.assert_array_equal(sf[:, 0], ref_sf)
    np.testing.assert_array_equal(q, ref_q)
    np.testing.assert_array_equal(oracle.dequantize(q, sf, "float32"), gfloat_values(ref_q, ref_sf))


def gfloat_values(q: np.ndarray, sf: np.ndarray) -> np.ndarray:
    rows = zip(q, sf, strict=True)
    values = [list(gfloat.decode_block(format_info_mxfp8_e4m3, [int(s), *map(int, row)])) for row, s in rows]
    return np.array(values, np.float32)


def test_gfloat_has_the_same_256_elements_and_scales() -> None:
    codes = np.arange(256, dtype=np.uint8)
    elements = [gfloat.decode_float(format_info_ocp_e4m3, int(c)).fval for c in codes]
    np.testing.assert_array_equal(oracle_math.E4M3_VALUES, elements)
    np.testing.assert_array_equal(np.signbit(oracle_math.E4M3_VALUES[[0, 0x80]]), [False, True])
    scales = [gfloat.decode_float(format_info_ocp_e8m0, int(c)).fval for c in codes]
    np.testing.assert_array_equal(oracle_math.e8m0_value(codes), scales)


def test_gfloat_row_of_the_table_the_one_amax_that_fp32_division_rounds_onto_a_power_of_two() -> None:
    edge = np.float32(448 * 2.0**-127)
    steps = edge.view(np.uint32) + np.arange(-4, 5)
    x = np.zeros((9, BLOCK), np.float32)
    x[:, 0] = steps.astype(np.uint32).view(np.float32)
    q, sf = oracle.quantize_row(x)
    ref_q, ref_sf = gfloat_bytes(x, exact_ceil_scale)
    np.testing.assert_array_equal(np.flatnonzero(sf[:, 0] != ref_sf), [5])  # the fp32 after the edge, no other
    assert (sf[5, 0], ref_sf[5]) == (0, 1)
    np.testing.assert_array_equal(oracle.dequantize(q, sf, "float32"), gfloat_values(ref_q, ref_sf))


def test_gfloat_row_of_the_table_an_infinite_amax_is_satfinite() -> None:
    x = np.linspace(-3e38, 3e38, BLOCK, dtype=np.float32)[None].repeat(2, 0)
    x[0, 3], x[1, 30] = np.inf, -np.inf
    ref_q, ref_sf = gfloat_bytes(x, gfloat.compute_scale_amax)
    q, sf = oracle.quantize_row(x, Rounding.FLOOR, satfinite=True)
    np.testing.assert_array_equal(sf[:, 0], ref_sf)
    np.testing.assert_array_equal(q, ref_q)
    q, sf = oracle.quantize_row(x, Rounding.FLOOR)
    assert (sf == 255).all()
    assert (q == E4M3_NAN).all()
