"""The recipes as experts implementations of transformers: loss and gradients of whole models against its eager experts,
and what a user of transformers does with a model."""

import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mxep.torch_frontend import RECIPES, Recipe, SwiGLU
from mxep.torch_frontend.integrations import transformers as adapter
from mxep.torch_frontend.integrations.convert import convert_moe
from mxep.torch_frontend.integrations.packed_experts import PackedExperts, packed_experts
from mxep.torch_frontend.integrations.transformers import register_experts
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, NemotronHConfig, OpenAIPrivacyFilterConfig, Trainer, TrainingArguments
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from ...compare import sqnr_db
from .hf_models import BUILDERS, VOCABULARY, E, loss_and_gradients, model_of, sqnr_of_all

# Measured, the worst of all gradients of the five models: bf16 43.5 dB, MXFP8 21.7. Less 1.
FLOORS_DB = {"bf16": 42.5, "mxfp8": 20.7}
REGISTERED = [name for name in BUILDERS if name != "llama4"]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Each test starts with all recipes and leaves the registry as it was."""
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    for name in RECIPES:
        register_experts(name)
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


@cache
def eager(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    return loss_and_gradients(model_of(name))


@pytest.mark.parametrize("recipe", FLOORS_DB)
@pytest.mark.parametrize("name", BUILDERS)
def test_loss_and_every_gradient(name: str, recipe: str) -> None:
    model, (loss, gradients) = model_of(name), eager(name)
    if name in REGISTERED:
        model.set_experts_implementation(recipe)
    else:
        convert_moe(model, recipe)
    got, got_gradients = loss_and_gradients(model)
    decibels = sqnr_of_all(got_gradients | {"loss": got}, gradients | {"loss": loss})
    assert min(decibels.values()) > FLOORS_DB[recipe], decibels


def test_a_bf16_model() -> None:
    """Both sides round to bf16: the worst of all gradients has 39.8 dB with recipe "bf16", less 1."""
    model = model_of("qwen3_moe", torch.bfloat16)
    loss, gradients = loss_and_gradients(model)
    model.set_experts_implementation("bf16")
    got, got_gradients = loss_and_gradients(model)
    assert got.dtype == loss.dtype
    decibels = sqnr_of_all(got_gradients, gradients)
    assert min(decibels.values()) > 38.8, decibels


# --- other experts -----------------------------------------------------------------------------------------


def experts_of(kind: type[nn.Module], config: type[Any], **sizes: int) -> Any:
    module, generator = kind(config(hidden_size=64, **sizes)), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    return module


OTHERS = {
    "no gate": lambda: experts_of(NemotronHExperts, NemotronHConfig, n_routed_experts=E, moe_intermediate_size=96),
    "a gate of its own, transposed, biases": lambda: experts_of(
        OpenAIPrivacyFilterExperts, OpenAIPrivacyFilterConfig, num_local_experts=E, intermediate_size=96
    ),
}


def routing(num_experts: int, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D), experts and weights (T, K)."""
    generator = torch.Generator().manual_seed(2)
    weights, experts = torch.rand(50, num_experts, generator=generator).topk(top_k)
    return torch.randn(50, 64, generator=generator), experts, weights


def run(module: Any, implementation: str, x: Tensor, experts: Tensor, weights: Tensor) -> dict[str, Tensor]:
    module.config._experts_implementation = implementation
    module.zero_grad()
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    y = module(x, experts, weights)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}  # type: ignore[dict-item]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_experts(name: str, recipe: str) -> None:
    """The worst results: bf16 44.3 dB, MXFP8 22.9. Less 1."""
    module, inputs = OTHERS[name](), routing(E)
    decibels = sqnr_of_all(run(module, recipe, *inputs), run(module, "eager", *inputs))
    assert min(decibels.values()) > {"bf16": 43.3, "mxfp8": 21.9}[recipe], decibels


def normed_experts() -> Any:
    """Models of release 5.23, MuseSpark, have a norm after the experts; these are Mixtral's with one."""
    module: Any = model_of("mixtral").get_submodule("model.layers.0.mlp.experts")
    module.has_post_expert_norm, module.post_expert_norm = True, nn.RMSNorm(64)
    nn.init.normal_(module.post_expert_norm.weight, generator=torch.Generator().manual_seed(3))
    return module


