"""MXTensor carries bytes through autograd and torch.compile, and refuses to be a number."""

import pytest
import torch
from mxep.core_kernels.formats import Rounding
from mxep.torch_frontend import MXTensor, ops
from torch import Tensor


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_bytes_and_their_float8_views(x: Tensor) -> None:
    mx = MXTensor.quantize(x, "floor")
    q, sf = ops.quantize_row(x, int(Rounding.FLOOR))
    assert torch.equal(mx.q, q)
    assert torch.equal(mx.sf, sf)
    assert (mx.dtype, mx.shape, mx.qdata.dtype, mx.scale.dtype) == (
        torch.bfloat16, x.shape, torch.float8_e4m3fn, torch.float8_e8m0fnu,
    )  # fmt: skip
    again = MXTensor(mx.qdata, mx.scale, torch.float32)
    assert torch.equal(again.dequantize(), ops.dequantize(q, sf, "float32"))
    assert again.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_flatten_and_unflatten(x: Tensor) -> None:
    mx = MXTensor.quantize(x)
    names, meta = mx.__tensor_flatten__()
    again = MXTensor.__tensor_unflatten__({n: getattr(mx, n) for n in names}, meta, mx.size(), mx.stride())
    assert torch.equal(again.dequantize(), mx.dequantize())
    assert again.orig_dtype == mx.orig_dtype


def test_gradients_pass_through_quantize_and_dequantize(x: Tensor) -> None:
    x = x.float().requires_grad_()
    mx = MXTensor.quantize(x)
    grad = torch.randn(6, 64)
    mx.dequantize(torch.bfloat16).backward(grad.bfloat16())
    assert x.grad is not None
    assert torch.equal(x.grad, grad.bfloat16().float())


def test_two_gradients_add_up_as_values(x: Tensor) -> None:
    a, b = MXTensor.quantize(x), MXTensor.quantize(2 * x + 1)
    want = a.dequantize() + b.dequantize()
    assert torch.equal(a + b, want)
    assert torch.equal(a.dequantize() + b, want)
    assert torch.equal(a.dequantize().add_(b), want)
    assert type(a + b) is Tensor


def test_a_copy_has_bytes_of_its_own(x: Tensor) -> None:
    mx = MXTensor.quantize(x)
    before = mx.dequantize()
    for copy in (mx.to("cpu", copy=True), mx.to(mx.dtype, copy=True)):
        copy.copy_(MXTensor.quantize(x + 1))
        assert torch.equal(mx.dequantize(), before)


def test_a_cast_keeps_the_bytes(x: Tensor) -> None:
    mx = MXTensor.quantize(x)
    assert mx.float().q is mx.q
    assert mx.float().dtype == torch.float32
    assert x.type_as(mx).dtype == mx.dtype
    for other in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match=r"got torch.float.*; allowed: bfloat16 or float32; call .dequantize"):
            mx.to(other)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("aten.mm", lambda mx: mx @ mx.dequantize().T),
        ("aten.silu", torch.nn.functional.silu),
        ("aten.view", lambda mx: mx.view(-1)),
        ("aten.add_", lambda mx: mx.add_(1)),
        ("aten.slice", lambda mx: mx[:2]),
    ],
)
def test_other_operations_name_the_remedy(x: Tensor, name: str, run) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}.*call \.dequantize\(\)"):
        run(MXTensor.quantize(x))


def test_bad_parts() -> None:
    q, sf = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"MXTensor: sf: got shape \(4, 2\); allowed: \(4, 3\), one scale per 32 values"
    ):
        MXTensor(torch.zeros(4, 96, dtype=torch.uint8), sf)
    with pytest.raises(TypeError, match=r"MXTensor: q: got dtype torch\.float32"):
        MXTensor(q.float(), sf)
    with pytest.raises(TypeError, match=r"MXTensor: orig_dtype: got torch\.float16"):
        MXTensor(q, sf, torch.float16)
    with pytest.raises(ValueError, match="MXTensor: sf: got device meta"):
        MXTensor(q, sf.to("meta"))
    with pytest.raises(ValueError, match="rounding: got 'up'; allowed: 'rceil', 'floor'"):
        MXTensor.quantize(torch.zeros(1, 32), "up")


def test_in_and_out_of_a_compiled_graph(x: Tensor) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def quantize(x: Tensor) -> MXTensor:
        return MXTensor.quantize(x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(mx: MXTensor) -> Tensor:
        return mx.dequantize() * 2

    mx = quantize(x)
    assert isinstance(mx, MXTensor)
    assert torch.equal(double(mx), MXTensor.quantize(x).dequantize() * 2)


def test_packed_is_a_flag(x: Tensor) -> None:
    for wrong in ("x", 1, None):
        with pytest.raises(TypeError, match=r"MXTensor\.quantize: packed: got .*; allowed: bool"):
            MXTensor.quantize(x, packed=wrong)  # type: ignore[arg-type]
