"""The MoE blocks of transformers as configurations of a layer: their weights and gradients under the layer's names.

transformers' block, fp64 --weights--> {"router", "w1", ...} --> MoE, moe.apply
        '---- output, gradients of x and of every weight ---- compared with ----'
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from mxep.core_kernels.policy.router import SharedExpert
from mxep.torch_frontend.integrations.layouts import unpack_expert_weights
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

T, D, HIDDEN, SHARED, E = 64, 64, 96, 32, 8


@dataclass(frozen=True, eq=False)
class Block:
    """sizes: of the configuration. options: as `layer_options` takes them. layout: of `unpack_expert_weights`. numbers:
    of SwiGLU."""

    kind: Callable[[Any], nn.Module]
    config: type[PretrainedConfig]
    sizes: dict[str, Any]
    top_k: int
    options: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, bool] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @cached_property
    def library(self) -> Any:
        """The block with weights that are fp32 numbers, in fp64."""
        config = self.config(hidden_size=D, **self.sizes, num_experts_per_tok=self.top_k)
        config._experts_implementation = "eager"
        block, generator = self.kind(config), torch.Generator().manual_seed(self.top_k)
        for tensor in (*block.parameters(), *block.buffers()):
            fan_in = tensor.shape[1] if self.layout.get("transposed") and tensor.dim() == 3 else tensor.shape[-1]
            nn.init.normal_(tensor, std=1.0 if tensor.shape == (E,) else fan_in**-0.5, generator=generator)
        return block.double()

    @property
    def x(self) -> Tensor:
        """(T, D) fp32 of bf16 values."""
        return torch.randn(T, D, generator=torch.Generator().manual_seed(100)).bfloat16().float()

    @property
    def dy(self) -> Tensor:
        return torch.randn(T, D, generator=torch.Generator().manual_seed(101)).bfloat16().float()

    def weights(self, of: Callable[[Tensor], Any] = lambda w: w.detach().float()) -> dict[str, Tensor]:
        """`of` each weight, in the layout and under the name of the layer's."""
        block, experts = self.library, self.library.experts
        router = block.gate if hasattr(block, "gate") else block.router
        packed = {"gate_up": of(experts.gate_up_proj), "down": of(experts.down_proj)}
        if self.options.get("bias"):
            packed |= {"gate_up_bias": of(experts.gate_up_proj_bias), "down_bias": of(experts.down_proj_bias)}
        parts = {"router": of(router.weight), **unpack_expert_weights(**packed, **self.layout)}
        if self.options.get("router_bias"):
            parts["router_bias"] = of(router.bias)
        if "shared" in self.options:
            if self.options["shared"].gate:
                parts["shared_gate"] = of(block.shared_expert_gate.weight)
            shared = block.shared_experts if hasattr(block, "shared_experts") else block.shared_expert
            names = ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")
            parts |= {f"shared_{name}": of(getattr(shared, theirs).weight)[None] for name, theirs in names}
        return parts

    @property
    def selection_bias(self) -> Tensor | None:
        """The buffer of DeepSeek-V3's router."""
        router = getattr(self.library, "gate", None)
        bias = getattr(router, "e_score_correction_bias", None)
        return None if bias is None else bias.float()

    @cached_property
    def reference(self) -> Mapping[str, Tensor]:
        """ "y" and the gradients of "x" and of every weight."""
        x = self.x.double().requires_grad_()
        y = self.library(x[None])
        y = (y[0] if isinstance(y, tuple) else y).view(T, D)
        self.library.zero_grad()
        y.backward(self.dy.double())
        return {"y": y.detach(), "x": x.grad, **self.weights(lambda w: w.grad)}  # type: ignore[dict-item]


_QWEN = {"num_experts": E, "moe_intermediate_size": HIDDEN}
_GATED = {"shared": SharedExpert(SHARED, gate=True)}
BLOCKS = {
    "mixtral": Block(MixtralSparseMoeBlock, MixtralConfig, {"num_local_experts": E, "intermediate_size": HIDDEN}, 2),
    "qwen2_moe": Block(
        Qwen2MoeSparseMoeBlock, Qwen2MoeConfig, _QWEN | {"shared_expert_intermediate_size": SHARED}, 4,
        _GATED | {"normalize": False},
    ),
    "qwen3_moe": Block(Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, _QWEN | {"norm_topk_prob": True}, 4),
    "qwen3_next": Block(
        Qwen3NextSparseMoeBlock, Qwen3NextConfig, _QWEN | {"shared_expert_intermediate_size": SHARED}, 3, _GATED
    ),
    "deepseek_v3": Block(
        DeepseekV3MoE, DeepseekV3Config,
        {"n_routed_experts": E, "moe_intermediate_size": HIDDEN, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5}, 3,
        {"score_func": "sigmoid", "route_scale": 2.5, "num_groups": 4, "top_k_groups": 2,
         "shared": SharedExpert(HIDDEN)},
    ),
    "llama4": Block(
        Llama4TextMoe, Llama4TextConfig, {"num_local_experts": E, "intermediate_size": HIDDEN}, 1,
        {"score_func": "sigmoid", "normalize": False, "prob_in": "input", "shared": SharedExpert(HIDDEN)},
        {"transposed": True},
    ),
    "llama4_top2": Block(
        Llama4TextMoe, Llama4TextConfig, {"num_local_experts": E, "intermediate_size": HIDDEN}, 2,
        {"score_func": "sigmoid", "normalize": False, "prob_in": "input", "shared": SharedExpert(HIDDEN)},
        {"transposed": True},
    ),
    "gpt_oss": Block(
        GptOssMLP, GptOssConfig, {"num_local_experts": E, "intermediate_size": HIDDEN}, 4,
        {"score_func": "softmax_of_chosen", "router_bias": True, "bias": True},
        {"transposed": True, "interleaved": True}, {"alpha": 1.702, "limit": 7.0, "offset": 1.0},
    ),
}  # fmt: skip
