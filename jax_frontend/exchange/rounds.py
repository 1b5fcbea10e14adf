"""A call in rounds: a rank that gets more rows than its capacity gets them in several rounds, so that no row is lost.

    forward    round 0 | while rows are left: the next round, without saved state        --> sum of each token's slots
    backward   round 0 | while rows are left: forward and backward of the next round     --> sum of each token's slots

All ranks know the counts of all, and so the same rounds. A row per slot is kept across rounds and summed after the last
one: results and gradients of rows have the bytes of one round. The weight gradient of an expert is copied from its
round, and added up, in the dtype of the weights, if the expert is split over rounds. A loop of no later round runs
nothing. core_kernels/policy/rounds.py decides what a round takes; `take_rows` is its twin.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..ops import RowMap
from ..ops.call import jitted, vary, varying_axes
from ..products.gathers import HERE
from .local import SlotMaps
from .peer_exchange import PeerSizes, Shared, Taken, fitting_rows, map_peers

State = TypeVar("State")


class Maps(NamedTuple):
    """One round on a rank. taken (local experts,) bool: experts with rows in it; split: and with rows before it."""

    row_map: RowMap
    slots: SlotMaps
    taken: jax.Array
    split: jax.Array


class Plan(NamedTuple):
    """What the ranks tell each other, and the first round."""

    shared: Shared
    first: Taken
    maps: Maps


class Inputs(NamedTuple):
    """tokens (T, D). probs (T, top_k) fp32, that the experts multiply by, or None. weights: a tree, of which every
    float array has a first dim of experts."""

    tokens: jax.Array
    probs: jax.Array | None
    weights: Any


class Gradients(NamedTuple):
    """Of one round: rows that `read_slots` reads, a number per slot (M,) or None, and the tree of the weights."""

    rows: jax.Array
    numbers: jax.Array | None
    weights: Any


class Call(Protocol):
    """One call, static. `rows` are rows of experts, or rows per slot if `in_slots`."""

    @property
    def sizes(self) -> PeerSizes: ...

    @property
    def top_k(self) -> int: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def rounds(self) -> bool:
        """Whether there may be several."""
        ...

    @property
    def in_slots(self) -> bool: ...

    @property
    def summed(self) -> bool:
        """Whether the result is the sum of each token's slots (T, N), or the slots (M, N)."""
        ...

    def forward(self, inputs: Inputs, maps: Maps, save: bool) -> tuple[jax.Array, Any]:
        """Rows, and with `save` the state of the backward."""
        ...

    def wrap(self, slots: jax.Array) -> Any:
        """The result of slots, whose gradient `prepare` takes."""
        ...

    def prepare(self, grad: Any) -> jax.Array:
        """The gradient of the result, as the backward of each round takes it."""
        ...

    def backward(self, saved: Any, grad: jax.Array, maps: Maps) -> Gradients: ...

    def read_slots(self, rows: jax.Array, maps: Maps) -> jax.Array:
        """(M, N), without a meaning in slots that are not in the round."""
        ...

    def sum(self, rows: jax.Array, maps: Maps, dtype: Any) -> jax.Array:
        """(T, N), the sum of each token's slots, of a call of one round."""
        ...


