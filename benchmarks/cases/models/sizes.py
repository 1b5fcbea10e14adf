"""The five models by their published sizes, as configurations of transformers.

Every layer is an MoE layer: the first layers of the DeepSeek models are dense, one of 27 and three of 61, too large a
share of the layers that fit into one GPU. DeepSeek-V3 has 32 of its 256 experts, the share of one of eight ranks.
Rotary embeddings are plain; no sizes depend on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Model:
    """kind: the name of its classes in transformers. layers, experts: of the published model. sizes: fields of the
    published configuration; cut: those that differ here. attention: its implementation on a GPU."""

    kind: str
    layers: int
    experts: int
    sizes: Mapping[str, Any]
    cut: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"

    def config(self, layers: int) -> PreTrainedConfig:
        config = getattr(transformers, f"{self.kind}Config")
        return config(
            num_hidden_layers=layers, use_cache=False, tie_word_embeddings=False, **{**self.sizes, **self.cut}
        )


MODELS: dict[str, Model] = {
    "mixtral-8x7b": Model(
        "Mixtral", layers=32, experts=8,
        sizes={"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
               "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-30b-a3b": Model(
        "Qwen3Moe", layers=48, experts=128,
        sizes={"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
               "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
               "norm_topk_prob": True},
    ),
    "deepseek-v2-lite": Model(
        "DeepseekV2", layers=27, experts=64,
        sizes={"vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
               "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2,
               "num_experts_per_tok": 6, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
               "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1},
        cut={"first_k_dense_replace": 0},
    ),
    "deepseek-v3": Model(
        "DeepseekV3", layers=61, experts=256,
        sizes={"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
               "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
               "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
               "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3},
        cut={"first_k_dense_replace": 0, "n_routed_experts": 32},
    ),
    "gpt-oss-120b": Model(
        "GptOss", layers=36, experts=128,
        sizes={"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
               "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 128,
               "num_experts_per_tok": 4},
        attention="flex_attention",  # scaled_dot_product_attention has no sinks
    ),
}  # fmt: skip
_SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16, "num_local_experts": 8,
    "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def small(model: Model) -> Model:
    """The same layers at the sizes of a test on a CPU, where attention with sinks runs without a fused kernel."""
    sizes = {name: _SMALL.get(name, size) if size else size for name, size in model.sizes.items()}
    cut = {name: size for name, size in model.cut.items() if name not in _SMALL}
    return replace(model, sizes=sizes, cut=cut, attention="sdpa" if model.attention == "sdpa" else "eager")


def experts_of(config: Any) -> int:
    """The experts of a layer."""
    return config.num_experts if hasattr(config, "num_experts") else config.n_routed_experts
