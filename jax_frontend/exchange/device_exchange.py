"""Expert parallelism whose exchange the device drives, overlapped with the products: of recipe "mxfp8" on Hopper, over
the memory of the GPUs of one host.

    tokens (T, D) --pack--> packed rows --.
    home, weights of this rank's rows ----+--> program --.-- slots (T k, D) --sum--> tokens (T, D)
    weights of the experts ---------------'              '-- what the backward reads

core_kernels/peer/programs/ffn.py draws the programs. One call of XLA per direction launches a program, between two
meetings of the ranks (peer_memory.py). `define` of `_run` is what the programs compute.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from ... import cpp_bindings
from ...core_kernels.launch import ArrayType
from ...core_kernels.peer.programs import ffn
from ...core_kernels.peer.programs.program import EXCHANGE_OPS, Program, encode
from ...core_kernels.peer.programs.writer import Memory, Sizes
from ...core_kernels.policy.overflow import OnOverflow
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.swiglu.activation import SwiGLU
from .. import ops
from ..ops import device
from ..ops.call import aval, vary, varying_axes
from ..products.gathers import HERE
from ..products.weights import format_of
from ..routing.overflow import nan_gradients, nan_gradients_of_probs, nan_values
from .all_to_all import TokenReplicas, lost_of
from .peer_exchange import PeerSizes, share
from .peer_memory import PeerMemory
from .peer_rows import TARGETS, all_ranks, rank_of
from .rounds import Gradients, Inputs, Maps, plan_rounds, run_rounds, sum_of_slots

HOPPER = "sm_90"
KEPT = "x_q", "x_sf", "gate", "up"
NOWHERE = Memory(0, 0, 0, 0, 0, 0, 0)
"""Rows, slots and numbers are arrays of their own, from their first byte on."""
GRADIENTS = "dw1", "dw3", "dw2"

program_p = Primitive("mxep_exchange_program")
program_p.multiple_results = True
program_p.def_impl(partial(xla.apply_primitive, program_p))


class Static(NamedTuple):
    """What a program is made of. forward: or the backward."""

    memory: PeerMemory
    sizes: Sizes
    slots: int
    forward: bool

    @property
    def program(self) -> Program:
        if self.forward:
            return ffn.write_ffn_forward(self.sizes, NOWHERE, True, (*KEPT, *ffn.TRANSPOSED), None)
        return ffn.write_ffn_backward(self.sizes, NOWHERE, False, of_peers=True)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Of a call, in their order."""
        program = self.program
        return ("packed", "home", "rank", *(name for name in program.given if name != "home"))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("slots", "numbers", *self.program.results, "buffer")


def takes(recipe: Recipe, x: jax.Array, weights: tuple[Any, Any, Any], inside: bool, bias: bool) -> bool:
    """Whether the device drives the exchange of a layer over peer memory. x: of the layer, whose dtype y has."""
    form = format_of(recipe)
    if not all(isinstance(w, jax.Array) and w.dtype == jnp.bfloat16 for w in weights):
        return False
    groups, hidden, dim = weights[0].shape
    return (
        runs_here()
        and form.name == "fold"
        and form.wgrad_mx
        and inside
        and not bias
        and x.dtype == jnp.bfloat16
        and x.size > 0
        and ffn.takes_ffn(groups, dim, hidden)
    )


def runs_here() -> bool:
    return device.arch() == HOPPER and "exchange_program" in cpp_bindings.peer_ffi_targets()


