"""torchtitan's routed experts by its overrides: against its own in bf16, over ranks, and what is refused."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torchtitan
from mxep.torch_frontend import Recipe
from mxep.torch_frontend.integrations.torchtitan import Dispatcher, Experts, experts, routed_experts
from torch import Tensor
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.models.common.config_utils import make_routed_experts_config
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from ...compare import sqnr_db
from ...ranks.fixture import Ranks, StartRanks
from . import titan_ranks

MODULE = "mxep.torch_frontend.integrations.torchtitan"
SIZES: dict[str, Any] = {"dim": 64, "hidden_dim": 96, "num_experts": 8, "top_k": 2, "param_init": {}}


def stock(**sizes: int) -> RoutedExperts.Config:
    return make_routed_experts_config(**SIZES | sizes, comm_backend="standard")


def outcome(config: RoutedExperts.Config) -> dict[str, Tensor]:
    """y, and the gradients of the input, the scores and every weight; of the same values for every config."""
    module, generator = config.build(), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    x = torch.randn(2, 48, 64, generator=generator).bfloat16().requires_grad_()
    scores, ids = torch.rand(2, 48, 8, generator=generator).topk(2)
    scores.requires_grad_()
    y = module(x, scores, ids, torch.bincount(ids.flatten(), minlength=8))
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert x.grad is not None
    assert scores.grad is not None
    assert y.dtype == x.grad.dtype == torch.bfloat16
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "scores": scores.grad} | gradients


# Measured, the worst of y and all gradients: 46.7, 22.8, 22.8, 22.8 and 23.8 dB. Less 1.
FLOORS_DB = {"bf16": 45.7, "mxfp8_wgrad_with_hp": 21.8, "mxfp8": 21.8, "fp8_rowwise": 21.8, "fp8_blockwise": 22.8}


@pytest.mark.parametrize("recipe", FLOORS_DB)
def test_experts_and_dispatcher_against_torchtitan(recipe: str) -> None:
    want, got = outcome(stock()), outcome(routed_experts(stock(), recipe))
    decibels = {name: sqnr_db(got[name], value) for name, value in want.items()}
    assert got.keys() == want.keys()
    assert min(decibels.values()) > FLOORS_DB[recipe], decibels


def test_experts_beside_torchtitans_dispatcher() -> None:
    """Its groups have any number of rows and are padded here. It rounds once more when it weighs: y has 50.7 dB."""
    config = stock()
    config.inner_experts = experts(config.inner_experts, "bf16")
    alone, both = outcome(config), outcome(routed_experts(stock(), "bf16"))
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        assert torch.equal(alone[f"inner_experts.{name}"], both[f"inner_experts.{name}"])
    assert sqnr_db(alone["y"], both["y"]) > 49.7


def test_overrides_of_a_model() -> None:
    """By name and JSON, as on torchtitan's command line: all five layers with experts, and parameters as before."""
    before, after = (model_registry("debugmodel").model for _ in range(2))
    imports = parse_cli_imports([f'{MODULE}.routed_experts={{"recipe": "mxfp8", "mxfp8_all_to_all": ["dispatch"]}}'])
    assert len(apply_overrides(OverrideConfig(imports=imports), after)) == 5
    with torch.device("meta"):
        model, stock_model = after.build(), before.build()
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in stock_model.named_parameters()}
    routed = [m for m in model.modules() if isinstance(m, RoutedExperts)]
    assert len(routed) == 5
    for module in routed:
        assert isinstance(module.inner_experts, Experts)
        assert isinstance(module.token_dispatcher, Dispatcher)
        for recipe in (module.inner_experts.recipe, module.token_dispatcher.recipe):
            assert recipe == Recipe.parse("mxfp8", mxfp8_all_to_all=("dispatch",))


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(titan_ranks, titan_ranks.RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", titan_ranks.checks(titan_ranks.RANKS))
def test_two_ranks(ranks: Ranks, recipe: str) -> None:
    ranks.run(recipe)


def gpt_oss() -> RoutedExperts.Config:
    config = stock()
    config.inner_experts = GptOssGroupedExperts.Config(dim=64, hidden_dim=96, num_experts=8)
    return config


@pytest.mark.parametrize(
    ("config", "options", "kind", "words"),
    [
        (stock(dim=80), {}, ValueError, "routed_experts: dim: got 80; allowed: multiples of 32"),
        (stock(hidden_dim=80), {}, ValueError, "routed_experts: hidden_dim: got 80; allowed: multiples of 32"),
        (stock(), {"recipe": "fp4"}, ValueError, "Recipe: recipe: got 'fp4'"),
        (stock(), {"mxfp8_all_to_all": ["expand"]}, ValueError, r"Recipe: mxfp8_all_to_all: got \('expand',\)"),
        (stock(), {"mxfp8_all_to_all": "dispatch"}, TypeError, "mxfp8_all_to_all: got 'dispatch'; allowed: a list"),
        (gpt_oss(), {}, TypeError, "inner_experts: got GptOssGroupedExperts.Config; allowed: GroupedExperts.Config"),
        (
            make_routed_experts_config(**SIZES, comm_backend="minimal_async_ep"), {}, TypeError,
            "token_dispatcher: got MinimalAsyncEPTokenDispatcher.Config; .* use the override `experts`",
        ),
    ],
)  # fmt: skip
def test_refused(config: RoutedExperts.Config, options: dict[str, Any], kind: type[Exception], words: str) -> None:
    before = config.inner_experts, config.token_dispatcher
    with pytest.raises(kind, match=words):
        routed_experts(config, **options)
    assert (config.inner_experts, config.token_dispatcher) == before


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setattr(torchtitan, "__version__", "0.4.0")
    with pytest.raises(NotImplementedError, match=r"torchtitan: got 0.4.0; allowed: 0.3.0; pip install 'mxep\[tor"):
        importlib.import_module(MODULE)
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, MODULE)
    monkeypatch.setitem(sys.modules, "torchtitan.config", ModuleType("torchtitan.config"))
    with pytest.raises(ImportError, match=r"torchtitan 0.3.0 does not import with torch .*cannot import name 'derive'"):
        importlib.import_module(MODULE)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ImportError, match=r"torchtitan 0.3.0 is missing \(.*\); install it with `pip install"):
        importlib.import_module(MODULE)
