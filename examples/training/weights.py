"""The initial weights as numpy arrays, under the names of the checkpoints.

    embed.weight (V, D)
    blocks.{i}.attn_norm.weight (D,)   blocks.{i}.attn.qkv.weight (3D, D)   blocks.{i}.attn.out.weight (D, D)
    blocks.{i}.moe_norm.weight (D,)    blocks.{i}.moe.router.weight (E, D)
    blocks.{i}.moe.experts.w1, .w3 (E, H, D)   blocks.{i}.moe.experts.w2 (E, D, H)
    norm.weight (D,)                   head.weight (V, D)

Legend: V vocabulary, D dim, H hidden_dim, E experts. Experts are unsharded here and in checkpoints,
for any number of ranks in training.
"""

import math

import numpy as np

from .config import Config


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, in the order in which `initial_weights` draws them."""
    v, d, h, e = config.vocab_size, config.dim, config.hidden_dim, config.num_experts
    block = {
        "attn_norm.weight": (d,),
        "attn.qkv.weight": (3 * d, d),
        "attn.out.weight": (d, d),
        "moe_norm.weight": (d,),
        "moe.router.weight": (e, d),
        "moe.experts.w1": (e, h, d),
        "moe.experts.w3": (e, h, d),
        "moe.experts.w2": (e, d, h),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(config.num_layers) for name, shape in block.items()}
    return {"embed.weight": (v, d), **blocks, "norm.weight": (d,), "head.weight": (v, d)}


def initial_weights(config: Config) -> dict[str, np.ndarray]:
    """Draw every weight from `config.seed`, float32.

    Norm gains are 1. Matrices are normal with standard deviation 1/sqrt(fan in). The embedding has deviation 1.
    Matrices that write to the residual stream are smaller by sqrt(2 num_layers). The head has deviation 0.02,
    so that the first loss is close to log(vocab_size)."""
    rng = np.random.default_rng(config.seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
            continue
        deviation = {"embed.weight": 1.0, "head.weight": 0.02}.get(name, 1 / math.sqrt(shape[-1]))
        if name.endswith(("attn.out.weight", "experts.w2")):
            deviation /= math.sqrt(2 * config.num_layers)
        weights[name] = (rng.standard_normal(shape) * deviation).astype(np.float32)
    return weights
