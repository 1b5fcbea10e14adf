"""The language model in JAX; model_torch.py is the same formulas in PyTorch.

    tokens (B, S) -> embed -> [ x + attn(norm(x)) -> x + moe(norm(x)) ] * num_layers -> norm -> head -> (B, S, V)

Parameters are one flat dict under the names of weights.py, in fp32; or `stacked`, and then the layers are one scan.
Activations are of `config.dense_dtype`, to which a dense weight is cast where it is used; the experts inside
`mxep.jax_frontend.moe` follow the recipe. Router, norms, rotary embedding and loss are computed in fp32.
Legend: B sequences, S positions, D dim, N heads, V vocabulary, L layers.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from mxep.jax_frontend import RouterConfig, moe, save_mx_rows

from .checkpoint import Arrays
from .config import Config, rope_tables

Params = dict[str, Array]
STACKED = "blocks.*."
"""The names of weights of all layers, (L, ...), begin so."""
REMAT = {
    "none": None,
    "rows": partial(jax.checkpoint, policy=save_mx_rows),  # saves the rows that the experts read, as they were sent
    "all": jax.checkpoint,  # saves the input of the layer
}
"""The activations that the gradient computes again: `jax.checkpoint` of a layer."""


def stacked(weights: Arrays) -> dict[str, np.ndarray]:
    """Weights, stacked over layers: one array (L, ...) for each weight of a layer."""
    rest, layers = {}, {}
    for name, array in weights.items():
        if found := re.fullmatch(r"blocks\.(\d+)\.(.*)", name):
            layers.setdefault(STACKED + found[2], {})[int(found[1])] = array
        else:
            rest[name] = array
    return rest | {name: np.stack([found[i] for i in sorted(found)]) for name, found in layers.items()}


def unstacked(weights: Arrays) -> dict[str, np.ndarray]:
    """The inverse of `stacked`."""
    flat = {name: array for name, array in weights.items() if not name.startswith(STACKED)}
    for name in weights.keys() - flat.keys():
        flat |= {name.replace("*", str(i), 1): layer for i, layer in enumerate(weights[name])}
    return flat


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


def attention(p: Params, x_BSD: Array, config: Config) -> Array:
    cos, sin = (jnp.asarray(table) for table in rope_tables(config))
    q, k, v = (
        part.reshape(*x_BSD.shape[:2], config.num_heads, config.head_dim)
        for part in jnp.split(linear(x_BSD, p["attn.qkv.weight"]), 3, axis=-1)
    )
    # XLA's own attention stores the scores, (B, N, S, S) fp32; cuDNN's does not, and takes 16 bits alone.
    by_cudnn = jax.default_backend() == "gpu" and x_BSD.dtype == jnp.bfloat16
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if by_cudnn else "xla")
    return linear(y.reshape(x_BSD.shape), p["attn.out.weight"])


def moe_config(config: Config, recipe: str) -> moe.MoEConfig:
    return moe.MoEConfig(config.dim, config.hidden_dim, config.num_experts, RouterConfig(config.top_k), recipe=recipe)


def layer(p: Params, x: Array, config: Config, recipe: str, mesh: Mesh, batch: PartitionSpec) -> tuple[Array, Array]:
    """One layer of the model, with its own weights -> (x, its auxiliary loss)."""
    x = x + attention(p, rms_norm(x, p["attn_norm.weight"], config.norm_eps), config)
    experts = {
        "router": p["moe.router.weight"],
        "experts": {w: p[f"moe.experts.{w}"] for w in ("w1", "w2", "w3")},
    }
    h = rms_norm(x, p["moe_norm.weight"], config.norm_eps)
    y, stats = moe.sharded_apply(experts, h, moe_config(config, recipe), tokens=batch, mesh=mesh)
    return x + y.astype(x.dtype), stats.aux_loss


def forward(
    p: Params, tokens_BS: Array, config: Config, recipe: str, mesh: Mesh, batch: PartitionSpec, remat: str = "none"
) -> tuple[Array, Array]:
    """Return fp32 logits (B, S, V) and the mean of the layers' auxiliary losses. `batch` is the PartitionSpec of
    `tokens_BS` on the mesh, whose axis "expert" splits the experts. remat: a key of REMAT."""
    x = p["embed.weight"][tokens_BS].astype(config.dense_dtype)
    run = partial(layer, config=config, recipe=recipe, mesh=mesh, batch=batch)
    run = REMAT[remat](run) if REMAT[remat] else run
    if scanned := weights_of(p, STACKED):
        x, aux_losses = jax.lax.scan(lambda x, of_layer: run(of_layer, x), x, scanned)
    else:
        found = []
        for i in range(config.num_layers):
            x, aux_loss = run(weights_of(p, f"blocks.{i}."), x)
            found.append(aux_loss)
        aux_losses = jnp.stack(found)
    logits = linear(rms_norm(x, p["norm.weight"], config.norm_eps), p["head.weight"])
    return logits.astype(jnp.float32), aux_losses.mean()


def weights_of(p: Params, prefix: str) -> Params:
    return {name.removeprefix(prefix): weight for name, weight in p.items() if name.startswith(prefix)}


def loss(
    p: Params, tokens: Array, config: Config, recipe: str, mesh: Mesh, batch: PartitionSpec, remat: str = "none"
) -> tuple[Array, Array]:
    """Mean cross entropy of the next byte, and the auxiliary loss. tokens: (B, S + 1)."""
    logits, aux_loss = forward(p, tokens[:, :-1], config, recipe, mesh, batch, remat)
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean(), aux_loss
