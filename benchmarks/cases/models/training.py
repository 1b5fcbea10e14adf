"""A training step of a model of transformers, the same for every implementation of its experts.

    ids (S, L + 1) --embedding, layers, norm--> hidden (S, L, D) --one sequence at a time: head, loss, backward-->
        gradient of hidden --backward of the layers--> gradients, added up over the micro-batches
    gradients --clipping--> fused AdamW, its moments in bf16 as the weights

All candidates share one model, its gradients and its optimizer, so each has the memory of the whole device. The layers
are compiled one by one, with each implementation; head and loss are one compiled function. The logits of a micro-batch
at once, in fp32 with their gradient, would take up to 26 GiB.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from . import sharded
from .sizes import Model
from .text import text_of_library, token_ids

Phase = Callable[[str], AbstractContextManager[object]]
"""A context for a part of a step: "layers", "head and loss", "clipping", "optimizer"."""
WEIGHT_STD, EMBEDDING_STD = 0.02, 1.0
TO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
MAX_NORM = 1.0
BYTES_PER_WEIGHT = 8  # weight, gradient and two moments in bf16


class Batches(NamedTuple):
    """Sequences of a micro-batch, their length, micro-batches of a step, and steps until the tokens repeat."""

    sequences: int
    length: int
    micro_batches: int
    steps: int

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.sequences * self.length * self.micro_batches


BATCHES = Batches(sequences=4, length=4096, micro_batches=4, steps=4)


class HeadAndLoss(nn.Module):
    """hidden (L, D), labels (L,) -> the sum of the losses times `scale`, in fp32."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), labels, reduction="sum") * scale


@torch.no_grad()
def draw(model: nn.Module, published_layers: int, seed: int = 0) -> None:
    """Normal weights, ones for norms and zeros for biases, in place; the same for the same seed.

    As in GPT-2, weights whose product is added to the residual are smaller with the published number of layers; and
    embeddings are larger. Otherwise the mean of the context, which attention adds, is most of a token's values, and all
    tokens have the same experts.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = sharded.values_of(parameter)
        if "bias" in name:
            values.zero_()
        elif "embed_tokens" in name:
            values.normal_(std=EMBEDDING_STD, generator=generator)
        elif parameter.dim() > 1 or name.endswith("sinks"):
            smaller = (2 * published_layers) ** 0.5 if name.endswith(TO_RESIDUAL) else 1
            values.normal_(std=WEIGHT_STD / smaller, generator=generator)
        else:
            values.fill_(1)
        sharded.keep(parameter, values)


class Training:
    """A model of so many layers on a device, its optimizer and its tokens. whole: not sharded over the ranks, which all
    have the same tokens then."""

    def __init__(
        self, model: Model, layers: int, batches: Batches, device: str, lr: float, whole: bool = False
    ) -> None:
        self.config, self.batches, self.device = model.config(layers), batches, device
        self.published_layers = model.layers
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, attn_implementation=model.attention
            )
        self.model.to(torch.bfloat16).train()  # transformers leaves some norms in fp32
        draw(self.model, model.layers)
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        self.loss = HeadAndLoss(self.model.lm_head)
        self.loss.compile(dynamic=False)
        ranks, rank = (1, 0) if whole else (sharded.ranks(), sharded.rank())
        self.several = ranks > 1
        if self.several:
            sharded.shard(self.model, self.loss, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        shape = ranks, batches.steps, batches.micro_batches, batches.sequences, batches.length + 1
        ids = token_ids(text_of_library(math.prod(shape)), self.config.vocab_size)
        self.ids = torch.from_numpy(ids.reshape(shape)[rank]).to(device)
        self.masks = self._masks()
        self.steps = 0

    def _masks(self) -> Any:
        """Of layers with sinks, made once: transformers would make the block masks of every micro-batch again."""
        if self.config.model_type != "gpt_oss":
            return None
        sizes = self.batches.sequences, self.batches.length, self.config.hidden_size
        like = torch.empty(sizes, dtype=torch.bfloat16, device=self.device)
        arguments: dict[str, Any] = {"inputs_embeds": like, "attention_mask": None, "past_key_values": None}
        return {
            "full_attention": create_causal_mask(self.model.config, **arguments),
            "sliding_attention": create_sliding_window_causal_mask(self.model.config, **arguments),
        }

    def use(self, implementation: str) -> None:
        """Select the implementation of the experts."""
        self.model.set_experts_implementation(implementation)

    def restart(self, lr: float) -> None:
        """The first weights again, an empty optimizer, the first tokens."""
        draw(self.model, self.published_layers)
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.steps = 0

    def hidden(self, ids: Tensor) -> Tensor:
        """ids (S, L) -> (S, L, D), after the last norm."""
        return self.model.model(input_ids=ids, attention_mask=self.masks, use_cache=False).last_hidden_state

    def micro_batch(self, ids: Tensor, phase: Phase) -> Tensor:
        """Forward and backward of ids (S, L + 1): its part of the mean loss of a step. Adds to the gradients."""
        inputs, labels = ids[:, :-1], ids[:, 1:]
        with phase("layers"):
            hidden = self.hidden(inputs)
        with phase("head and loss"):
            parts, losses = [rows.requires_grad_() for rows in hidden.detach().unbind()], []
            for i, (rows, targets) in enumerate(zip(parts, labels, strict=True)):
                if self.several:
                    sharded.end_head(self.loss, last=i == len(parts) - 1)
                loss = self.loss(rows, targets, 1 / self.batches.tokens)
                loss.backward()
                losses.append(loss.detach())
            gradient = torch.stack([rows.grad for rows in parts if rows.grad is not None])
        del parts
        with phase("layers"):
            hidden.backward(gradient)
        return torch.stack(losses).sum()

    def accumulate(self, phase: Phase = nullcontext, micro_batches: int | None = None) -> Tensor:
        """The loss of a step, the mean of all ranks; the gradients of its micro-batches are added up."""
        ids = self.ids[self.steps % self.batches.steps][:micro_batches]
        loss = torch.stack([self.micro_batch(of_one, phase) for of_one in ids]).sum()
        return sharded.mean(loss) if self.several else loss

    def update(self, phase: Phase = nullcontext) -> None:
        """Clip the gradients, change the weights and drop the gradients."""
        with phase("clipping"):
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1

    def step(self) -> Tensor:
        """An optimizer step; its loss."""
        loss = self.accumulate()
        self.update()
        return loss


class ExpertsInput(NamedTuple):
    """The arguments of the first layer's experts: x (T, D), indices and weights (T, K); rows: of each expert."""

    x: Tensor
    indices: Tensor
    weights: Tensor
    rows: Tensor


def imbalance(rows: Tensor) -> float:
    """The rows of the largest group, relative to the mean of all. rows: of each expert."""
    return round(float(rows.max() / rows.float().mean()), 2)


def experts_input(training: Training) -> tuple[nn.Module, ExpertsInput]:
    """The experts of the first layer and their input, of the first micro-batch, without what attention adds: without
    compilation it would write all scores of attention with sinks."""
    model: Any = training.model.model
    module, seen = model.layers[0].mlp.experts, []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        tokens = model.embed_tokens(training.ids[0, 0, :, :-1])
        model.layers[0].mlp(model.layers[0].post_attention_layernorm(tokens))
    hook.remove()
    x, indices, weights = seen[0]
    rows = torch.bincount(indices.flatten(), minlength=module.num_experts)
    return module, ExpertsInput(x.detach(), indices, weights.detach(), rows)
