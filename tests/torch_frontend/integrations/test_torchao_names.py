"""docs/migrate/torchao.md, row by row: torchao's names, enumerations and calls, and what differs from it on purpose.

torchao itself is not installed; its enumerations are rebuilt here with the names and values of their members.
"""

import enum
import inspect

import pytest
import torch
from mxep.torch_frontend import MXTensor
from mxep.torch_frontend.integrations import torchao
from mxep.torch_frontend.integrations.torchao import a2a_dispatch_mxfp8_fwd_hp_bwd, mxfp8_grouped_mm
from torch import Tensor

from ..inputs import ints, rows
from .ep_torchao import compiled_names


class ScaleCalculationMode(enum.Enum):
    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


class KernelPreference(str, enum.Enum):  # noqa: UP042 -- as torchao has it
    AUTO = "auto"
    TORCH = "torch"
    MSLK = "mslk"
    EMULATED = "emulated"


A, W, OFFS = rows(96, 64), rows(2, 32, 64), ints(32, 96)
E4M3 = torch.float8_e4m3fn

CALLS = {
    "_to_mxfp8_then_scaled_grouped_mm": [
        "A", "B_t", "offs", "bias", "out_dtype", "kernel_preference", "wgrad_with_hp", "scale_calculation_mode",
        "pad_token_groups_for_grouped_mm", "compute",
    ],
    "a2a_dispatch_mxfp8_fwd_hp_bwd": [
        "input", "output_splits", "input_splits", "group_name", "scaling_mode", "block_size",
    ],
    "a2a_combine_hp_fwd_mxfp8_bwd": [
        "input", "output_splits", "input_splits", "group_name", "scaling_mode", "block_size", "mxfp8_bwd",
    ],
    "permute_mxfp8_fwd_hp_bwd": [
        "mx_tensor", "num_tokens_per_expert", "ep_degree", "num_local_experts", "group_size_multiple_of", "use_mxfp8",
        "use_triton_for_bwd",
    ],
    "unpermute_hp_fwd_mxfp8_bwd": ["input", "permuted_indices", "padded_shape"],
    "to_mxfp8_a2a_dequant": ["input", "output_splits", "input_splits", "group"],
    "MXTensor.to_mx": [
        "data_hp", "elem_dtype", "block_size", "scaling_mode", "kernel_preference", "act_quant_kwargs",
        "is_swizzled_scales", "mxfp8_dim0_cast_kernel_choice",
    ],
    "MXTensor.from_qdata_and_scales": [
        "qdata", "scales", "orig_dtype", "block_size", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales",
    ],
}  # fmt: skip
"""torchao's arguments, in its order; `compute` is ours."""


@pytest.mark.parametrize("name", CALLS)
def test_arguments_have_torchaos_names_and_order(name: str) -> None:
    home = MXTensor if name.startswith("MXTensor.") else torchao
    function = getattr(home, name.rpartition(".")[2])
    assert list(inspect.signature(function).parameters) == CALLS[name]


def test_torchaos_enumeration_of_scale_modes() -> None:
    x = rows(4, 64)
    for mode in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
        want = MXTensor.quantize(x, mode.value)
        for got in (
            MXTensor.quantize(x, mode),  # type: ignore[arg-type]
            MXTensor.to_mx(x, E4M3, scaling_mode=mode),  # type: ignore[arg-type]
            a2a_dispatch_mxfp8_fwd_hp_bwd(x, [4], [4], None, mode),  # type: ignore[arg-type]
        ):
            assert torch.equal(got.q, want.q)
            assert torch.equal(got.sf, want.sf)
        named = mxfp8_grouped_mm(A, W.mT, OFFS, scale_calculation_mode=mode.value)
        assert torch.equal(mxfp8_grouped_mm(A, W.mT, OFFS, scale_calculation_mode=mode), named)  # type: ignore[arg-type]
    for mode in (ScaleCalculationMode.CEIL, ScaleCalculationMode.EVEN):
        with pytest.raises(ValueError, match=f"scaling_mode: got '{mode.name}'; allowed: 'rceil', 'floor'"):
            MXTensor.to_mx(x, E4M3, 32, mode)  # type: ignore[arg-type]


def test_torchaos_kernel_preference() -> None:
    args = (A, W.mT, OFFS, None, torch.bfloat16)
    folded = mxfp8_grouped_mm(*args, compute="fold")
    exact = mxfp8_grouped_mm(*args, compute="exact")
    assert torch.equal(mxfp8_grouped_mm(*args, KernelPreference.AUTO, compute="fold"), folded)
    assert torch.equal(mxfp8_grouped_mm(*args, KernelPreference.EMULATED), exact)
    for other, words in (
        (KernelPreference.TORCH, "got 'TORCH'; allowed: 'auto' or 'emulated'"),
        ("mslk", "got 'mslk'"),
    ):
        with pytest.raises(ValueError, match=f"mxfp8_grouped_mm: kernel_preference: {words}"):
            mxfp8_grouped_mm(*args, other)
    with pytest.raises(ValueError, match="got 'EMULATED' with compute 'fold'"):
        mxfp8_grouped_mm(*args, KernelPreference.EMULATED, compute="fold")
    with pytest.raises(TypeError, match="kernel_preference: got True"):
        mxfp8_grouped_mm(*args, True)  # wgrad_with_hp comes after it