def take_rows(left: jax.Array, capacity: int, alignment: int) -> jax.Array:
    """The rows of the next round, of the rows (ranks, E) that are left. capacity: of a rank, with padding."""
    ranks = left.shape[0]
    of_owners = left.reshape(ranks, ranks, -1)  # of the ranks of tokens, of experts, and their experts
    totals = of_owners.sum(0)
    sizes = jnp.maximum(-(-totals // alignment), 1) * alignment
    ends = jnp.cumsum(sizes, 1)
    starts, first = ends - sizes, (ends > capacity).argmax(1)[:, None]  # the first expert that does not fit, or 0
    whole = first * alignment + jnp.take_along_axis(sizes, first, 1) <= capacity
    limits = jnp.where((ends[:, -1:] > capacity) & whole, jnp.take_along_axis(starts, first, 1), capacity)
    before = jnp.cumsum(of_owners, 0) - of_owners
    return jnp.clip(jnp.clip(limits - starts, 0, totals)[None] - before, 0, of_owners).reshape(left.shape)


def plan_rounds(sizes: PeerSizes, shared: Shared, rounds: bool) -> Plan:
    """The first round; without rounds it takes the rows that fit."""
    rows = take_rows(shared.counts, sizes.padded, sizes.alignment) if rounds else fitting_rows(shared, sizes)
    first = Taken(jnp.zeros_like(rows), rows)
    return Plan(shared, first, _map_round(sizes, shared, first))


def _map_round(sizes: PeerSizes, shared: Shared, taken: Taken) -> Maps:
    rank = lax.axis_index(sizes.axis_name)
    before, rows = (jnp.take(t.sum(0).reshape(sizes.ranks, -1), rank, axis=0) for t in taken)
    return Maps(*map_peers(shared, taken, sizes), rows > 0, (rows > 0) & (before > 0))


def run_rounds(call: Call, inputs: Inputs, weights: Any, plan: Plan) -> Any:
    """The result of a call, whose arguments are checked. weights: the weights of `inputs` as the layer was given them.
    The backward of later rounds reads these: a scan saves no copy of an argument, but of what is computed from it."""
    axes = varying_axes(*jax.tree.leaves((inputs, plan)))
    inputs, plan = jax.tree.map(lambda x: vary(x, axes), (inputs, plan))
    return _run_jitted(call, inputs, weights, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: Call, inputs: Inputs, weights: Any, plan: Plan) -> Any:
    rows, _ = call.forward(inputs, plan.maps, False)
    return _run_later_forward(call, inputs, plan, rows)


def _run_fwd(call: Call, inputs: Inputs, weights: Any, plan: Plan) -> tuple[Any, Any]:
    rows, saved = call.forward(inputs, plan.maps, True)
    again = inputs._replace(weights=weights) if call.rounds else None
    return _run_later_forward(call, inputs, plan, rows), (saved, again, plan)


def _run_bwd(call: Call, residuals: Any, grad: Any) -> tuple[Any, ...]:
    saved, again, plan = residuals
    grad = call.prepare(grad)
    found = call.backward(saved, grad, plan.maps)
    slots, numbers, has_row = found.rows, found.numbers, plan.maps.slots.slots >= 0
    # The bytes of quantized weights have gradients of no dtype, which no loop carries.
    leaves, tree = jax.tree.flatten(found.weights)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    several = _is_several(plan)

    def add_round(state: Any, maps: Maps) -> Any:
        slots, numbers, totals = state
        axes = varying_axes(again.tokens)
        inputs = again._replace(weights=jax.tree.map(lambda w: vary(w, axes), again.weights))
        _, saved = call.forward(inputs, maps, True)
        found = call.backward(saved, grad, maps)
        slots = _insert(slots, call.read_slots(found.rows, maps), maps)
        if found.numbers is not None:
            numbers = _insert(numbers, found.numbers, maps)
        parts = jax.tree.leaves(found.weights)
        return slots, numbers, [_add(total, parts[i], maps) for i, total in zip(floats, totals, strict=True)]

    if call.rounds:
        slots = _begin(call, found.rows, plan, several, True)
        state = slots, numbers, [leaves[i] for i in floats]
        slots, numbers, totals = _run_later(call, plan, state, add_round)
        for i, total in zip(floats, totals, strict=True):
            leaves[i] = total
        has_row = _has_row(call, plan)
    dx = _sum(call, slots, found.rows, plan, has_row, several, found.rows.dtype)
    if numbers is not None:
        numbers = jnp.where(has_row, numbers, 0).reshape(-1, call.top_k)
    return Inputs(dx, numbers, jax.tree.unflatten(tree, leaves)), None, None


_run.defvjp(_run_fwd, _run_bwd)
_run_jitted = jitted(_run, 0)


def _run_later_forward(call: Call, inputs: Inputs, plan: Plan, rows: jax.Array) -> Any:
    """The result, of the rows of the first round and of later rounds, for which nothing is saved."""

    def add_round(slots: jax.Array, maps: Maps) -> jax.Array:
        rows, _ = call.forward(inputs, maps, False)
        return _insert(slots, call.read_slots(rows, maps), maps)

    several = _is_several(plan)
    slots, has_row = rows, plan.maps.slots.slots >= 0
    if call.rounds:
        slots = _begin(call, rows, plan, several, call.summed)
        slots, has_row = _run_later(call, plan, slots, add_round), _has_row(call, plan)
    elif not call.summed:
        slots = call.read_slots(rows, plan.maps)
    return _sum(call, slots, rows, plan, has_row, several, call.out_dtype) if call.summed else call.wrap(slots)


def _run_later(call: Call, plan: Plan, state: State, add_round: Callable[[State, Maps], State]) -> State:
    """The state after all later rounds."""
    sizes, shared = call.sizes, plan.shared

    def is_left(carry: tuple[jax.Array, State]) -> jax.Array:
        return (carry[0] < shared.counts).any()

    def run_next(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        before, state = carry
        rows = take_rows(shared.counts - before, sizes.padded, sizes.alignment)
        return before + rows, add_round(state, _map_round(sizes, shared, Taken(before, rows)))

    return lax.while_loop(is_left, run_next, (plan.first.rows, state))[1]


def _is_several(plan: Plan) -> jax.Array:
    return (plan.first.rows < plan.shared.counts).any()


def _has_row(call: Call, plan: Plan) -> jax.Array:
    """(M,) bool: the slots that have a row of an expert, in any round."""
    counts = jnp.take(plan.shared.counts, lax.axis_index(call.sizes.axis_name), axis=0)
    assert plan.shared.inverse is not None
    return plan.shared.inverse < counts.sum()


def _begin(call: Call, rows: jax.Array, plan: Plan, several: jax.Array, summed: bool) -> jax.Array:
    """A row per slot, of the first round. Sums of a call of one round read its rows in place of the slots."""
    if call.in_slots or not summed:
        return call.read_slots(rows, plan.maps)

    def read() -> jax.Array:
        return vary(call.read_slots(rows, plan.maps), axes)

    axes = varying_axes(rows, plan.maps.slots.slots)
    shape = plan.maps.slots.num_rows, rows.shape[1]
    return lax.cond(several, read, lambda: vary(lax.empty(shape, rows.dtype), axes))


def _sum(
    call: Call, slots: jax.Array, rows: jax.Array, plan: Plan, has_row: jax.Array, several: jax.Array, dtype: Any
) -> jax.Array:
    """(T, N) of slots, or of the rows of a single round. The same bytes: a sum of the same rows in the same order."""

    def of_slots() -> jax.Array:
        return sum_of_slots(slots, has_row, call.top_k, dtype)

    if call.in_slots:
        return of_slots()
    if not call.rounds:
        return call.sum(rows, plan.maps, dtype)
    return lax.cond(several, of_slots, lambda: call.sum(rows, plan.maps, dtype))


def sum_of_slots(slots: jax.Array, has_row: jax.Array, top_k: int, dtype: Any) -> jax.Array:
    """(T, N): the fp32 sum of the slots (T k, N) of each token, without the slots of no row, rounded once."""
    own = jnp.where(has_row, jnp.arange(has_row.shape[0], dtype=jnp.int32), -1)
    return HERE.combine(slots, own.reshape(-1, top_k), dtype)


def _insert(slots: jax.Array, found: jax.Array, maps: Maps) -> jax.Array:
    """The slots (M, ...), with the slots of a round from `found`."""
    mine = maps.slots.slots >= 0
    return jnp.where(mine.reshape(-1, *[1] * (slots.ndim - 1)), found, slots)


def _add(total: jax.Array, part: jax.Array, maps: Maps) -> jax.Array:
    """A gradient (experts, ...): an expert that is in one round has the bytes of that round."""
    taken, split = (mask.reshape(-1, *[1] * (total.ndim - 1)) for mask in (maps.taken, maps.split))
    return jnp.where(taken, jnp.where(split, total + part, part), total)
