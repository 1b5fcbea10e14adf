"""The language model in PyTorch; model_jax.py is the same formulas in JAX.

    tokens (B, S) -> embed -> [ x + attn(norm(x)) -> x + moe(norm(x)) ] * num_layers -> norm -> head -> (B, S, V)

All weights are fp32. Activations are of `config.dense_dtype`, to which a dense weight is cast where it is used; the
experts inside `mxep.torch_frontend.MoE` follow the recipe. Router, rotary embedding and loss are computed in fp32.
Legend: B sequences, S positions, D dim, N heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from mxep.torch_frontend import MoE, RouterConfig
from torch import Tensor, nn

from .config import Config, rope_tables


class Linear(nn.Linear):
    """x W^T in the dtype of x."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * gain, the gain in the dtype of x."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: the two halves of a head are the coordinates of its points. cos and sin are fp32."""
    a, b = x_BNSH.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BNSH.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.dim, 3 * config.dim, bias=False)
        self.out = Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config, recipe: str) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.moe_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MoE(
            config.dim,
            config.hidden_dim,
            config.num_experts,
            RouterConfig(config.top_k),
            recipe=recipe,
            dtype=torch.float32,
        )

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), cos, sin)
        y, stats = self.moe(self.moe_norm(x_BSD))
        return x_BSD + y.to(x_BSD.dtype), stats.aux_loss


class Transformer(nn.Module):
    """Parameters carry the names and shapes of weights.py."""

    def __init__(self, config: Config, recipe: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, config.dense_dtype)
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, recipe) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 logits (B, S, V) and the mean of the layers' auxiliary losses."""
        x = self.embed(tokens_BS).to(self.dtype)
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x, self.cos, self.sin)
            aux_losses.append(aux_loss)
        return self.head(self.norm(x)).float(), torch.stack(aux_losses).mean()

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of the next byte, and the auxiliary loss. tokens: (B, S + 1)."""
        logits, aux_loss = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), aux_loss
