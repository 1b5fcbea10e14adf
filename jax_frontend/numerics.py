"""The loss of `compute="fold"`, "balanced" and "stepped" on a layer: each operand of the layer, folded and unfolded.

    x, params --route, quantize, multiply--> x  w1  w3  gate  up  h  w2          forward
    dout -----gather, quantize, multiply---> dout  w2_t  dh  dgate  dup  w1_t  w3_t   backward, as far as operands go
                                             x_t  h_t  dout_t  dgate_t  dup_t    recipe "mxfp8"
    each --fold--> counts, energies --> core_kernels/fold/report.py

The products are the exact ones on any device, so that no operand contains the error of an earlier fold.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..core_kernels.fold.report import (
    BALANCED,
    Measured,
    NumericsReport,
    report,
    row_slices,
    share_apart,
    slots_of_blocks,
)
from ..core_kernels.formats import BLOCK, E8M0_NAN, GRADIENT_HEADROOM, WEIGHT_HEADROOM
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import moe, ops
from ._checks import check_floats
from ._shapes import Float
from .balanced import GroupedRows
from .moe_params import check_params
from .products import bias_of_rows
from .weighted_combine import weigh_slots
from .weights import MX, QuantizedWeights

OP = "numerics_report"


def numerics_report(
    params: moe.Params,
    x: Float[jax.Array, "... D"],
    config: moe.MoEConfig,
    dout: Float[jax.Array, "... D"] | None = None,
) -> NumericsReport:
    """Report the loss of folding the operands of a layer on these tokens: whether another compute is needed.

    params: as for `moe.apply` without a mesh axis. x: (..., D) bf16 or fp32. dout: the gradient of the layer's
    output, like x; None draws normal values from a fixed seed. The report covers every MXFP8 operand of the recipe,
    whatever its compute: activations, weights in both orientations, gradients; with recipe "mxfp8" also the operands
    along the tokens. No row is dropped, whatever the capacity.

    Runs forward and backward once, eagerly and without `jax.grad`. The host reads a quarter of a byte per value of each
    operand: some thousand tokens are enough.

    >>> config = moe.MoEConfig(64, 128, num_experts=2, top_k=1, recipe="mxfp8")
    >>> params, tokens = moe.init(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (512, 64))
    >>> numerics_report(params, tokens, config).lossy()
    ()
    >>> channels = jnp.where(jnp.arange(64) < 32, 2.0**16, 1.0)  # the first 32 larger, their weights smaller
    >>> router, experts = params["router"] / channels, dict(params["experts"])
    >>> experts["w1"], experts["w3"] = experts["w1"] / channels, experts["w3"] / channels
    >>> numerics_report({"router": router, "experts": experts}, tokens * channels, config).lossy()
    ('x', 'w1', 'w3')

    Raises ValueError (shapes, NaN, a recipe that folds nothing), TypeError (dtypes), NotImplementedError inside of jit,
    grad and shard_map.
    """
    recipe = _check(params, x, config, dout)
    rounding, numbers = recipe.rounding, config.activation.attributes
    w1, w3, w2 = (_values_of(params["experts"][name]) for name in ("w1", "w3", "w2"))
    x_TD = jnp.asarray(x).reshape(-1, config.dim)
    dout = jax.random.normal(jax.random.key(0), x.shape, x.dtype) if dout is None else jnp.asarray(dout)

    _, (experts_TK, probs_TK, _) = moe._route(params, x_TD, config)
    order, _, counts = ops.sort_by_expert(experts_TK.reshape(-1), config.num_experts)
    maps = ops.row_map(
        counts, num_rows=order.shape[0], num_local_experts=config.num_experts, alignment=recipe.alignment
    )
    ends, slot_P = maps.group_ends, jnp.append(order, -1)[maps.row_map]
    token_P = slot_P // config.top_k  # -1 stays -1
    prob_P = jnp.append(probs_TK.reshape(-1), 0.0)[slot_P]
    in_swiglu = prob_P if config.prob_in == "swiglu" else prob_P[:0]

    of: dict[str, Measured] = {}
    operands: dict[str, GroupedRows] = {}

    def measure(name: str, x: GroupedRows, headroom: int) -> None:
        operands[name], of[name] = x, _rows(x, headroom)

    def rows(name: str, pair: MX, headroom: int = 0) -> MX:
        measure(name, GroupedRows(*pair, ends), headroom)
        return pair

    def weight(name: str, pair: MX) -> MX:
        measure(name, GroupedRows.of_weights(*pair), WEIGHT_HEADROOM)
        return pair

    def tokens(name: str, pair: MX) -> None:
        of[name] = _tokens(*pair, ends)

    sent, from_P = (weigh_slots(x_TD, probs_TK), slot_P) if config.prob_in == "input" else (x_TD, token_P)
    packed = ops.quantize_row_packed(sent.astype(jnp.bfloat16), rounding=rounding)
    x_P = rows("x", ops.permute_mx(packed, from_P))
    b1, b3 = (params["experts"].get(name) for name in ("b1", "b3"))
    gate = _product(x_P, weight("w1", ops.quantize_row(w1, rounding=rounding)), ends, b1)
    up = _product(x_P, weight("w3", ops.quantize_row(w3, rounding=rounding)), ends, b3)
    rows("h", ops.swiglu_row(gate, up, in_swiglu, rounding, False, *numbers))
    weight("w2", ops.quantize_row(w2, rounding=rounding))

    dout_P = ops.permute_rows(dout.reshape(x_TD.shape), token_P).astype(jnp.float32)
    dout_P = dout_P * prob_P[:, None] if config.prob_in == "combine" else dout_P
    d_P = rows("dout", ops.quantize_row(dout_P.astype(jnp.bfloat16), rounding=rounding))
    dh = ops.grouped_mm_mx(*d_P, *weight("w2_t", ops.quantize_col(w2, rounding=rounding)), ends)
    dgate, dup, _ = ops.swiglu_bwd(dh, gate, up, in_swiglu, *numbers)
    rows("dgate", ops.quantize_row(dgate, rounding=rounding), GRADIENT_HEADROOM)
    weight("w1_t", ops.quantize_col(w1, rounding=rounding))
    rows("dup", ops.quantize_row(dup, rounding=rounding), GRADIENT_HEADROOM)
    weight("w3_t", ops.quantize_col(w3, rounding=rounding))

    if recipe.wgrad_mx:
        tokens("x_t", ops.quantize_col(ops.dequantize(*x_P), rounding=rounding))
        tokens("dgate_t", ops.quantize_col(dgate, rounding=rounding))
        tokens("dup_t", ops.quantize_col(dup, rounding=rounding))
        tokens("h_t", ops.swiglu_col(gate, up, in_swiglu, rounding, False, *numbers))
        tokens("dout_t", ops.quantize_col(ops.dequantize(*d_P), rounding=rounding))
    for name, weights in BALANCED.items():
        own, others = operands[name].level(), [operands[w].level() for w in weights]
        other = reduce(jnp.minimum, others)
        of[name] = of[name]._replace(balanced=_balanced(operands[name], own, other))
        for w in weights:
            of[w] = of[w]._replace(balanced=_balanced(operands[w], other, own))
    return report(of)


def _product(x: MX, w: MX, ends: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x w^T [+ bias (G, N)] in bf16, rounded once."""
    if bias is None:
        return ops.grouped_mm_mx(*x, *w, ends)
    sums = ops.grouped_mm_mx(*x, *w, ends, out_dtype="float32")
    return (sums + bias_of_rows(bias.astype(jnp.float32), ends, sums.shape[0])).astype(jnp.bfloat16)


