"""Quantized weights live as long as the user holds them."""

import copy
import io
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from mxep.torch_frontend import (
    GroupedExperts,
    MoE,
    Recipe,
    RouterConfig,
    SharedExpert,
    grouped_swiglu_ffn,
    quantize_weights,
)
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from mxep.torch_frontend.products.weights import QuantizedWeights
from torch import Tensor, nn

from .one_weight import ENDS, X, clone, equal, other_memory, parameter, step, written_in_place


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise", "bf16", "fold"])
def test_cached_weights_give_the_same_bytes(recipe: str, quantized: list[str]) -> None:
    chosen = Recipe.parse("mxfp8", compute="fold") if recipe == "fold" else Recipe.parse(recipe)
    w1, w3 = (nn.init.normal_(nn.Parameter(torch.empty(2, 96, 64))) for _ in range(2))
    w2 = nn.init.normal_(nn.Parameter(torch.empty(2, 64, 96)))

    def ffn(*ws: Tensor | QuantizedWeights) -> list[Tensor]:
        x = X.clone().requires_grad_()
        out = grouped_swiglu_ffn(x, *ws, ENDS, recipe=chosen)
        return [out.detach(), *torch.autograd.grad(out, [x, w1, w3, w2], torch.ones_like(out))]

    want = ffn(w1, w3, w2)
    held = [quantize_weights(w, chosen) for w in (w1, w3, w2)]
    quantized.clear()
    assert equal(ffn(*held), want)
    assert equal(ffn(*held), want)
    assert quantized == []
    assert equal(ffn(held[0], w3, held[2]), want)


def test_cached_weights_of_one_product() -> None:
    w = parameter()
    held = quantize_weights(w, "mxfp8")
    assert equal(step(held), step(w))
    other = clone(w)
    assert equal(step(held.with_values(other)), step(other))
    assert (held.shape, held.dtype, held.device, held.requires_grad) == (w.shape, w.dtype, w.device, True)


@pytest.mark.parametrize(
    ("error", "words", "run"),
    [
        (ValueError, "B_t: got QuantizedWeights of form 'mx' with RCEIL; allowed: form 'fold'",
         lambda: step(quantize_weights(parameter()), compute="fold")),
        (ValueError, "with RCEIL; allowed: form 'mx' with FLOOR",
         lambda: step(quantize_weights(parameter()), scale_calculation_mode="floor")),
        (ValueError, r"quantize_weights: w: got strides \(2048, 1, 64\)", lambda: quantize_weights(parameter().mT)),
        (ValueError, r"w: got shape \(32, 64\); allowed: 3 dims", lambda: quantize_weights(parameter()[0])),
        (ValueError, "w: got dim 1 = 31; allowed: multiples of 32",
         lambda: quantize_weights(torch.ones(2, 31, 64))),
        (TypeError, "w: got dtype torch.float16", lambda: quantize_weights(parameter().half())),
        (TypeError, "w: got a NoneType", lambda: quantize_weights(None)),  # type: ignore[arg-type]
        (ValueError, r"values: got shape \(1, 32, 64\); allowed: \(2, 32, 64\)",
         lambda: quantize_weights(parameter()).with_values(parameter(experts=1))),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], words: str, run: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        run()


def test_a_layer_holds_its_weights_where_it_is_told(quantized: list[str]) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 96, num_experts=4, router=RouterConfig(top_k=2), recipe="mxfp8")

    def microbatch(i: int) -> list[Tensor]:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).requires_grad_()
        y, _ = moe(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), [x, *moe.parameters()])]

    want = [microbatch(i) for i in range(3)]
    quantized.clear()
    with moe.cached_weights():
        assert quantized == 3 * ["quantize_both"]
        assert all(equal(microbatch(i), want[i]) for i in range(3))
    assert quantized == 3 * ["quantize_both"]
    microbatch(0)
    assert quantized == 6 * ["quantize_both"]


