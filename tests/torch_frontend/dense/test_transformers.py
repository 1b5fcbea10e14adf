"""Attention and MLPs of transformers' models as dense layers: a small Llama with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mxep.torch_frontend import MXLinear, Recipe, convert_linear
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ...compare import sqnr_db
from ..products.test_linear import Launched

FOLD = Recipe.parse("mxfp8", compute="fold")
LAYERS = 2
NAMES = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, max_position_embeddings=64, **changes,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model


def in_blocks(module: nn.Module, name: str) -> bool | None:
    """Small layers are converted too; the head is left to the rules."""
    return True if ".layers." in name else None


def tokens(rows: int = 31) -> Tensor:
    return torch.randint(128, (2, rows), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", [FOLD, "bf16"], ids=["fold", "bf16"])
def test_logits_and_gradients(recipe: Recipe | str) -> None:
    """dB from the model in fp32, of logits and the worst gradient: measured 17.4 and 12.3, and of bf16 40.9 and 35.2,
    less 3 or more. A product alone has 28.6 and 52.6 dB; fourteen follow each other."""
    model, plain = llama(), llama()
    report = convert_linear(model, in_blocks, recipe)
    assert [row.name for row in report.converted] == [
        f"model.layers.{i}.{name}" for i in range(LAYERS) for name in NAMES
    ]
    assert report.others == (("lm_head", "a head"),)
    (logits, grads), (want, want_grads) = step(model, tokens()), step(plain, tokens())
    worst = min(sqnr_db(grads[name], value) for name, value in want_grads.items())
    assert sqnr_db(logits, want) > (37.9 if recipe == "bf16" else 14.4)
    assert worst > (32.2 if recipe == "bf16" else 9.3)


def test_attention_and_mlps_quantize_their_rows_once() -> None:
    model = llama()
    convert_linear(model, in_blocks, FOLD)
    with Launched() as launched:
        model(input_ids=tokens(32))
    # x of q, k and v; of o; of gate and up; of down
    assert launched.found["quantize_both_fold"] == 4 * LAYERS
    assert launched.found["grouped_mm_fold"] == 7 * LAYERS


def test_recomputed_layers_give_the_same_bytes() -> None:
    model = llama()
    convert_linear(model, in_blocks, FOLD)
    _, want = step(model, tokens())
    model.train()
    model.gradient_checkpointing_enable()
    _, got = step(model, tokens())
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_loss_falls_and_a_checkpoint_is_a_llama(tmp_path: Path) -> None:
    model = llama()
    convert_linear(model, in_blocks, FOLD)
    adam, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), tokens()
    losses = []
    for _ in range(10):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert losses[-1] < 0.3 * losses[0], losses

    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert not [module for module in loaded.modules() if isinstance(module, MXLinear)]
    for (name, got), (other, want) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(got, want)
    convert_linear(loaded, in_blocks, FOLD)
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_tied_head_is_refused_if_a_filter_asks_for_it() -> None:
    model = llama(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight: got a weight tied to model\.embed_tokens\.weight; allowed"):
        convert_linear(model, lambda module, name: True)
    assert convert_linear(model, in_blocks).others == (("lm_head", "a head"),)


def test_llama_3_8b_converts_by_the_rules() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "vocab_size": 128256}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))
    report = convert_linear(model)
    assert [row.name for row in report.converted] == [f"model.layers.0.{name}" for name in NAMES]