class EachNormed(nn.Module):
    """The eager experts, which leave the norm out, one choice of each token at a time with the norm outside."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts, self.config = experts, experts.config

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        one = torch.ones_like(weights[:, :1])
        outputs = [self.experts(x, experts[:, k : k + 1], one) for k in range(experts.shape[1])]
        return sum(weights[:, k : k + 1] * self.experts.post_expert_norm(out) for k, out in enumerate(outputs))


@pytest.mark.parametrize("how", ["switch", "convert_moe"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_with_hp"])
def test_a_norm_after_the_experts_trains(recipe: str, how: str) -> None:
    """The worst results: bf16 43.9 dB, MXFP8 22.0. Less 1."""
    inputs = routing(E)
    want = run(EachNormed(normed_experts()), "eager", *inputs)
    want = {name.removeprefix("experts."): value for name, value in want.items()}
    module = normed_experts()
    if how == "convert_moe":
        convert_moe(module, recipe)
    got = run(module, recipe if how == "switch" else "eager", *inputs)
    decibels = sqnr_of_all(got, want)
    assert min(decibels.values()) > (42.9 if recipe == "bf16" else 21.0), decibels


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_with_hp", "fold"])
def test_a_norm_that_changes_nothing_changes_no_bit(recipe: str) -> None:
    """As a bias of zeros, which also leaves the weights of the routing to the combine."""
    generator, (x, experts, weights) = torch.Generator().manual_seed(0), routing(E)
    packed = [torch.randn(*shape, generator=generator) / 8 for shape in ((E, 192, 64), (E, 64, 96))]
    chosen = Recipe.parse("mxfp8", compute="fold") if recipe == "fold" else RECIPES[recipe]

    def step(down_bias: Tensor | None, norm: Any) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weights, *packed)]
        of = PackedExperts(*leaves[2:], None, down_bias, SwiGLU(), norm=norm)
        y = packed_experts("test", leaves[0], experts, leaves[1], of, chosen)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape, generator=generator.manual_seed(1)))]

    assert all(map(torch.equal, step(None, nn.Identity()), step(torch.zeros(E, 64), None)))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_experts_of_another_rank_give_zeros(recipe: str) -> None:
    """transformers' expert parallelism: a rank has half of the experts, and E / 2 is the id of all others."""
    module, (x, experts, weights) = OTHERS["a gate of its own, transposed, biases"](), routing(E)
    whole, total = run(module, recipe, x, experts, weights), torch.zeros_like(x)
    half = E // 2
    for rank in range(2):
        part = copy.deepcopy(module)
        part.num_experts = half
        for name, w in module.named_parameters():
            setattr(part, name, nn.Parameter(w.detach()[rank * half : (rank + 1) * half].clone()))
        here = experts // half == rank
        of_rank = run(part, recipe, x, torch.where(here, experts % half, half), weights * here)
        total += of_rank["y"]
        for name, _ in module.named_parameters():
            assert torch.equal(of_rank[name], whole[name][rank * half : (rank + 1) * half]), name
    torch.testing.assert_close(total, whole["y"], rtol=0, atol=1e-6)  # two sums of fp32 numbers


# --- no copies ---------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Notes results of torch's own ops that have as many values as a tensor of weights, and memory of their own."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.found = sizes, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and isinstance(out, Tensor) and out.numel() in self.sizes:
            given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            if out.untyped_storage().data_ptr() not in given:
                self.found.append(str(func))
        return out


def copies_of_weights(name: str, recipe: str) -> list[str]:
    """In a forward and a backward of the experts of a bf16 model."""
    model, (x, experts, weights) = model_of(name, torch.bfloat16), routing(E)
    module: Any = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    leaves, x = (module.gate_up_proj, module.down_proj), x.bfloat16()
    if name == "llama4":
        layer: Any = model.get_submodule(convert_moe(model, recipe).converted[0].name)
    with Copies({w.numel() for w in leaves}) as copies:
        y = layer(x)[0] if name == "llama4" else ALL_EXPERTS_FUNCTIONS[recipe](module, x, experts, weights)
        y.sum().backward()
    assert all(w.grad is not None and w.grad.is_contiguous() for w in leaves)
    return copies.found


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8_wgrad_with_hp"])
@pytest.mark.parametrize("name", ["mixtral", "llama4", "gpt_oss"])
def test_weights_and_their_gradients_are_not_copied(name: str, recipe: str) -> None:
    assert copies_of_weights(name, recipe) == []


