"""The oracle against the text of the numerics contract: values by hand, and the casts of numpy."""

import doctest
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.grouped_gemm.exact import oracle as grouped_gemm_oracle
from mxep.core_kernels.permute import oracle as permute_oracle
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.reference import collectives
from mxep.core_kernels.reference import layer as layer_oracle
from mxep.core_kernels.reference.choice import Choice
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.swiglu import oracle as swiglu_oracle


def block(*head: float) -> np.ndarray:
    x = np.zeros((1, 32), np.float32)
    x[0, : len(head)] = head
    return x


@pytest.mark.parametrize("module", [oracle_math, routing_oracle, swiglu_oracle], ids=lambda module: module.__name__)
def test_its_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


@pytest.mark.parametrize(
    ("amax", "rceil", "floor"),
    [
        (448.0, 127, 127),
        (449.0, 128, 127),  # FLOOR saturates above 448
        (256.0, 127, 127),
        (255.0, 127, 126),
        (1.0, 119, 119),  # 1/448 <= 2^-8
        (2.0**-120, 0, 0),
        (448 * 2.0**-127, 0, 0),
        (449 * 2.0**-127, 1, 0),
        (2.0**-149, 0, 0),
        (0.0, 0, 0),
        (3.4028235e38, 247, 246),
        (np.inf, 255, 255),
        (np.nan, 255, 255),
    ],
)
def test_scale_bytes(amax: float, rceil: int, floor: int) -> None:
    assert oracle_math.scale_byte(np.float32(amax), Rounding.RCEIL) == rceil
    assert oracle_math.scale_byte(np.float32(amax), Rounding.FLOOR) == floor


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E),
        (1.0, 0x38),
        (-1.0, 0xB8),
        (2.0**-6, 0x08),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),  # a tie goes to the even code
        (1.5 * 2.0**-9, 0x02),
        (-(2.0**-10), 0x80),
        (1.0625, 0x38),  # between 1 and 1.125
        (1.1875, 0x3A),  # between 1.125 and 1.25
        (1e9, 0x7E),
        (-np.inf, 0xFE),
        (-0.0, 0x80),
        (np.nan, 0x7F),
    ],
)
def test_elements(value: float, code: int) -> None:
    assert oracle_math.to_e4m3(np.array([value])) == code


def test_special_blocks() -> None:
    q, sf = quantize_oracle.quantize_row(block(1.0, np.inf))
    assert (sf.item(), set(q[0])) == (255, {0x7F})
    q, sf = quantize_oracle.quantize_row(block(1.0, -np.inf, 2.0**127), satfinite=True)
    assert (sf.item(), *q[0, :3]) == (254, 0, 0xFE, 0x38)
    q, sf = quantize_oracle.quantize_row(block(1.0, np.inf, np.nan), satfinite=True)
    assert (sf.item(), set(q[0])) == (255, {0x7F})
    q, sf = quantize_oracle.quantize_row(block(-0.0))
    assert (sf.item(), q[0, 0], q[0, 1]) == (0, 0x80, 0)
    q, sf = quantize_oracle.quantize_row(block(2.0**-127, -(2.0**-136), 2.0**-137))
    assert (sf.item(), *q[0, :3]) == (0, 0x38, 0x81, 0)


def test_amax_is_never_rounded_to_bf16() -> None:
    just_above = np.nextafter(np.float32(448), np.float32(449))  # 448 in bf16
    assert quantize_oracle.quantize_row(block(just_above))[1].item() == 128


def test_rounding_to_bf16_is_one_rounding() -> None:
    x = seeded("bf16").integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(
        oracle_math.round_to(x.astype(np.float64), "bfloat16").view(np.uint16),
        x.astype(ml_dtypes.bfloat16).view(np.uint16),
    )
    # above a tie by less than fp32 can hold: a cast through fp32 rounds down to even
    assert oracle_math.round_to(np.array([1 + 2.0**-8 + 2.0**-40]), "bfloat16")[0] == BF16.type(1 + 2.0**-7)


