"""Weights are quantized once while they do not change, and again as soon as they may have."""

from collections.abc import Iterator

import pytest
import torch
from mxep.torch_frontend import MoE, keep_quantized_weights, mxfp8_grouped_mm, ops, weights
from torch import Tensor, nn

ENDS = torch.tensor([32, 64], dtype=torch.int32)
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops that quantized a weight, as they run."""
    calls: list[str] = []

    def spied(name: str):
        real = getattr(ops, name)

        def spy(x: Tensor, *rest: int):
            if x.dim() == 3:
                calls.append(name)
            return real(x, *rest)

        monkeypatch.setattr(ops, name, spy)

    for name in ("quantize_row", "quantize_col", "quantize_row_fold", "dequantize"):
        spied(name)
    weights._kept.clear()
    yield calls
    weights._kept.clear()


def parameter(dtype: torch.dtype = torch.bfloat16, experts: int = 2) -> nn.Parameter:
    w = nn.Parameter(torch.empty(experts, 32, 64, dtype=dtype))
    return nn.init.normal_(w, generator=torch.Generator().manual_seed(0))


def step(w: Tensor, **options: object) -> Tensor:
    out = mxfp8_grouped_mm(X.clone().requires_grad_(), w.transpose(-2, -1), ENDS, **options)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    return out.detach()


@pytest.mark.parametrize(
    ("compute", "ops_of_a_step"),
    [("exact", ["quantize_row", "quantize_col"]), ("fold", ["quantize_row_fold", "quantize_col"])],
)
def test_once_for_several_steps_of_one_weight(compute: str, ops_of_a_step: list[str], quantized: list[str]) -> None:
    w = parameter()
    first = step(w, compute=compute)
    for _ in range(3):
        assert torch.equal(step(w, compute=compute), first)
    assert quantized == ops_of_a_step
    step(w, compute=compute, scale_calculation_mode="floor")
    assert quantized == 2 * ops_of_a_step
    step(w, compute="fold" if compute == "exact" else "exact")
    assert len(quantized) == 3 * len(ops_of_a_step)


def test_exact_products_on_hopper_keep_them_dequantized(quantized: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    w, once = parameter(), ["quantize_row", "dequantize", "quantize_col", "dequantize"]
    want = step(w, compute="exact")
    weights._kept.clear()
    quantized.clear()
    monkeypatch.setattr(weights, "arch_of", lambda device: "sm_90")
    for _ in range(3):
        assert torch.equal(step(w, compute="exact"), want)
    assert quantized == once
    along_k, along_n = (kept.x for kept in weights._kept[w].operands.values())
    assert torch.equal(along_k, ops.dequantize(*ops.quantize_row(w.detach())))
    assert torch.equal(along_n, ops.dequantize(*ops.quantize_col(w.detach())))
    quantized.clear()
    written_in_place(w)
    assert not torch.equal(step(w, compute="exact"), want)
    assert quantized == once
    step(w, compute="fold")
    assert quantized == [*once, "quantize_row_fold", "quantize_col"]


def written_in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(3)


def through_a_view(w: nn.Parameter) -> None:
    with torch.no_grad():
        w[1].mul_(3)


def other_memory(w: nn.Parameter) -> None:
    w.data = w.data * 3


def sgd_step(w: nn.Parameter) -> None:
    torch.optim.SGD([w], lr=1.0).step()


def step_that_hides_its_writes(w: nn.Parameter) -> None:
    class Hidden(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:
            w.data.mul_(3)

    version = w._version
    Hidden([w], {}).step()
    assert w._version == version


def loaded(w: nn.Parameter) -> None:
    module = nn.Module()
    module.w = w
    module.load_state_dict({"w": w.detach() * 3})


@pytest.mark.parametrize(
    "change", [written_in_place, through_a_view, other_memory, sgd_step, step_that_hides_its_writes, loaded]
)
def test_again_when_the_weight_changes(change, quantized: list[str]) -> None:
    w = parameter()
    before = step(w)
    change(w)
    after = step(w)
    assert quantized == 2 * ["quantize_row", "quantize_col"]
    assert not torch.equal(before, after)
    with keep_quantized_weights(False):
        assert torch.equal(step(w), after)


def test_views_of_one_parameter_are_told_apart(quantized: list[str]) -> None:
    stacked = parameter(experts=4)
    with torch.no_grad():
        outs = [step(stacked[i : i + 2]) for i in (0, 1, 2, 0)]
    assert torch.equal(outs[0], outs[3])
    assert not torch.equal(outs[0], outs[1])
    assert quantized == 3 * ["quantize_row"]


def test_nothing_is_kept_of_what_lives_for_one_call(quantized: list[str]) -> None:
    w = parameter(torch.float32)
    step(w.bfloat16())
    assert not weights._kept
    step(w)
    assert len(weights._kept) == 1
    del w
    assert not weights._kept
    with torch.inference_mode():
        step(parameter().detach().clone())
    assert not weights._kept


def test_nothing_is_kept_of_a_weight_that_was_never_written(quantized: list[str]) -> None:
    w = nn.Parameter(parameter().detach().clone())
    step(w), step(w)
    assert not weights._kept
    written_in_place(w)
    step(w), step(w)
    assert quantized == 3 * ["quantize_row", "quantize_col"]


def test_nothing_is_kept_when_asked(quantized: list[str]) -> None:
    w = parameter()
    with keep_quantized_weights(False):
        step(w), step(w)
        assert not weights._kept
    assert quantized == 2 * ["quantize_row", "quantize_col"]


def test_a_compiled_function_sees_the_weight_change(quantized: list[str]) -> None:
    torch._dynamo.reset()
    w = parameter()
    compiled = torch.compile(step, fullgraph=False, backend="aot_eager")
    first = compiled(w)
    assert torch.equal(first, step(w))
    written_in_place(w)
    assert torch.equal(compiled(w), step(w))
    assert not torch.equal(compiled(w), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_microbatches_of_a_layer_share_the_weights(dtype: torch.dtype, quantized: list[str]) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 96, num_experts=4, top_k=2, recipe="mxfp8", dtype=dtype)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    for microbatches in (2, 3):
        quantized.clear()
        for i in range(microbatches):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i))
            moe(x.requires_grad_())[0].sum().backward()
        optimizer.step()
        assert sorted(quantized) == sorted(3 * ["quantize_row", "quantize_col"])


def test_a_training_run_is_the_same_without_keeping() -> None:
    def trained(keep: bool) -> list[Tensor]:
        torch.manual_seed(0)
        moe = MoE(64, 96, num_experts=4, top_k=2, recipe="mxfp8")
        optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1)
        with keep_quantized_weights(keep):
            for i in range(6):
                moe(torch.randn(32, 64, generator=torch.Generator().manual_seed(i)))[0].square().sum().backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach() for p in moe.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))