def test_rows_of_transposed_weights_are_copied() -> None:
    """The kernels of this recipe scale rows alone: the other orientation is a copy. Shows that a copy is seen."""
    assert "aten.clone.default" in copies_of_weights("gpt_oss", "fp8_rowwise")


# --- what users do -----------------------------------------------------------------------------------------


def test_sharded_checkpoints_are_the_models_own(tmp_path: Path) -> None:
    model = model_of("mixtral")
    names = list(model.state_dict())
    model.set_experts_implementation("mxfp8")
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="mxfp8")
    (loss, gradients), (again, of_loaded) = loss_and_gradients(model), loss_and_gradients(loaded)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], of_loaded[name]) for name in gradients)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert torch.equal(loss_and_gradients(plain)[0], eager("mixtral")[0])
    untold = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert untold.config._experts_implementation == "grouped_mm"  # as docs/guides/transformers.md warns


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_bytes(reentrant: bool) -> None:
    model = model_of("gpt_oss")
    model.set_experts_implementation("mxfp8")
    loss, gradients = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    again, of_checkpoints = loss_and_gradients(model)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], of_checkpoints[name]) for name in gradients)


def test_frozen_experts_pass_the_gradient_on() -> None:
    model = model_of("mixtral")
    model.set_experts_implementation("mxfp8")
    _, gradients = loss_and_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    _, others = loss_and_gradients(model)
    assert others.keys() == {name for name in gradients if "experts" not in name}
    assert all(torch.equal(others[name], gradients[name]) for name in others)


class LowRank(nn.Module):
    """As PEFT adapts a parameter: W + B A, with W frozen."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(w.shape[0], 4, w.shape[2]) * 0.1)
        self.b = nn.Parameter(torch.randn(w.shape[0], w.shape[1], 4) * 0.1)

    def forward(self, w: Tensor) -> Tensor:
        return w + self.b @ self.a


def test_low_rank_adapters_of_experts_learn() -> None:
    model = model_of("mixtral")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    for name in ("gate_up_proj", "down_proj"):
        nn.utils.parametrize.register_parametrization(experts, name, LowRank(getattr(experts, name)))
    results = {}
    for implementation in ("eager", "bf16"):
        model.set_experts_implementation(implementation)
        results[implementation] = loss_and_gradients(model)[1]
    assert len(results["eager"]) == 4
    assert min(sqnr_of_all(results["bf16"], results["eager"]).values()) > FLOORS_DB["bf16"]


class Lines(Dataset):
    """Four lines of tokens, repeated."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = torch.randint(3, VOCABULARY, (32,), generator=torch.Generator().manual_seed(index % 4))
        return {"input_ids": line, "labels": line}


