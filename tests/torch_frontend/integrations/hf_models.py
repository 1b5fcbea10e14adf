"""Causal models of transformers with one MoE layer and random weights: with one layer, no rounding of an earlier layer
can change the choice of an expert."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ...compare import sqnr_db

TOKENS, VOCABULARY, E = 64, 64, 8
_SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
_LORA = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_END = {"bos_token_id": 1, "eos_token_id": 2}


def _build(name: str, sizes: dict[str, Any], heads: dict[str, int]) -> PreTrainedModel:
    config = getattr(transformers, f"{name}TextConfig" if name == "Llama4" else f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**_SIZES, **_END, **heads, **sizes))


_PLAIN = _HEADS | {"head_dim": 32}
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": partial(_build, "Mixtral", {"intermediate_size": 96, "num_local_experts": E}, _PLAIN),
    "qwen3_moe": partial(
        _build, "Qwen3Moe", {"moe_intermediate_size": 96, "num_experts": E, "num_experts_per_tok": 4}, _PLAIN
    ),
    "deepseek_v3": partial(
        _build, "DeepseekV3",
        {"intermediate_size": 96, "moe_intermediate_size": 96, "n_routed_experts": E, "num_experts_per_tok": 3,
         "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 1, **_LORA}, _HEADS,
    ),
    "llama4": partial(
        _build, "Llama4",
        {"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": E, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 1}, _PLAIN,
    ),
    "gpt_oss": partial(
        _build, "GptOss",
        {"intermediate_size": 96, "num_local_experts": E, "num_experts_per_tok": 4,
         "layer_types": ["full_attention"]}, _PLAIN,
    ),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with its eager experts; weights of variance 1 / fan in."""
    torch.manual_seed(0)
    model = BUILDERS[name]().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1 or parameter.shape[0] <= E:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
    model.set_experts_implementation("eager")
    return model


def loss_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of next-token prediction on random tokens."""
    model.zero_grad()
    ids = torch.randint(3, VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def sqnr_of_all(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """SQNR in dB by name; both sides have the same names."""
    assert got.keys() == want.keys()
    return {name: sqnr_db(got[name], value) for name, value in want.items()}
