"""Mixtral and Qwen3 in plain JAX: their layers with experts and dense layers of mxep, or of bf16 JAX alone.

    ids (S, L) -> embed -> [ x + attention(norm(x)) -> x + experts(norm(x)) ] for every layer -> norm -> (S, L, D)

Weights are bf16: dense ones (K, N), experts as in `moe.init`. The layers are not a scan, which would copy the weights
of every layer and stack their gradients. A norm is computed again in the backward, from its bf16 input, as Inductor
does for torch; otherwise XLA would save it in fp32. Scopes name the parts of a step: parts_jax.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from mxep.jax_frontend import MoEConfig, RouterConfig, dense, moe

from examples.training.model_jax import rms_norm, rotate

from ...peers.moe_layer import jax_experts
from .sizes import experts_of
from .training import EMBEDDING_STD, WEIGHT_STD

RAGGED_DOT = "ragged_dot"
KINDS = ("mixtral", "qwen3_moe")
"""The types of models whose layers are here."""
TO_RESIDUAL = ("o", "w2")
Params = dict[str, Any]


class Products(NamedTuple):
    """experts: their recipe, or RAGGED_DOT; dense: the recipe of q, k, v and o, None for a bf16 dot."""

    experts: str
    dense: str | None = None


class Sizes(NamedTuple):
    """D dim, F hidden_dim of an expert, N heads, KV heads of keys and values, H head_dim, E experts."""

    vocabulary: int
    layers: int
    dim: int
    hidden_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    eps: float
    rope_base: float
    qk_norm: bool

    def moe(self, recipe: str) -> MoEConfig:
        return MoEConfig(self.dim, self.hidden_dim, self.experts, RouterConfig(self.top_k), recipe=recipe)


def sizes_of(config: Any) -> Sizes:
    """config: of transformers."""
    qwen = config.model_type == "qwen3_moe"
    return Sizes(
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        dim=config.hidden_size,
        hidden_dim=config.moe_intermediate_size if qwen else config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        experts=experts_of(config),
        top_k=config.num_experts_per_tok,
        eps=config.rms_norm_eps,
        rope_base=config.rope_parameters["rope_theta"],
        qk_norm=qwen,
    )


def shapes(sizes: Sizes) -> Params:
    """The shapes of the weights."""
    v, _, d, f, n, kv, h, e, *_ = sizes
    of_layer = {
        "attn_norm": (d,), "q": (d, n * h), "k": (d, kv * h), "v": (d, kv * h), "o": (n * h, d), "moe_norm": (d,),
        "router": (e, d), "experts": {"w1": (e, f, d), "w2": (e, d, f), "w3": (e, f, d)},
    } | ({"q_norm": (h,), "k_norm": (h,)} if sizes.qk_norm else {})  # fmt: skip
    return {"embed": (v, d), "layers": [of_layer] * sizes.layers, "norm": (d,), "head": (d, v)}


def named_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """By the names of `named`."""
    return named(shapes(sizes), is_leaf=lambda leaf: isinstance(leaf, tuple))


def named(tree: Params, is_leaf: Any = None) -> dict[str, Any]:
    """The leaves by name: "layers.0.experts.w1"."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def draw(sizes: Sizes, published_layers: int, seed: int = 0) -> Params:
    """The distributions of training.draw, leaf by leaf: random numbers of all weights do not fit into a GPU.

    In fp32, and rounded: JAX draws 128 different normal numbers in bf16. Of such weights an update of 1e-6 changes no
    code of MXFP8. Of weights drawn in fp32 it changes few codes, whose mean change is 0.996 of the update's.
    """
    tree = shapes(sizes)

    def normal_of(key: Array, shape: tuple[int, ...], std: float) -> Array:
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    normal = jax.jit(normal_of, static_argnums=(1, 2))
    smaller, drawn = (2 * published_layers) ** 0.5, []
    for i, (name, shape) in enumerate(named_shapes(sizes).items()):
        std = EMBEDDING_STD if name == "embed" else WEIGHT_STD
        std /= smaller if name.rsplit(".", 1)[-1] in TO_RESIDUAL else 1
        key = jax.random.fold_in(jax.random.key(seed), i)
        drawn.append(normal(key, shape, std) if len(shape) > 1 else jnp.ones(shape, jnp.bfloat16))
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=lambda leaf: isinstance(leaf, tuple)), drawn)