def _check(params: moe.Params, x: jax.Array, config: moe.MoEConfig, dout: jax.Array | None) -> Recipe:
    if not isinstance(config, moe.MoEConfig):
        fail(TypeError, OP, "config", f"a {type(config).__name__}", "allowed: a MoEConfig")
    recipe = Recipe.parse(config.recipe)
    if not recipe.mx:
        got = f"recipe {recipe.name!r}"
        fail(ValueError, OP, "config", got, "allowed: 'mxfp8' or 'mxfp8_wgrad_with_hp'; others fold nothing")
    for name, value in (("x", x), *((("dout", dout),) if dout is not None else ())):
        check_floats(OP, name, value)
    for name, value in (("params", params), ("x", x), ("dout", dout)):
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            fail(NotImplementedError, OP, name, "a traced value", "allowed: arrays; call it outside of jit and grad")
    if x.ndim < 1 or x.shape[-1] != config.dim:
        fail(ValueError, OP, "x", f"shape {x.shape}", f"allowed: (..., {config.dim})")
    if dout is not None and dout.shape != x.shape:
        fail(ValueError, OP, "dout", f"shape {dout.shape}", f"allowed: {x.shape}, x's")
    check_params(params, config, None)
    weights = {name: _values_of(w) for name, w in (("router", params["router"]), *params["experts"].items())}
    for name, value in {**weights, "x": x, "dout": dout}.items():
        if value is not None and not jnp.isfinite(value).all():
            fail(ValueError, OP, name, "NaN or infinity", "allowed: finite values; other values have no SQNR")
    return recipe


