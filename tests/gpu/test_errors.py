"""Errors that ops raise before any launch."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from mxep.jax_frontend import ops as jax_ops
from mxep.jax_frontend.ops import call as jax_launch
from mxep.torch_frontend.ops import call, device, launch
from torch import Tensor

from .cases import CASES, Case

INPUTS = [(name, i) for name, case in CASES.items() for i, x in enumerate(case.inputs()) if x.numel() > 1]


def assert_raises_before_launch(case: Case, inputs: Sequence[Tensor], error: type[Exception], message: str) -> None:
    """The error comes before the allocation of outputs, which precedes every launch."""
    launched = mock.patch.object(call, "allocate", side_effect=AssertionError("the op allocated its outputs"))
    with launched, pytest.raises(error, match=message):
        case.torch(*inputs)


def argument(name: str, i: int) -> str:
    return jax_ops.OPS[CASES[name].op].inputs[i]


@pytest.mark.parametrize(("name", "i"), INPUTS)
def test_a_misaligned_view(name: str, i: int) -> None:
    inputs = list(CASES[name].inputs())
    x = inputs[i]
    inputs[i] = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x).copy_(x)
    message = rf"{argument(name, i)}: got data_ptr.*allowed: multiples of 16 bytes on a GPU; call .clone"
    assert_raises_before_launch(CASES[name], inputs, ValueError, message)


@pytest.mark.parametrize(("name", "i"), INPUTS)
def test_a_view_that_is_not_contiguous(name: str, i: int) -> None:
    inputs = list(CASES[name].inputs())
    inputs[i] = torch.stack([inputs[i], inputs[i]], dim=-1)[..., 0]
    message = rf"{argument(name, i)}: got .* strides .*; allowed: contiguous"
    assert_raises_before_launch(CASES[name], inputs, ValueError, message)


@pytest.mark.parametrize(("name", "i"), [(name, i) for name, i in INPUTS if len(CASES[name].inputs()) > 1])
def test_a_tensor_on_another_device(name: str, i: int) -> None:
    inputs = list(CASES[name].inputs())
    inputs[i] = inputs[i].cpu()
    assert_raises_before_launch(
        CASES[name], inputs, ValueError, "got device .*; allowed: .*, where .* is; move it with .to"
    )


@pytest.fixture
def empty_caches() -> Iterator[None]:
    def clear() -> None:
        launch.known_calls.recent.clear()
        launch.known_calls.former.clear()
        device.compute_capability.cache_clear()

    clear()
    yield
    clear()


REMEDY = r"sm_80; allowed: sm_89, .*; on a CPU the C\+\+ kernels run"


@pytest.mark.usefixtures("empty_caches")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_without_e4m3_in_torch(name: str) -> None:
    inputs = CASES[name].inputs()
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
        assert_raises_before_launch(CASES[name], inputs, NotImplementedError, REMEDY)


def test_a_gpu_without_e4m3_in_jax() -> None:
    traced = jax.jit(lambda x: jax_launch.call(jax_ops.OPS["quantize_row"], x)).trace(np.ones((3, 32), np.float32))
    old = SimpleNamespace(compute_capability="8.0")
    with (
        mock.patch.object(jax, "devices", return_value=[old]),
        pytest.raises(NotImplementedError, match=REMEDY),
    ):
        traced.lower(lowering_platforms=("cuda",))
