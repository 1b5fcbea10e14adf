"""convert_moe: what it changes, what it leaves, and what it refuses before it changes anything."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mxep.torch_frontend import GroupedExperts, MoE, RouterConfig, SharedExpert
from mxep.torch_frontend.integrations.convert import convert_moe
from torch import Tensor, nn

from .hf_models import loss_and_gradients, model_of, sqnr_of_all


def titan_like(names: tuple[str, str, str], dim: int = 64, hidden_dim: int = 96) -> nn.Module:
    """torchtitan's experts, by their parameters and their forward; no module of torchtitan is imported."""
    w1, w2, w3 = names

    class GroupedExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            for name, n, k in ((w1, hidden_dim, dim), (w2, dim, hidden_dim), (w3, hidden_dim, dim)):
                self.register_parameter(name, nn.Parameter(torch.randn(4, n, k) * k**-0.5))

        def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            rows = x.split(num_tokens_per_expert.tolist())
            of = [getattr(self, name) for name in names]
            out = [F.linear(F.silu(F.linear(r, a)) * F.linear(r, c), b) for r, a, b, c in zip(rows, *of, strict=True)]
            return torch.cat(out)

    return GroupedExperts()


TITAN = {"0.3": ("w1_EFD", "w2_EDF", "w3_EFD"), "0.2": ("w1", "w2", "w3")}


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("release", TITAN)
def test_experts_of_torchtitan(release: str, recipe: str) -> None:
    """Groups of any size. The worst results: bf16 45.8 dB, MXFP8 22.9. Less 1."""
    experts, counts = titan_like(TITAN[release]), torch.tensor([5, 0, 40, 19])

    def run() -> dict[str, Tensor]:
        experts.zero_grad()
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = experts(x, counts)
        y.backward(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))
        grads = {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}
        return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]

    want, model = run(), nn.Sequential(experts)
    report = convert_moe(model, recipe)
    assert report.converted == (("0", "torchtitan", 4, 64, 96, "kernel"),)
    decibels = sqnr_of_all(run(), want)
    assert min(decibels.values()) > {"bf16": 44.8, "mxfp8": 21.9}[recipe], decibels


def test_layers_of_this_package() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"a": MoE(64, 96, 4, RouterConfig(2), shared=SharedExpert(32), recipe="bf16"), "b": GroupedExperts(32, 64, 2)}
    )
    before, x = copy.deepcopy(model), torch.randn(5, 64)
    report = convert_moe(model, "mxfp8", lambda module, name: name != "b")
    assert [row.name for row in report.converted] == ["a.experts", "a.shared_expert"]
    assert report.others == ("b",)
    assert "2 modules run recipe 'mxfp8'" in str(report)
    assert "b  runs as before" in str(report)
    want = MoE(64, 96, 4, RouterConfig(2), shared=SharedExpert(32), recipe="mxfp8")
    want.load_state_dict(before["a"].state_dict())
    assert torch.equal(model["a"](x)[0], want(x)[0])
    assert not torch.equal(model["a"](x)[0], before["a"](x)[0])


def test_a_model_stays_its_own_and_converts_again() -> None:
    model = model_of("llama4")
    parameters, names = list(model.parameters()), list(model.state_dict())
    first = convert_moe(model, "bf16")
    loss, _ = loss_and_gradients(model)
    assert convert_moe(model, "mxfp8").converted == first.converted
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    quantized, gradients = loss_and_gradients(model)
    assert not torch.equal(loss, quantized)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(model.get_submodule(first.converted[0].name).experts.down_proj)  # type: ignore[union-attr]
        again, of_copy = loss_and_gradients(copied)  # with its own weights
        assert torch.equal(again, quantized)
        assert all(torch.equal(of_copy[name], value) for name, value in gradients.items())
        model.load_state_dict(copied.state_dict())
    del model.get_submodule(first.converted[0].name).forward
    assert not torch.equal(loss_and_gradients(model)[0], quantized)


def test_each_layer_may_have_its_own_recipe() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 32, "pad_token_id": 0}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))  # type: ignore[arg-type]
    report = convert_moe(model, "mxfp8", lambda module, name: "layers.1" not in name)
    assert [row.name for row in report.converted] == [f"model.layers.{i}.mlp.experts" for i in (0, 2)]
    assert report.others == ("model.layers.1.mlp.experts",)
    convert_moe(model, "bf16", lambda module, name: "layers.0" in name)
    experts = [layer.mlp.experts for layer in model.model.layers]
    recipes = [vars(e)["forward"].keywords["recipe"].name if "forward" in vars(e) else None for e in experts]
    assert recipes == ["bf16", None, "mxfp8"]


def with_a_forward_of_its_own() -> nn.Module:
    model = nn.Sequential(GroupedExperts(32, 32, 1), titan_like(TITAN["0.3"]))
    model[1].forward = partial(type(model[1]).forward, model[1])
    return model


def two_of(second: nn.Module) -> nn.Module:
    return nn.Sequential(GroupedExperts(32, 32, 1, recipe="bf16"), second)


BAD: dict[str, tuple[type[Exception], str, Callable[[], nn.Module], dict[str, Any]]] = {
    "no module": (TypeError, "model: got list", lambda: [], {}),  # type: ignore[dict-item,return-value]
    "recipe": (ValueError, "recipe: got 'fp4'", lambda: two_of(nn.Identity()), {"recipe": "fp4"}),
    "filter": (TypeError, "filter_fn: got 'experts'", lambda: two_of(nn.Identity()), {"filter_fn": "experts"}),
    "no experts": (ValueError, "got Linear without such experts", lambda: nn.Linear(32, 32), {}),
    "nothing left": (
        ValueError, "filter_fn: got False for all; allowed: True for one of '0'$", lambda: two_of(nn.Identity()),
        {"filter_fn": lambda module, name: False},
    ),
    "sizes": (ValueError, "1: got F = 48; allowed: multiples", lambda: two_of(titan_like(TITAN["0.3"], 64, 48)), {}),
    "dtype": (TypeError, r"1\.w1: got dtype torch\.float16", lambda: two_of(titan_like(TITAN["0.2"]).half()), {}),
    "forward": (ValueError, r"1\.forward: got a function of the instance", with_a_forward_of_its_own, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name: str) -> None:
    error, message, build, options = BAD[name]
    model = build()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [dict(vars(module)) for module in modules]
    with pytest.raises(error, match=message):
        convert_moe(model, **({"recipe": "fp8_rowwise"} | options))
    assert [dict(vars(module)) for module in modules] == before


def test_autocast_to_fp16_is_refused() -> None:
    experts = titan_like(TITAN["0.3"])
    convert_moe(experts)
    message = r"GroupedExperts: torch\.autocast: got dtype torch\.float16; allowed: torch\.bfloat16"
    with pytest.raises(TypeError, match=message), torch.autocast("cpu", torch.float16):
        experts(torch.zeros(4, 64), torch.tensor([1, 1, 1, 1]))
