"""Metrics of a run: of counts that are known, of values that are known to be lost, and of a model by hooks."""

import copy
import doctest
import io

import pytest
import torch
from mxep.core_kernels.policy import metrics as core
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import MoE, RouterConfig
from mxep.torch_frontend.layer.metrics import MoERecorder, lost_values
from torch import nn


def model(recipe: str = "mxfp8") -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "first": MoE(32, 32, 4, RouterConfig(2), recipe=recipe),
        "second": MoE(32, 32, 4, RouterConfig(1), recipe=recipe),
    }
    return nn.ModuleDict(layers)


def test_examples() -> None:
    found = doctest.testmod(core)
    assert found.attempted
    assert not found.failed


def test_a_step_by_hooks_is_the_sum_of_its_forwards() -> None:
    layers = model()
    with MoERecorder(layers) as recorder:
        assert recorder.scalars() == {}
        want = torch.zeros(4, dtype=torch.int64)
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            want += layers["first"](x)[1].counts
        layers["second"](torch.zeros(5, 32))  # ties: all tokens to expert 0
        found, scalars = recorder.read(), recorder.scalars()
        assert found["first"]["tokens_per_expert"] == want.tolist()
        assert found["first"]["imbalance"] == want.max() * 4 / 96
        assert found["first"]["wire_nbytes"] == 0
        assert found["second"] == {
            "tokens_per_expert": [5, 0, 0, 0], "imbalance": 4.0, "dead_experts": 3, "overflow": 0, "wire_nbytes": 0,
        }  # fmt: skip
        dead = found["first"]["dead_experts"] + 3
        assert {name: value.item() for name, value in scalars.items()} == {
            "imbalance": 4.0, "dead_experts": dead, "overflow": 0,
        }  # fmt: skip
        recorder.reset()
        assert recorder.read() == {}
    layers["first"](x)
    assert recorder.read() == {}


def test_bytes_between_ranks() -> None:
    """Of the rows of one step: quantized on two of the four ways."""
    _, stats = MoE(64, 32, 4, RouterConfig(2))(torch.randn(6, 64))
    rows = 12
    for recipe, prob_in, want in (
        ("bf16", "combine", rows * 4 * 128),
        ("mxfp8", "combine", rows * (2 * 128 + 2 * 66)),
        ("mxfp8", "swiglu", rows * (2 * 128 + 2 * 66 + 8)),
    ):
        found = stats.metrics(64, recipe=recipe, ranks=2, prob_in=prob_in)
        assert found["wire_nbytes"] == want
        assert stats.metrics(64, recipe=recipe)["wire_nbytes"] == 0


def test_lost_values() -> None:
    """RCEIL saturates nothing; FLOOR clips what is above 448 scales. Half of the least subnormal is flushed."""
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([1.9, 2**-16, 2**-18, -(2**-30)])  # RCEIL 2^-7: least 2^-16; FLOOR 2^-8: least 2^-17
    x[1, :2] = torch.tensor([1.5, -(2**-17)])  # both 2^-8
    assert lost_values(x, Recipe.parse("mxfp8", rounding="rceil")).tolist() == [6, 2, 0]
    assert lost_values(x, Recipe.parse("mxfp8", rounding="floor")).tolist() == [6, 2, 1]


def test_lost_values_of_tokens_and_gradients() -> None:
    layer, x = MoE(32, 32, 2, RouterConfig(1)), torch.ones(4, 32)
    x[:, 0] = 2**-20
    with MoERecorder(layer, numerics=True) as recorder:
        y, _ = layer(x)
        y.backward(torch.ones(4, 32))
        scalars = recorder.scalars()
    assert scalars["tokens_flushed"] == 1 / 32
    assert scalars["tokens_saturated"] == scalars["gradients_flushed"] == scalars["gradients_saturated"] == 0


def test_every_call_that_the_layer_takes_is_recorded() -> None:
    layer, x = MoE(32, 32, 4, RouterConfig(2)), torch.randn(16, 32)
    with MoERecorder(layer, numerics=True) as recorder:
        layer(x)
        want = recorder.read(), recorder.scalars()
        for call in (
            lambda: layer(x=x),
            lambda: layer(x.t().contiguous().t()),
            lambda: layer(x.repeat_interleave(2, 1)[:, ::2]),
            lambda: layer(x.view(2, 8, 32)),
        ):
            recorder.reset()
            call()
            assert (recorder.read(), recorder.scalars()) == want


def test_gradients_without_memory_of_their_own() -> None:
    """The gradient of a sum is one value, expanded."""
    layer = MoE(32, 32, 4, RouterConfig(2), dtype=torch.bfloat16)
    with MoERecorder(layer, numerics=True) as recorder:
        layer(torch.randn(16, 32, dtype=torch.bfloat16))[0].sum().backward()
        assert recorder._sums["moe"]["gradients"].tolist() == [16 * 32, 0, 0]


def test_copies_of_the_model_do_not_count() -> None:
    layers = model()
    x = torch.randn(16, 32)
    before = copy.deepcopy(layers)
    with MoERecorder(layers) as recorder:
        average = copy.deepcopy(layers)
        for each in (layers, average, before):
            each["first"](x)
        assert sum(recorder.read()["first"]["tokens_per_expert"]) == 2 * 16
        with MoERecorder(average) as other:
            average["first"](x)
            assert sum(other.read()["first"]["tokens_per_expert"]) == 2 * 16
        assert sum(recorder.read()["first"]["tokens_per_expert"]) == 2 * 16
    average["first"](x)  # its copy of the removed hook counts nothing


def test_a_model_is_saved_while_it_is_recorded() -> None:
    """As a whole. The loaded model counts nothing."""
    layers, x, file = model(), torch.randn(16, 32), io.BytesIO()
    with MoERecorder(layers, numerics=True) as recorder:
        want, _ = layers["first"](x)
        torch.save(layers, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded["first"](x)[0], want)
        assert sum(recorder.read()["first"]["tokens_per_expert"]) == 2 * 16


def test_sums_of_many_steps_do_not_wrap() -> None:
    recorder = MoERecorder(MoE(32, 32, 4, RouterConfig(2)))
    for _ in range(2):
        recorder._add("moe", "counts", torch.full((4,), 2**30, dtype=torch.int32))
        recorder._add("moe", "overflow", torch.tensor(2**31 - 1, dtype=torch.int32))
    found = recorder.read()["moe"]
    assert (found["tokens_per_expert"], found["imbalance"]) == ([2**31] * 4, 1.0)
    assert found["overflow"] == recorder.scalars()["overflow"] == 2**32 - 2
    assert recorder.scalars()["imbalance"] == 1


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="MoERecorder: model: got a Linear without MoE; allowed: a model with MoE"):
        MoERecorder(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="numerics: got recipe 'bf16' of first; allowed: with 'mxfp8' recipes"):
        MoERecorder(model("bf16"), numerics=True)


@pytest.mark.parametrize("argument", ["dim", "ranks"])
def test_sizes_that_no_layer_has(argument: str) -> None:
    _, stats = MoE(32, 32, 4, RouterConfig(2))(torch.zeros(1, 32))
    with pytest.raises(ValueError, match=f"MoEStats.metrics: {argument}: got {2**63}; allowed: .* below 2\\^31"):
        stats.metrics(**{"dim": 32} | {argument: 2**63})