def test_ends_of_int64() -> None:
    assert torch.equal(mxfp8_grouped_mm(A, W.mT, OFFS.long()), mxfp8_grouped_mm(A, W.mT, OFFS))


def test_to_mx_and_from_qdata_and_scales() -> None:
    x = rows(4, 64).requires_grad_()
    mx, floor = MXTensor.to_mx(x, E4M3), MXTensor.quantize(x, "floor")
    assert torch.equal(mx.q, floor.q)
    assert torch.equal(mx.sf, floor.sf)
    mx.dequantize().sum().backward()
    assert x.grad is not None
    again = MXTensor.from_qdata_and_scales(mx.qdata.detach(), mx.scale.detach(), torch.bfloat16, block_size=32)
    assert torch.equal(again.dequantize(), floor.dequantize())
    assert (again.elem_dtype, again.block_size, again.orig_dtype) == (E4M3, 32, torch.bfloat16)
    assert (again.qdata.dtype, again.scale.dtype, again.is_swizzled_scales) == (E4M3, torch.float8_e8m0fnu, False)
    for words, options in (
        ("elem_dtype: got torch.float8_e5m2; allowed: torch.float8_e4m3fn", {"elem_dtype": torch.float8_e5m2}),
        ("elem_dtype: got 'fp6_e3m2'", {"elem_dtype": "fp6_e3m2"}),
        ("block_size: got 16; allowed: 32", {"block_size": 16}),
        ("is_swizzled_scales: got True; allowed: False", {"is_swizzled_scales": True}),
        ("act_quant_kwargs: got {}; allowed: None", {"act_quant_kwargs": {}}),
        (r"data_hp: got shape \(64,\); allowed: \(M, K\) or \(G, M, K\)", {"data_hp": x[0]}),
    ):
        with pytest.raises(ValueError, match=words):
            MXTensor.to_mx(**{"data_hp": x, "elem_dtype": E4M3} | options)
    of_bytes = MXTensor.from_qdata_and_scales(mx.qdata.detach(), mx.sf, torch.bfloat16)
    assert torch.equal(of_bytes.sf, mx.sf)
    with pytest.raises(ValueError, match=r"qdata: got torch\.uint8; allowed: torch\.float8_e4m3fn"):
        MXTensor.from_qdata_and_scales(mx.q, mx.sf, torch.bfloat16)


def test_the_bias_is_added_before_rounding() -> None:
    bias = rows(32, dtype=torch.float32)
    sums = mxfp8_grouped_mm(A, W.mT, OFFS, out_dtype=torch.float32, compute="exact")
    got = mxfp8_grouped_mm(A, W.mT, OFFS, bias, compute="exact")
    assert torch.equal(got, (sums + bias).bfloat16())
    assert not torch.equal(got, sums.bfloat16() + bias.bfloat16())  # torchao's


def gradients(a: Tensor, w: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    a, w = a.detach().requires_grad_(), w.detach().requires_grad_()
    out = mxfp8_grouped_mm(a, w.mT, OFFS, compute="exact", **options)  # type: ignore[arg-type]
    da, dw = torch.autograd.grad(out, (a, w), rows(96, 32))
    return da, dw


def test_an_mxtensor_needs_no_high_precision_weight_gradient() -> None:
    mx = MXTensor.quantize(A)
    (da, dw), (want_da, want_dw) = gradients(mx, W), gradients(mx.dequantize(), W)
    assert torch.equal(dw, want_dw)
    assert torch.equal(da, want_da)


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    da, dw = gradients(A.float(), W.float(), out_dtype=torch.bfloat16)
    assert (da.dtype, dw.dtype) == (torch.float32, torch.float32)
    assert not torch.equal(da, da.bfloat16().float())


def test_groups_of_any_size() -> None:
    """No padding where the weight gradient is bf16, and the same results with it where it is MXFP8."""
    ends = ints(5, 90)
    plain = mxfp8_grouped_mm(A, W.mT, ends, wgrad_with_hp=True)
    w = W.clone().requires_grad_()
    assert torch.equal(plain, mxfp8_grouped_mm(A, w.mT, ends))
    with pytest.raises(ValueError, match=r"offs: got .* allowed: multiples of 32"):
        mxfp8_grouped_mm(A, w.mT, ends, pad_token_groups_for_grouped_mm=False)


def test_other_operations_on_an_mxtensor_raise() -> None:
    with pytest.raises(NotImplementedError, match=r"call \.dequantize\(\) first"):
        MXTensor.quantize(A) @ W[0].mT


def test_compiled_without_a_graph_break() -> None:
    """Over two ranks too, in ep_ranks.py."""
    compiled_names(None)