def test_the_trainer_learns_the_same(tmp_path: Path) -> None:
    """Under bf16 autocast, with gradient checkpointing. Measured: losses fall to 0.42, and are within 42.5 to 43.8 dB
    of each other with the instructions of five kinds of CPUs; less 4, since later losses follow from earlier ones."""
    losses = {}
    for implementation in ("eager", "mxfp8"):
        model, options = model_of("mixtral"), {"max_steps": 8, "learning_rate": 3e-3, "per_device_train_batch_size": 4}
        model.set_experts_implementation(implementation)
        options |= {"logging_steps": 1, "gradient_checkpointing": True, "bf16": True, "use_cpu": True}
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options, **quiet), train_dataset=Lines())  # type: ignore[arg-type]
        trainer.train()
        losses[implementation] = torch.tensor(
            [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        )
    assert losses["mxfp8"][-1] < 0.6 * losses["mxfp8"][0], losses
    assert sqnr_db(losses["mxfp8"], losses["eager"]) > 38.5, losses


def test_one_graph() -> None:
    experts, inputs = model_of("gpt_oss").get_submodule("model.layers.0.mlp.experts"), routing(E)
    eager = run(experts, "mxfp8", *inputs)
    graph = run(torch.compile(experts, fullgraph=True, backend="aot_eager"), "mxfp8", *inputs)
    assert eager.keys() == {name.removeprefix("_orig_mod.") for name in graph}
    assert all(torch.equal(value, eager[name.removeprefix("_orig_mod.")]) for name, value in graph.items())


@pytest.mark.parametrize("index", range(2))
def test_the_programs_of_the_page_run(index: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "transformers.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(programs) == 2
    exec(compile(programs[index], "docs/guides/transformers.md", "exec"), {})


def test_the_experts_of_part_of_a_model() -> None:
    """transformers' dict of implementations, by sub-configuration."""
    model = model_of("mixtral")
    model.set_experts_implementation({"": "mxfp8"})
    assert not torch.equal(loss_and_gradients(model)[0], eager("mixtral")[0])
    model.set_experts_implementation("eager")
    assert torch.equal(loss_and_gradients(model)[0], eager("mixtral")[0])


# --- registration ------------------------------------------------------------------------------------------


def test_a_recipe_of_the_callers_own() -> None:
    recipe = Recipe("exact", compute="exact")
    assert register_experts(recipe) == "exact"
    assert register_experts(recipe, "again") == "again"
    assert register_experts(recipe) == "exact"


BAD = {
    "recipe": (ValueError, "recipe: got 'fp4'", lambda: register_experts("fp4")),
    "name": (TypeError, "name: got 1", lambda: register_experts("mxfp8", 1)),  # type: ignore[arg-type]
    "theirs": (ValueError, "name: got 'grouped_mm'; allowed: a name that", lambda: register_experts(name="grouped_mm")),
    "eager": (ValueError, "name: got 'eager'", lambda: register_experts(name="eager")),
    "another": (ValueError, "name: got 'mxfp8' for Recipe", lambda: register_experts("bf16", "mxfp8")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_registration_is_named(name: str) -> None:
    error, message, call = BAD[name]
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    with pytest.raises(error, match=message):
        call()
    assert ALL_EXPERTS_FUNCTIONS._global_mapping == before


@pytest.mark.parametrize("version", ["4.57.6", "5.16.1", "5.24.0", "6.0.0.dev0"])
def test_a_release_that_is_not_tested_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.transformers, "__version__", version)  # importing it in parts makes a second module
    model = model_of("llama4")
    for call in (register_experts, lambda: convert_moe(model)):
        with pytest.raises(NotImplementedError, match=f"transformers: got {version}; allowed: 5.17 to 5.23"):
            call()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: experts_of(NemotronHExperts, NemotronHConfig, n_routed_experts=E, moe_intermediate_size=80),
         "NemotronHExperts: set_experts_implementation: got intermediate_size 80; allowed: multiples of 32; other"),
        (lambda: OpenAIPrivacyFilterExperts(OpenAIPrivacyFilterConfig(
            hidden_size=48, num_local_experts=E, intermediate_size=96)),
         "OpenAIPrivacyFilterExperts: set_experts_implementation: got hidden_size 48; allowed: multiples of 32"),
    ],
)  # fmt: skip
def test_sizes_that_are_not_whole_blocks_are_refused(module: Any, message: str) -> None:
    experts = module()
    experts.config._experts_implementation = "mxfp8"
    with pytest.raises(ValueError, match=message):
        experts(torch.zeros(4, experts.config.hidden_size), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))


def test_a_model_in_fp16_is_refused() -> None:
    model = model_of("mixtral", torch.float16)
    model.set_experts_implementation("mxfp8")
    with pytest.raises(TypeError, match=r"dtype torch\.float16"):
        loss_and_gradients(model)


def test_autocast_to_fp16_is_refused() -> None:
    model = model_of("mixtral")
    model.set_experts_implementation("mxfp8")
    message = r"MixtralExperts: torch\.autocast: got dtype torch\.float16; allowed: torch\.bfloat16"
    with pytest.raises(TypeError, match=message), torch.autocast("cpu", torch.float16):
        loss_and_gradients(model)
