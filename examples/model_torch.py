"""The language model in PyTorch; model_jax.py is the same formulas in JAX.

    tokens (B, S) -> embed -> [ x + attn(norm(x)) -> x + moe(norm(x)) ] * num_layers -> norm -> head -> (B, S, V)

Dense parts are fp32; the experts inside `mxep.torch_frontend.MoE` are bf16 or MXFP8.
Legend: B sequences, S positions, D dim, N heads, V vocabulary.
"""

import torch
import torch.nn.functional as F
from mxep.torch_frontend import MoE
from torch import Tensor, nn

from .config import Config, rope_tables


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: the two halves of a head are the coordinates of its points."""
    a, b = x_BNSH.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: Config, recipe: str) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.moe_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MoE(
            config.dim,
            config.hidden_dim,
            config.num_experts,
            config.top_k,
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
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, recipe) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, S, V) and the mean of the layers' auxiliary losses."""
        x = self.embed(tokens_BS)
        aux_losses = []
        for block in self.blocks:
            x, aux_loss = block(x, self.cos, self.sin)
            aux_losses.append(aux_loss)
        return self.head(self.norm(x)), torch.stack(aux_losses).mean()

    def loss(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of the next byte, and the auxiliary loss. tokens: (B, S + 1)."""
        logits, aux_loss = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), aux_loss
