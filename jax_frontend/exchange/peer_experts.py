"""Experts of other ranks through memory of peers, as one differentiable function, in rounds.

    forward     share counts | read tokens of peers    | products of all experts | read and sum rows of peers
    backward                   read gradients of peers | products of all experts | read and sum rows, weight gradients

Nothing overlaps: device_exchange.py runs the calls that do. The result and all gradients have the bytes of `dispatch`,
experts and `combine`, but for the weights of experts that rounds.py splits.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from ..ops.mx_array import MXArray, MXGradArray, pack
from ..routing.weighted_combine import combine_slots
from .all_to_all import TokenReplicas
from .peer_exchange import PeerSizes, share
from .peer_memory import PeerMemory
from .peer_rows import Peers
from .rounds import Gradients, Inputs, Maps, plan_rounds, run_rounds
from .route import named_groups


class PeerCall(NamedTuple):
    """One call. experts: (weights, groups, row_map, prob) to rows (P, N), an MXGradArray if the recipe quantizes."""

    memory: PeerMemory
    sizes: PeerSizes
    rounds: bool
    recipe: Recipe
    experts: Callable[..., Any]
    top_k: int
    out_dtype: str
    summed: bool
    in_slots: bool = False

    @property
    def reader(self) -> Peers:
        return Peers(self.memory)

    def forward(self, inputs: Inputs, maps: Maps, save: bool) -> tuple[jax.Array, Any]:
        x, probs, order = inputs.tokens, inputs.probs, maps.slots.order
        token = order // self.top_k  # floor division keeps -1, padding, at -1
        if self.recipe.mx:
            groups: Any = self.reader.gather_mx(MXArray.quantize(x, self.recipe.rounding), token)
        else:
            groups = self.reader.permute_rows(x, token)
        groups = named_groups(groups, maps.row_map)
        prob = None if probs is None else self.reader.permute_rows(probs.reshape(-1, 1), order)[:, 0]

        def multiply(rows: jax.Array, prob: jax.Array | None, weights: Any) -> tuple[Any, jax.Array]:
            """What the gradient of the rows is received by, and the rows."""
            given = dataclasses.replace(groups, carrier=rows) if isinstance(groups, MXArray) else rows
            out = self.experts(weights, given, maps.row_map, prob)
            return ((out.q_grad, out.sf_grad, out.uses), out.value) if isinstance(out, MXGradArray) else (out, out)

        rows, weights = groups.carrier if isinstance(groups, MXArray) else groups, inputs.weights
        if not save:
            return multiply(rows, prob, weights)[1], None
        _, backward, rows = jax.vjp(multiply, rows, prob, weights, has_aux=True)
        return rows, backward

    def wrap(self, slots: jax.Array) -> Any:
        return MXGradArray.of(slots) if self.recipe.mx else slots

    def prepare(self, grad: Any) -> jax.Array:
        if isinstance(grad, MXGradArray):  # its reader sends bytes alone
            _, mx = grad.poisoned()
            assert mx is not None
            return pack(*mx)
        grad = grad.astype(jnp.bfloat16)
        return ops.quantize_row_packed(grad, rounding=self.recipe.rounding) if self.recipe.mx else grad

    def backward(self, saved: Any, grad: jax.Array, maps: Maps) -> Gradients:
        source = maps.slots.order // self.top_k if self.summed else maps.slots.order
        if self.recipe.mx:
            q, sf = self.reader.permute_mx(grad, source)
            cotangent = MXGradArray.cotangent(None, (q, sf))
            rows, prob, weights = saved((cotangent.q_grad, cotangent.sf_grad, cotangent.uses))
        else:
            rows, prob, weights = saved(self.reader.permute_rows(grad, source))
        numbers = None if prob is None else self.reader.permute_rows(prob[:, None], maps.slots.slots)[:, 0]
        return Gradients(rows, numbers, weights)

    def read_slots(self, rows: jax.Array, maps: Maps) -> jax.Array:
        return self.reader.permute_rows(rows, maps.slots.slots)

    def sum(self, rows: jax.Array, maps: Maps, dtype: Any) -> jax.Array:
        return self.reader.combine(rows, maps.slots.slots.reshape(-1, self.top_k), dtype)


def run(
    tokens: TokenReplicas, probs: jax.Array, counts: jax.Array, weights: Any, given: Any, experts: Callable[..., Any],
    recipe: Recipe, memory: PeerMemory, capacity_factor: float, prob_in: ProbIn, out_dtype: Any,
) -> jax.Array:  # fmt: skip
    """(T, N): dispatch, experts and combine in rounds, unchecked. given: the weights, as `run_rounds` takes them."""
    sizes = PeerSizes.of(memory.axis_name, tokens, counts.shape[0], capacity_factor, recipe.alignment)
    several = not sizes.holds_all
    plan = plan_rounds(sizes, share(tokens, counts, sizes), several)
    summed, dtype = prob_in != "combine", jnp.dtype(out_dtype).name
    call = PeerCall(memory, sizes, several, recipe, experts, tokens.top_k, dtype, summed)
    result = run_rounds(call, Inputs(tokens.x, probs if prob_in == "swiglu" else None, weights), given, plan)
    if summed:
        return result
    # The gradient of a weighted sum reads the rows again: they are rows of this rank.
    here = jnp.arange(sizes.num_rows, dtype=jnp.int32)
    slots = here.reshape(-1, tokens.top_k)
    return combine_slots("combine", result, probs, slots, here, out_dtype=dtype, rounding=recipe.rounding)