def exchange_ffn(
    tokens: TokenReplicas, probs: jax.Array, counts: jax.Array, weights: tuple[jax.Array, ...],
    given: tuple[jax.Array, ...], recipe: Recipe, activation: SwiGLU, memory: PeerMemory, capacity_factor: float | None,
    on_overflow: OnOverflow, rounds: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """y (T, D) bf16 of the experts of all ranks, and () int32, local rows that did not fit: none with rounds. given:
    the weights, as `run_rounds` takes them."""
    op, x = "moe.apply", tokens.x
    sizes = PeerSizes.of(memory.axis_name, tokens, counts.shape[0], capacity_factor, recipe.alignment)
    several = rounds and not sizes.holds_all
    plan = plan_rounds(sizes, share(tokens, counts, sizes), several)
    maps = plan.maps
    lost = None if rounds else lost_of(tokens, counts, maps.row_map.inverse, sizes.holds_all, on_overflow)
    x, probs = nan_gradients(op, x, lost), nan_gradients_of_probs(op, probs, lost)
    groups, hidden, dim = weights[0].shape
    of_program = Sizes(
        0, sizes.ranks, groups, sizes.padded, dim, hidden, tokens.top_k, "bfloat16", int(recipe.rounding),
        tuple(activation.attributes),
    )  # fmt: skip
    call = DeviceCall(sizes, several, Static(memory, of_program, sizes.num_rows, True))
    y = run_rounds(call, Inputs(x, probs, weights), given, plan)
    overflow = jnp.zeros_like(maps.slots.overflow) if rounds else maps.slots.overflow
    return nan_values(op, y, lost), overflow


class DeviceCall(NamedTuple):
    """A `Call` whose rounds are programs. Its rows are rows per slot: a program sends them to their ranks."""

    sizes: PeerSizes
    rounds: bool
    static: Static
    in_slots: bool = True
    summed: bool = True
    out_dtype: str = "bfloat16"

    @property
    def top_k(self) -> int:
        return self.static.sizes.top_k

    def forward(self, inputs: Inputs, maps: Maps, save: bool) -> tuple[jax.Array, Any]:
        (x, probs, weights), ends = inputs, maps.row_map.group_ends
        order, slots = maps.slots.order, maps.slots.slots
        assert probs is not None
        prob = jnp.where(order >= 0, all_ranks(probs.reshape(-1), self.static.memory.axis_name)[order], 0)
        rows, _, *kept = _run(self.static, x, order, slots, (ends, prob, *weights))
        return rows, (prob, *kept) if save else None

    def wrap(self, slots: jax.Array) -> jax.Array:
        return slots

    def prepare(self, grad: jax.Array) -> jax.Array:
        return grad.astype(jnp.bfloat16)

    def backward(self, saved: Any, grad: jax.Array, maps: Maps) -> Gradients:
        prob, x_q, x_sf, gate, up, *transposed = saved
        given = maps.row_map.group_ends, x_q, x_sf, gate, up, prob, *transposed
        static = self.static._replace(forward=False)
        rows, numbers, *weights = _run(static, grad, maps.slots.order, maps.slots.slots, given)
        return Gradients(rows, numbers, tuple(weights))

    def read_slots(self, rows: jax.Array, maps: Maps) -> jax.Array:
        return rows

    def sum(self, rows: jax.Array, maps: Maps, dtype: Any) -> jax.Array:
        return sum_of_slots(rows, maps.slots.slots >= 0, self.top_k, dtype)


def _run(static: Static, x: jax.Array, order: jax.Array, slots: jax.Array, given: tuple[jax.Array, ...]):
    """slots (T k, D) bf16, numbers (T k,) fp32, results. order, slots: of `SlotMaps`, across ranks."""
    (packed,) = (ops.quantize_row_packed(x, rounding=static.sizes.rounding),)
    rank = rank_of(static.memory)
    axes = varying_axes(packed, order, rank, *given)
    arrays = [vary(a, axes) for a in (packed, order, slots, rank, *given)]

    def of_peers(packed, order, slots, rank, *given):
        home = jnp.stack([jnp.where(order >= 0, order // static.slots, -1), order % static.slots], 1)
        out = program_p.bind(packed, home.astype(jnp.int32), rank, *given, static=static)
        return tuple(vary(a, axes) for a in out[:-1])

    def define(packed, order, slots, rank, *given):
        found = _forward if static.forward else _backward
        return tuple(vary(a, axes) for a in found(static, packed, order, slots, *given))

    return lax.platform_dependent(*arrays, cuda=of_peers, default=define)


def _rows(static: Static, packed: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    of_tokens = jnp.where(order >= 0, order // static.sizes.top_k, -1)
    return HERE.permute_mx(all_ranks(packed, static.memory.axis_name), of_tokens)


def _send(static: Static, rows: jax.Array, slots: jax.Array) -> jax.Array:
    return HERE.permute_rows(all_ranks(rows, static.memory.axis_name), slots)


def _forward(static: Static, packed, order, slots, group_ends, prob, w1, w3, w2):
    (alpha, limit, offset), rounding = static.sizes.numbers, static.sizes.rounding
    q, sf = _rows(static, packed, order)
    rows = ops.fold_rows(q, sf, group_ends)
    parts = [ops.quantize_matrix_fold(w, rounding=rounding) for w in (w1, w3, w2)]
    (w1, w3, w2), transposed = ([w[:2] for w in parts], [part for w in parts for part in w[2:]])
    gate, up = ops.grouped_mm_fold_pair(*rows, *w1, *w3, group_ends, clear_rest=False)
    numbers = {"alpha": alpha, "limit": limit, "offset": offset}
    h = ops.swiglu_row_fold(gate, up, prob, group_ends, rounding=rounding, **numbers)
    (y,) = (ops.grouped_mm_fold(*h, *w2, group_ends, clear_rest=False),)
    return _send(static, y, slots), jnp.zeros(static.slots, jnp.float32), q, sf, gate, up, *transposed


def _backward(static: Static, packed, order, slots, group_ends, x_q, x_sf, gate, up, prob, *transposed):
    (alpha, limit, offset), rounding = static.sizes.numbers, static.sizes.rounding
    w1, w3, w2 = transposed[:2], transposed[2:4], transposed[4:]
    q, sf = _rows(static, packed, order)
    dh = ops.grouped_mm_fold(*ops.fold_rows(q, sf, group_ends), *w2, group_ends, clear_rest=False)
    numbers = {"alpha": alpha, "limit": limit, "offset": offset}
    found = ops.swiglu_bwd_fold(dh, gate, up, prob, group_ends, rounding=rounding, **numbers)
    gate, gate_t, up, up_t, h_t, dprob = found[:2], found[2:4], found[4:6], found[6:8], found[8:10], found[10]
    dx = ops.grouped_mm_fold_sum(*gate, *w1, *up, *w3, group_ends, clear_rest=False)
    x_t = ops.requantize_col_fold(x_q, x_sf, group_ends, rounding=rounding)
    y_t = ops.requantize_col_fold(q, sf, group_ends, rounding=rounding)
    dw2 = ops.grouped_wgrad_fold(*y_t, *h_t, group_ends)
    dw1, dw3 = ops.grouped_wgrad_fold_pair(*gate_t, *x_t, *up_t, group_ends)
    sent = _send(static, dprob[:, None], slots)[:, 0]
    return _send(static, dx, slots), sent, dw1, dw3, dw2


@program_p.def_abstract_eval
def _abstract_eval(*inputs, static: Static):
    program, dim = static.program, static.sizes.dim
    slots = ArrayType((static.slots, dim), "bfloat16"), ArrayType((static.slots,), "float32")
    buffer = ArrayType((program.nbytes,), "uint8")
    return list(map(aval, (*slots, *(program.arrays[name] for name in program.results), buffer)))


def _lower_cuda(ctx, *operands, static: Static):
    table = (*cpp_bindings.CUDA_OPS, *EXCHANGE_OPS)
    numbers = encode(static.program, static.inputs, static.outputs, table)
    lower = jax.ffi.ffi_lowering(TARGETS["exchange_program"])
    return lower(ctx, *operands, attrs=np.array(numbers, np.int64), group=np.int64(static.memory.number))


mlir.register_lowering(program_p, _lower_cuda, platform="cuda")
