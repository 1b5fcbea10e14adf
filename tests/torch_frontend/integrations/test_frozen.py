"""Frozen weights of models in 8 bits: what a user who trains adapters does with them."""

import copy
import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mxep.torch_frontend import (
    RECIPES,
    GroupedExperts,
    MoE,
    MXLinear,
    MXTensor,
    RouterConfig,
    SharedExpert,
    convert_linear,
    numerics_report,
)
from mxep.torch_frontend.integrations.convert import convert_moe
from mxep.torch_frontend.integrations.frozen import freeze_weights
from mxep.torch_frontend.integrations.transformers import register_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .hf_models import BUILDERS, VOCABULARY, loss_and_gradients, model_of
from .test_convert import TITAN, titan_like

IDS = torch.randint(3, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(ALL_EXPERTS_FUNCTIONS._global_mapping)
    for name in RECIPES:
        register_experts(name)
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def converted(name: str, recipe: str = "mxfp8") -> Any:
    """A frozen model whose experts and attention run a recipe."""
    model: Any = model_of(name, torch.bfloat16).requires_grad_(False)
    if name == "llama4":
        convert_moe(model, recipe)
    else:
        model.set_experts_implementation(recipe)
    chosen = lambda module, name: "self_attn" in name and not (module.in_features | module.out_features) % 32  # noqa: E731
    convert_linear(model, chosen, recipe)
    return model


def dequantized(model: nn.Module) -> Any:
    """A copy with the values of the bytes as weights, as the model stores them."""
    model = copy.deepcopy(model)
    for name, w in [*model.named_parameters()]:
        if isinstance(w, MXTensor):
            owner, _, attribute = name.rpartition(".")
            values = w.dequantize()
            if getattr(model.get_submodule(owner), "is_transposed", "feed_forward.experts" in name):
                values = values.mT.contiguous()
            setattr(model.get_submodule(owner), attribute, nn.Parameter(values, requires_grad=False))
    return model


def with_adapters(model: nn.Module) -> Any:
    torch.manual_seed(0)
    linears = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    config = peft.LoraConfig(r=4, target_modules=linears, init_lora_weights=False)
    return peft.get_peft_model(model, config)  # type: ignore[arg-type]


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", BUILDERS)
def test_adapters_of_a_frozen_model(name: str) -> None:
    """Layouts of all kinds. The forward is the model's, adapters get the gradients of the dequantized weights."""
    model = converted(name)
    want, names = outputs(model), {n for n, _ in model.named_parameters()}
    frozen = freeze_weights(model)
    assert sum("experts" in n for n in frozen) == 2
    assert {n for n, w in model.named_parameters() if isinstance(w, MXTensor)} == set(frozen)
    assert {n for n, _ in model.named_parameters()} == names
    assert torch.equal(outputs(model), want)
    plain = with_adapters(dequantized(model))
    assert not any(isinstance(w, MXTensor) for w in plain.parameters())
    loss, gradients = loss_and_gradients(with_adapters(model))
    other, of_values = loss_and_gradients(plain)
    assert torch.equal(loss, other)
    assert gradients.keys() == of_values.keys()
    assert all("lora" in n for n in gradients)
    assert all(torch.equal(gradients[n], of_values[n]) for n in gradients)


def test_freezing_after_the_adapters_is_the_same() -> None:
    before, after = converted("mixtral"), with_adapters(converted("mixtral"))
    freeze_weights(before)
    before = with_adapters(before)
    assert all("base_model.model" in n for n in freeze_weights(after))
    (loss, gradients), (other, others) = loss_and_gradients(before), loss_and_gradients(after)
    assert torch.equal(loss, other)
    assert all(torch.equal(gradients[n], others[n]) for n in gradients)


def test_no_values_live() -> None:
    model = converted("mixtral")
    alive = {n: weakref.ref(w) for n, w in model.named_parameters()}
    numel = {n: w.numel() for n, w in model.named_parameters()}
    frozen = freeze_weights(model)
    gc.collect()
    assert {n for n, ref in alive.items() if ref() is None} == set(frozen)
    for n in frozen:
        w = model.get_parameter(n)
        assert sum(part.untyped_storage().nbytes() for part in (w.q, w.sf)) == numel[n] * 33 / 32


@pytest.mark.parametrize("how", ["deepcopy", "to", "state dict", "assign", "pickle", "dcp"])
def test_copies_and_files(how: str, tmp_path: Path) -> None:
    model = converted("mixtral")
    frozen = freeze_weights(model)
    want, other = outputs(model), copy.deepcopy(model)
    if how == "to":
        assert copy.deepcopy(model).to("meta").get_parameter(frozen[0]).q.is_meta
        other = other.to(torch.float32).to(torch.bfloat16)
    elif how != "deepcopy":
        with torch.no_grad():
            for w in other.parameters():
                for part in (w.q, w.sf) if isinstance(w, MXTensor) else (w,):
                    part.zero_()
        assert not torch.equal(outputs(other), want)
    file = io.BytesIO()
    if how in ("state dict", "assign"):
        torch.save(model.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file), assign=how == "assign")
    elif how == "pickle":
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    elif how == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
        dcp.load({"model": other.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(outputs(other), want)
    theirs = {w.q.data_ptr() for w in other.parameters() if isinstance(w, MXTensor)}
    assert theirs.isdisjoint({w.q.data_ptr() for w in model.parameters() if isinstance(w, MXTensor)})


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = with_adapters(converted("mixtral"))
    freeze_weights(model)
    model.save_pretrained(tmp_path)
    base = converted("mixtral")
    freeze_weights(base)
    assert torch.equal(outputs(peft.PeftModel.from_pretrained(base, tmp_path)), outputs(model))
    with pytest.raises(NotImplementedError, match=r"got an MXTensor; .*call \.dequantize\(\)"):
        model.merge_and_unload()


def test_adapters_of_experts_by_peft() -> None:
    """`target_parameters` adds the low-rank product to the values, which the layer quantizes again."""
    model = converted("mixtral")
    names = [n for n in freeze_weights(model) if "experts" in n]
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=[], target_parameters=names, init_lora_weights=False)
    losses = {}
    for kind, base in (("bytes", model), ("values", dequantized(model))):
        torch.manual_seed(0)
        losses[kind], gradients = loss_and_gradients(peft.get_peft_model(base, config))
        assert len(gradients) == 4
    assert torch.equal(losses["bytes"], losses["values"])


def test_compiled_and_checkpointed() -> None:
    torch._dynamo.reset()
    model = converted("mixtral")
    freeze_weights(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(input_ids=IDS).logits, outputs(model))
    model = with_adapters(model)
    _, want = loss_and_gradients(model)
    model.gradient_checkpointing_enable()
    model.train()
    _, got = loss_and_gradients(model)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_under_fsdp2_and_ddp(one_process: None) -> None:
    """Neither shards nor broadcasts the bytes: every rank has them. PEFT renames parameters."""
    base = converted("mixtral").requires_grad_(False)
    before = freeze_weights(base)
    base = with_adapters(base)
    names = [name for name, w in base.named_parameters() if isinstance(w, MXTensor)]
    assert len(names) == len(before)
    assert not {*names} & {*before}
    loss, want = loss_and_gradients(base)
    sharded, replicated = copy.deepcopy(base), copy.deepcopy(base)
    ignored = {w for w in sharded.parameters() if isinstance(w, MXTensor)}
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(replicated, names)
    for model in (sharded, DistributedDataParallel(replicated)):
        got, gradients = loss_and_gradients(model)
        assert torch.equal(got, loss)
        assert len(gradients) == len(want)
    unfrozen = fully_shard(trained().requires_grad_(False), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"freeze_weights: 0\.weight: got a DTensor with .*; allowed: plain"):
        freeze_weights(unfrozen)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_of_this_package(recompute: bool) -> None:
    torch.manual_seed(0)
    moe = MoE(64, 96, 4, RouterConfig(2), shared=SharedExpert(64), recompute=recompute)
    x = torch.randn(40, 64)
    want = moe(x)[0]
    moe.experts.requires_grad_(False)
    names = ("experts.w1", "experts.w3", "experts.w2")
    assert freeze_weights(moe) == names
    values = copy.deepcopy(moe)
    for w in ("w1", "w3", "w2"):
        setattr(values.experts, w, nn.Parameter(getattr(moe.experts, w).dequantize()))
    assert numerics_report(moe, x) == numerics_report(values, x)
    y, _ = moe(x)
    assert torch.equal(y, want)
    y.sum().backward()
    assert {n for n, w in moe.named_parameters() if w.grad is None} == set(names)
    moe.requires_grad_(False)
    assert freeze_weights(moe) == tuple(f"shared_expert.{name}" for name in ("w1", "w3", "w2"))
    assert torch.equal(moe(x)[0], want)
    with pytest.raises(TypeError, match="quantize_weights: w: got an MXTensor"), moe.cached_weights():
        pass


def test_experts_of_torchtitan() -> None:
    experts, counts, x = titan_like(TITAN["0.3"]), torch.tensor([5, 0, 40, 19]), torch.randn(64, 64)
    convert_moe(experts)
    want = experts(x, counts)
    assert freeze_weights(experts.requires_grad_(False)) == ("w1_EFD", "w3_EFD", "w2_EDF")
    assert torch.equal(experts(x, counts), want)


def trained() -> nn.Module:
    return nn.Sequential(MXLinear(32, 32))


@pytest.mark.parametrize(
    ("error", "words", "model"),
    [
        (TypeError, "freeze_weights: model: got int; allowed: a torch.nn.Module", 1),
        (ValueError, "model: got Sequential without a frozen weight of a recipe; allowed: MXLinear or", trained()),
        (ValueError, "got Linear without a frozen", nn.Linear(32, 32).requires_grad_(False)),
        (ValueError, "w1: got recipe 'fp8_rowwise'; allowed: 'mxfp8' or 'mxfp8_wgrad_with_hp'",
         GroupedExperts(32, 32, 2, "fp8_rowwise").requires_grad_(False)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], words: str, model: Any) -> None:
    with pytest.raises(error, match=words):
        freeze_weights(model)


def test_an_error_changes_nothing() -> None:
    model = nn.Sequential(MXLinear(32, 32), MXLinear(32, 32, recipe="bf16")).requires_grad_(False)
    with pytest.raises(ValueError, match=r"1\.weight: got recipe 'bf16'"):
        freeze_weights(model)
    assert not any(isinstance(w, MXTensor) for w in model.parameters())
    plain = model_of("mixtral").requires_grad_(False)
    plain.set_experts_implementation("grouped_mm")  # transformers' own
    with pytest.raises(ValueError, match="without a frozen weight of a recipe"):
        freeze_weights(plain)
    once = trained().requires_grad_(False)
    freeze_weights(once)
    with pytest.raises(ValueError, match="without a frozen weight"):
        freeze_weights(once)


GiB, ROOT = 2**30, Path(__file__).parents[3]


def test_the_table_of_mixtral() -> None:
    """The GiB of docs/guides/lora.md, of Mixtral 8x7B's own parameters."""
    config = MixtralConfig()
    with torch.device("meta"):
        model: Any = MixtralForCausalLM(config).to(torch.bfloat16)
    model.set_experts_implementation("mxfp8")
    every = sum(w.numel() for w in model.parameters())
    convert_linear(model, lambda module, name: "self_attn" in name)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    adapters = sum(w.numel() for w in model.parameters() if w.requires_grad)
    base = sum(w.nbytes for w in model.parameters() if not w.requires_grad)
    freeze_weights(model)
    frozen = sum(
        sum(part.nbytes for part in (w.q, w.sf)) if isinstance(w, MXTensor) else w.nbytes
        for w in model.parameters()
        if not w.requires_grad
    )
    table = (ROOT / "docs/guides/lora.md").read_text()
    for held, learned in ((2 * every, 10 * every), (base, 16 * adapters), (frozen, 16 * adapters)):
        row = f"| {held / GiB:.1f} | {learned / GiB:.1f} | {(held + learned) / GiB:.1f} |"
        assert row in table, row