def test_groups_of_a_product() -> None:
    lhs, rhs_t = np.ones((5, 2), BF16), np.ones((3, 1, 2), BF16) * np.arange(1, 4).reshape(3, 1, 1).astype(BF16)
    lhs[4] = np.nan
    out = grouped_gemm_oracle.grouped_mm_bf16(lhs, rhs_t, np.int32([1, 1, 4]), "float32")
    np.testing.assert_array_equal(out, [[2], [6], [6], [6], [0]])
    grad = grouped_gemm_oracle.grouped_wgrad_bf16(lhs[:, :1], lhs, np.int32([1, 1, 4]), "float32")
    np.testing.assert_array_equal(grad, [[[1, 1]], [[0, 0]], [[3, 3]]])


def test_all_to_all_and_its_gradient() -> None:
    sent = [np.int32([[1], [2], [3]]), np.int32([[4], [5]])]
    splits = [[1, 2], [0, 2]]
    received = collectives.all_to_all(sent, splits)
    np.testing.assert_array_equal(received[0], [[1]])
    np.testing.assert_array_equal(received[1], [[2], [3], [4], [5]])
    for back, was in zip(collectives.all_to_all_vjp(received, splits), sent, strict=True):
        np.testing.assert_array_equal(back, was)


def test_permute_gradient_adds_up() -> None:
    dx = permute_oracle.permute_rows_vjp(np.float32([[1], [2], [4], [8]]), np.int32([1, -1, 1, 0]), 3)
    np.testing.assert_array_equal(dx, [[8], [5], [0]])


CHOICES = {
    "softmax": Choice(2),
    "softmax_as_it_is": Choice(2, normalize=False, route_scale=2.5),
    "sigmoid": Choice(2, "sigmoid", route_scale=2.5),
    "sigmoid_as_it_is": Choice(2, "sigmoid", normalize=False),
    "of_chosen": Choice(2, "softmax_of_chosen"),
    "groups": Choice(2, "sigmoid", bias=np.array([0.1, -0.2, 0.3, 0, 0.2, 0]), num_groups=3, top_k_groups=2),
    "groups_by_max": Choice(2, num_groups=3, top_k_groups=1, group_score="max"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_layers_gradient_is_that_of_the_layer(name: str) -> None:
    rng, choice = seeded("layer"), CHOICES[name]
    shapes = {"router": (6, 8), "w1": (6, 5, 8), "w3": (6, 5, 8), "w2": (6, 8, 5)}
    x, dy = rng.standard_normal((2, 6, 8))
    arguments = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    shared = [rng.standard_normal(shape) for shape in ((1, 3, 8), (1, 3, 8), (1, 8, 3))]

    def loss(x: np.ndarray, shared: list[np.ndarray], **weights: np.ndarray) -> np.float64:
        parameters = layer_oracle.Parameters(**weights, shared=tuple(shared))
        return np.sum(layer_oracle.moe_layer(x, parameters, choice) * dy)

    def along(value: np.ndarray, grad: np.ndarray, changed) -> None:
        step = 1e-5 * rng.standard_normal(value.shape)
        np.testing.assert_allclose((changed(value + step) - changed(value - step)) / 2, np.sum(grad * step), rtol=1e-6)

    dx, grads = layer_oracle.moe_layer_vjp(dy, x, layer_oracle.Parameters(**arguments, shared=tuple(shared)), choice)
    along(x, dx, lambda v: loss(v, shared, **arguments))
    for key, value in arguments.items():
        along(value, getattr(grads, key), lambda v, key=key: loss(x, shared, **arguments | {key: v}))
    for i, (value, grad) in enumerate(zip(shared, grads.shared, strict=True)):
        along(value, grad, lambda v, i=i: loss(x, [*shared[:i], v, *shared[i + 1 :]], **arguments))