def _values_of(w: jax.Array | QuantizedWeights) -> jax.Array:
    return w.values if isinstance(w, QuantizedWeights) else w


def _slices(x: GroupedRows) -> tuple[slice, ...]:
    return row_slices(np.asarray(x.ends))


def _rows(x: GroupedRows, headroom: int = 0) -> Measured:
    """Folded to one scale per row, and stepped."""
    (q, sf, _), groups = x, _slices(x)
    qf, row_sf = ops.fold_rows(q, sf, headroom=headroom)
    of = _measured(q, sf, qf, jnp.broadcast_to(row_sf[:, None], sf.shape), groups)
    qf, _, step_sf, apart = ops.fold_rows_stepped(q, sf)
    share = share_apart(np.asarray(apart), sf.shape[1], groups[-1].stop)
    return of._replace(stepped=_measured(q, sf, qf, step_sf.T, groups), apart=share)


def _balanced(x: GroupedRows, own: jax.Array, other: jax.Array) -> Measured:
    """Folded by the levels of both operands. Unmoved, a block has the scale of its row less what it moved."""
    qf, row_sf = x.folded(own, other)
    moved = lax.div(own.astype(jnp.int32) - other.astype(jnp.int32), jnp.int32(2))  # towards zero
    group = np.searchsorted(np.asarray(x.ends), np.arange(len(x.q)), side="right")
    of_rows = jnp.pad(moved, ((0, 1), (0, 0)))[group]
    target = jnp.clip(row_sf[:, None].astype(jnp.int32) - of_rows, 0, E8M0_NAN - 1)
    target = jnp.where(row_sf[:, None] == E8M0_NAN, E8M0_NAN, target).astype(jnp.uint8)
    return _measured(x.q, x.sf, qf, target, _slices(x))


def _tokens(q: jax.Array, sf: jax.Array, ends: jax.Array) -> Measured:
    """Folded to one scale per row and chunk of 256 tokens."""
    qf, span_sf = ops.fold_groups(q, sf, ends)
    slots = slots_of_blocks(np.asarray(ends), sf.shape[1])
    target = jnp.where(slots < 0, np.uint8(E8M0_NAN), span_sf[np.maximum(slots, 0)].T)
    return _measured(q, sf, qf, target, (slice(0, q.shape[0]),))


def _measured(q: jax.Array, sf: jax.Array, qf: jax.Array, target: jax.Array, groups: tuple[slice, ...]) -> Measured:
    """q (R, K), its scales (R, K/32), its fold qf, and the scale byte `target` of each folded block."""
    counts, (signal, noise), top = jax.device_get(_measure(q, sf, qf, target))
    nonzero, rounded, flushed = (int(n.sum(dtype=np.int64)) for n in counts)
    return Measured((nonzero, rounded, flushed), signal, noise, top, groups)


@jax.jit
def _measure(q: jax.Array, sf: jax.Array, qf: jax.Array, target: jax.Array):
    """Counts per row; per row and block the squares of the values and of the fold's error, in units of the row's top
    scale; the top scale."""
    top = jnp.where(target == E8M0_NAN, 0, target).max(1)
    nan = (sf == E8M0_NAN) | (target == E8M0_NAN)
    value, folded = _values(q, sf, top, nan), _values(qf, target, top, nan)
    energies = jnp.square(value).sum(-1), jnp.square(value - folded).sum(-1)
    return ops.count_fold_loss(q, sf, target), energies, top


def _values(q: jax.Array, byte: jax.Array, top: jax.Array, nan: jax.Array) -> jax.Array:
    """(R, K/32, 32) fp32 in units of the row's top scale; zeros for NaN."""
    # The shift stops at 2^-60, so that squares are fp32 numbers; the fold flushes such values anyway.
    shift = jnp.clip(byte.astype(jnp.int32) - top[:, None].astype(jnp.int32), -60, 0)
    scale = lax.bitcast_convert_type(jnp.where(nan, 0, (127 + shift) << 23), jnp.float32)
    value = lax.bitcast_convert_type(q, jnp.float8_e4m3fn).astype(jnp.float32)
    value = jnp.where(jnp.isnan(value), 0, value).reshape(*byte.shape, BLOCK)
    return value * scale[..., None]