def test_writes_within_the_block_raise() -> None:
    experts = GroupedExperts(64, 96, num_experts=2)
    x, counts = X, torch.tensor([32, 32])
    message = r"cached_weights: w3: got a write within the block; allowed: none; leave the block"
    with pytest.raises(RuntimeError, match=message), experts.cached_weights():
        written_in_place(experts.w3)
    with pytest.raises(RuntimeError, match=message), experts.cached_weights():  # noqa: PT012
        other_memory(experts.w3)
        experts(x, counts)
    with experts.cached_weights(), experts.cached_weights():
        experts(x, counts)
    with pytest.raises(ZeroDivisionError), experts.cached_weights():  # noqa: PT012 -- not hidden by the check
        written_in_place(experts.w3)
        raise ZeroDivisionError
    assert experts._held is None


def test_blocks_end_in_any_order(quantized: list[str]) -> None:
    moe = MoE(64, 64, 4, RouterConfig(2), shared=SharedExpert(64))
    first, second = moe.cached_weights(), moe.cached_weights()
    with ExitStack() as stack:
        stack.enter_context(second)
        first.__enter__()
        first.__exit__(None, None, None)
        quantized.clear()
        moe(X)
        assert quantized == []  # `second` is open
    third, fourth = moe.cached_weights(), moe.cached_weights()
    third.__enter__()
    fourth.__enter__()
    third.__exit__(None, None, None)
    quantized.clear()
    moe(X)
    assert quantized == []  # `fourth` is open
    fourth.__exit__(None, None, None)
    takes_a_step(moe)


class SlowlyOpened(GroupedExperts):
    def _open(self, blocks: tuple[Any, ...]) -> None:
        time.sleep(0.001)  # another thread begins or ends a block
        super()._open(blocks)


def test_blocks_of_threads() -> None:
    experts = SlowlyOpened(32, 32, num_experts=1, recipe="bf16")

    def blocks() -> None:
        for _ in range(10):
            with experts.cached_weights():
                experts(torch.ones(32, 32), torch.tensor([32]))
                assert experts._held is not None

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(blocks) for _ in range(4)]:
            done.result()
    assert experts._held is None
    assert experts._blocks == ()


def test_a_write_in_one_thread_raises_in_the_others() -> None:
    experts = GroupedExperts(64, 96, num_experts=2)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="w1: got a write"), experts.cached_weights():
        pool.submit(written_in_place, experts.w1).result()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_made_within_the_block_is_not_held(how: str, quantized: list[str]) -> None:
    moe = MoE(64, 64, 4, RouterConfig(2), shared=SharedExpert(64))
    with moe.cached_weights():
        if how == "deepcopy":
            found = copy.deepcopy(moe)
        elif how == "pickle":
            found = pickle.loads(pickle.dumps(moe))
        else:
            file = io.BytesIO()
            torch.save(moe, file)
            file.seek(0)
            found = torch.load(file, weights_only=False)
        quantized.clear()
        moe(X)
        assert quantized == []
        takes_a_step(found)
    takes_a_step(moe)


def takes_a_step(moe: MoE) -> None:
    """The layer multiplies the weights that an optimizer has written."""
    y, _ = moe(X)
    y.square().sum().backward()
    torch.optim.SGD(moe.parameters(), lr=0.1).step()
    moe.zero_grad()
    fresh = MoE(64, 64, 4, RouterConfig(2), shared=SharedExpert(64))
    fresh.load_state_dict(moe.state_dict())
    assert torch.equal(moe(X)[0], fresh(X)[0])


def test_inference_tensors() -> None:
    """They count no writes."""
    with torch.inference_mode():
        w = parameter().detach().clone()
        assert torch.equal(mxfp8_grouped_mm(X, w.mT, ENDS), mxfp8_grouped_mm(X, parameter().mT, ENDS))
        experts = GroupedExperts(64, 96, num_experts=2)
        with experts.cached_weights():
            held = experts(X, torch.tensor([32, 32]))
        assert torch.equal(held, experts(X, torch.tensor([32, 32])))


def test_a_compiled_layer_takes_cached_weights() -> None:
    torch._dynamo.reset()
    w = parameter()
    held = quantize_weights(w, "mxfp8")
    compiled = torch.compile(lambda x: mxfp8_grouped_mm(x, held, ENDS), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), mxfp8_grouped_mm(X, w.mT, ENDS))
