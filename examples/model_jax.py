"""The language model in JAX; model_torch.py is the same formulas in PyTorch.

    tokens (B, S) -> embed -> [ x + attn(norm(x)) -> x + moe(norm(x)) ] * num_layers -> norm -> head -> (B, S, V)

Parameters are one flat dict under the names of weights.py, in fp32. Activations are of `config.dense_dtype`, to which a
dense weight is cast where it is used; the experts inside `mxep.jax_frontend.moe` follow the recipe. Router, norms,
rotary embedding and loss are computed in fp32.
Legend: B sequences, S positions, D dim, N heads, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from mxep.jax_frontend import moe

from .config import Config, rope_tables

Params = dict[str, Array]


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """x / rms(x) * gain, the gain in the dtype of x."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * gain.astype(x.dtype)).astype(x.dtype)


def linear(x: Array, weight: Array) -> Array:
    """x W^T in the dtype of x."""
    return x @ weight.astype(x.dtype).T


def rotate(x_BSNH: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding: the two halves of a head are the coordinates of its points. cos and sin are fp32."""
    a, b = jnp.split(x_BSNH, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x_BSNH.dtype)


def attention(p: Params, block: str, x_BSD: Array, config: Config) -> Array:
    cos, sin = (jnp.asarray(table) for table in rope_tables(config))
    q, k, v = (
        part.reshape(*x_BSD.shape[:2], config.num_heads, config.head_dim)
        for part in jnp.split(linear(x_BSD, p[f"{block}.attn.qkv.weight"]), 3, axis=-1)
    )
    # XLA's own attention stores the scores, (B, N, S, S) fp32; cuDNN's does not, and takes 16 bits alone.
    by_cudnn = jax.default_backend() == "gpu" and x_BSD.dtype == jnp.bfloat16
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if by_cudnn else "xla")
    return linear(y.reshape(x_BSD.shape), p[f"{block}.attn.out.weight"])


def moe_config(config: Config, recipe: str) -> moe.MoEConfig:
    return moe.MoEConfig(config.dim, config.hidden_dim, config.num_experts, config.top_k, recipe=recipe)


def forward(
    p: Params, tokens_BS: Array, config: Config, recipe: str, mesh: Mesh, batch: PartitionSpec
) -> tuple[Array, Array]:
    """Return fp32 logits (B, S, V) and the mean of the layers' auxiliary losses. `batch` is the PartitionSpec of
    `tokens_BS` on the mesh, whose axis "expert" splits the experts."""
    x = p["embed.weight"][tokens_BS].astype(config.dense_dtype)
    aux_losses = []
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        x = x + attention(p, block, rms_norm(x, p[f"{block}.attn_norm.weight"], config.norm_eps), config)
        experts = {
            "router": p[f"{block}.moe.router.weight"],
            "experts": {w: p[f"{block}.moe.experts.{w}"] for w in ("w1", "w2", "w3")},
        }
        h = rms_norm(x, p[f"{block}.moe_norm.weight"], config.norm_eps)
        y, stats = moe.sharded_apply(experts, h, moe_config(config, recipe), tokens=batch, mesh=mesh)
        x = x + y.astype(x.dtype)
        aux_losses.append(stats.aux_loss)
    logits = linear(rms_norm(x, p["norm.weight"], config.norm_eps), p["head.weight"])
    return logits.astype(jnp.float32), jnp.stack(aux_losses).mean()


def loss(
    p: Params, tokens: Array, config: Config, recipe: str, mesh: Mesh, batch: PartitionSpec
) -> tuple[Array, Array]:
    """Mean cross entropy of the next byte, and the auxiliary loss. tokens: (B, S + 1)."""
    logits, aux_loss = forward(p, tokens[:, :-1], config, recipe, mesh, batch)
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean(), aux_loss