def multiply(x: Array, w: Array, products: Products) -> Array:
    """A dense layer without a bias."""
    return jnp.dot(x, w) if products.dense is None else dense(x, w, recipe=products.dense)


@partial(jax.checkpoint, static_argnums=(2,))
@jax.named_scope("norms")
def _norm(x: Array, gain: Array, eps: float) -> Array:
    return rms_norm(x, gain, eps)


def _rope(length: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    half = sizes.head_dim // 2
    angles = np.outer(np.arange(length), sizes.rope_base ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _attention(p: Params, x: Array, sizes: Sizes, products: Products, implementation: Any) -> Array:
    s, length, _ = x.shape
    with jax.named_scope("dense"):
        q, k, v = (multiply(x, p[name], products).reshape(s, length, -1, sizes.head_dim) for name in "qkv")
    if sizes.qk_norm:
        q, k = _norm(q, p["q_norm"], sizes.eps), _norm(k, p["k_norm"], sizes.eps)
    with jax.named_scope("attention"):
        tables = tuple(map(jnp.asarray, _rope(length, sizes)))
        q, k = rotate(q, *tables), rotate(k, *tables)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    with jax.named_scope("dense"):
        return multiply(y.reshape(s, length, -1), p["o"], products)


@jax.named_scope("router")
def route(x: Array, router: Array, top_k: int) -> tuple[Array, Array]:
    """x (T, D) -> weights and experts (T, k), of a product in fp32 as ours, which chooses the same experts."""
    scores = jax.nn.softmax(jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32).T, precision="highest"))
    weights, experts = jax.lax.top_k(scores, top_k)
    return weights / weights.sum(-1, keepdims=True), experts


def run_experts(
    p: Params, x: Array, sizes: Sizes, products: Products, routing: tuple[Array, Array] | None = None
) -> Array:
    """x (T, D) -> (T, D). routing: weights and experts (T, k); None: the layer's router."""
    if products.experts == RAGGED_DOT:
        weights, experts = route(x, p["router"], sizes.top_k) if routing is None else routing
        with jax.named_scope("experts"):
            of_experts: Mapping[str, Array] = {name: w.swapaxes(1, 2) for name, w in p["experts"].items()}
            return jax_experts(x, experts, weights, of_experts["w1"], of_experts["w3"], of_experts["w2"])
    weights, experts = (None, None) if routing is None else routing
    params = {"router": p["router"], "experts": p["experts"]}
    return moe.apply(params, x, sizes.moe(products.experts), experts=experts, weights=weights)[0]


def hidden(params: Params, ids: Array, sizes: Sizes, products: Products, implementation: Any) -> Array:
    """ids (S, L) -> (S, L, D), after the last norm. implementation: of `jax.nn.dot_product_attention`."""
    x = params["embed"][ids]
    for p in params["layers"]:
        x = x + _attention(p, _norm(x, p["attn_norm"], sizes.eps), sizes, products, implementation)
        y = _norm(x, p["moe_norm"], sizes.eps)
        x = x + run_experts(p, y.reshape(-1, sizes.dim), sizes, products).reshape(x.shape)
    return _norm(x, params["norm"], sizes.eps)


def experts_rows(params: Params, ids: Array, sizes: Sizes) -> Array:
    """ids (S, L) -> (S L, D): rows for the first layer's experts, without what attention adds."""
    return _norm(params["embed"][ids], params["layers"][0]["moe_norm"], sizes.eps).reshape(-1, sizes.dim)
