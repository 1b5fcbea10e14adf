"""A plain Mixture-of-Experts layer in bf16, in PyTorch and in JAX, as a user writes it without this package.

x (T, D) --router, softmax, top-k--> p (T, k), experts (T, k) --stable sort--> rows by expert (T k, D)
         --grouped products w1, w3; silu(gate) up; w2--> (T k, D) --weighted scatter-add--> y (T, D)

The steps follow torchtitan's layer (torchtitan/models/common/moe.py).
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped_gemm import grouped_bf16


class Weights(NamedTuple):
    """bf16: router (E, D), w1 and w3 (E, F, D), w2 (E, D, F)."""

    router: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor


@cache
def _swiglu() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda gate, up: F.silu(gate) * up)


def torch_layer(x: Tensor, weights: Weights, top_k: int, router_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x (T, D) bf16 -> y (T, D). router_dtype: of the router's product; fp32 selects the experts that ours selects."""
    router = weights.router
    scores = F.linear(x.to(router_dtype), router.to(router_dtype)).float().softmax(-1)
    probs, experts = scores.topk(top_k, -1)
    return torch_experts(x, experts, probs / probs.sum(-1, keepdim=True), weights)


def torch_experts(x: Tensor, experts: Tensor, probs: Tensor, weights: Weights) -> Tensor:
    """The layer behind its router: experts and probs (T, k)."""
    num_experts, top_k = len(weights.router), experts.shape[1]
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.histc(experts.flatten().float(), num_experts, 0, num_experts)  # bincount would wait for the device
    ends = torch.cumsum(counts, 0).to(torch.int32)
    token = order // top_k
    out = plain_experts(x.index_select(0, token), weights, ends).float() * probs.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))


def plain_experts(rows: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    """rows (P, D) by expert, ends (E,) int32 -> (P, D)."""
    h = _swiglu()(grouped_bf16(rows, weights.w1, ends), grouped_bf16(rows, weights.w3, ends))
    return grouped_bf16(h, weights.w2, ends)


def jax_layer(x: jax.Array, weights: tuple[jax.Array, ...], top_k: int) -> jax.Array:
    """The same layer on `jax.lax.ragged_dot`; router (E, D), w1 and w3 (E, D, F), w2 (E, F, D), its documented layout.

    XLA's lowering of ragged_dot writes dense operands: see `ragged_dot_nbytes`.
    """
    router, w1, w3, w2 = weights
    scores = jax.nn.softmax((x @ router.T).astype(jnp.float32))
    probs, experts = jax.lax.top_k(scores, top_k)
    return jax_experts(x, experts, probs / probs.sum(-1, keepdims=True), w1, w3, w2)


def jax_experts(
    x: jax.Array, experts: jax.Array, probs: jax.Array, w1: jax.Array, w3: jax.Array, w2: jax.Array
) -> jax.Array:
    """The layer behind its router: experts and probs (T, k)."""
    top_k = experts.shape[1]
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=len(w1)).astype(jnp.int32)
    rows = x[order // top_k]

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, w, sizes, preferred_element_type=jnp.bfloat16)

    h = jax.nn.silu(product(rows, w1)) * product(rows, w3)
    out = product(h, w2).astype(jnp.float32) * probs.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // top_k].add(out.astype(x.dtype))


# XLA holds several dense operands of a layer on ragged_dot at once: with 7 GiB each they fit into 139 GiB, with 16 GiB
# each they do not.
MAX_RAGGED_DOT_NBYTES = 8 << 30


def ragged_dot_nbytes(rows: int, width: int, num_experts: int) -> int:
    """Bytes of the dense bf16 operand (rows, num_experts x width) that XLA writes for a ragged_dot on a GPU."""
    return 2 * rows * width * num_experts
