"""The parameters of SwiGLU: allowed values, and the bits that kernels take."""

import numpy as np
import pytest
from mxep.core_kernels.swiglu.activation import PLAIN, SwiGLU, swiglu_attrs


def test_kernels_take_the_bits_of_fp32() -> None:
    bits = np.array(list(swiglu_attrs("op", 1.702, 7.0, -0.5).values()), np.uint32)
    np.testing.assert_array_equal(bits.view(np.float32), np.array([1.702, 7, -0.5], np.float32))


def test_no_limit_is_infinity_and_zero_has_no_sign() -> None:
    assert swiglu_attrs("op", 1, 0, -0.0) == {"alpha": 0x3F800000, "limit": 0x7F800000, "offset": 0}
    assert swiglu_attrs("op", *PLAIN.attributes) == swiglu_attrs("op", *SwiGLU(1, None, 0).attributes)


def test_equal_numbers_are_one_value() -> None:
    assert {SwiGLU(limit=7), SwiGLU(limit=7.0)} == {SwiGLU(1.0, 7.0, 0.0)}


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        ({"alpha": 0.0}, ValueError, r"SwiGLU: alpha: got 0\.0; allowed: 1/64 to 64"),
        ({"alpha": 65.0}, ValueError, "alpha: got 65"),
        ({"alpha": float("nan")}, ValueError, "alpha: got nan"),
        ({"alpha": True}, TypeError, "alpha: got True; allowed: a float"),
        ({"alpha": "1"}, TypeError, "alpha: got '1'"),
        ({"limit": 0.0}, ValueError, r"SwiGLU: limit: got 0\.0; allowed: above 0, or None"),
        ({"limit": -7.0}, ValueError, r"limit: got -7\.0"),
        ({"limit": float("inf")}, ValueError, "limit: got inf"),
        ({"limit": float("nan")}, ValueError, "limit: got nan"),
        ({"offset": float("inf")}, ValueError, "offset: got inf"),
        ({"offset": 1e-40}, ValueError, "offset: got 1e-40"),
        ({"offset": None}, TypeError, "offset: got None"),
    ],
)
def test_a_bad_number_is_named(numbers: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SwiGLU(**numbers)
