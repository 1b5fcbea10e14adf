"""The formulas of formulas_torch.py, written for `jax.jit`. They return their outputs."""

import jax
import jax.numpy as jnp
from mxep.core_kernels.formats import GRADIENT_HEADROOM, HEADROOM, WEIGHT_HEADROOM

Pair = tuple[jax.Array, jax.Array]
E4M3 = jnp.float8_e4m3fn


def _bits(x: jax.Array, dtype: type) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def _encode(x: jax.Array, block: int = 32) -> Pair:
    """(..., K) -> E4M3 codes (..., K/block, block) and E8M0 bytes (..., K/block), RCEIL."""
    blocks = x.reshape(*x.shape[:-1], -1, block).astype(jnp.float32)
    amax = jnp.abs(blocks).max(-1)
    bits = _bits(amax / 448.0, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = exponent + jnp.where(exponent == 0, mantissa > 0x400000, mantissa != 0).astype(jnp.int32)
    byte = jnp.where(jnp.isfinite(amax), byte, 255)
    inverse = _bits(jnp.where(byte < 254, (254 - byte) << 23, 0x400000), jnp.float32)
    inverse = jnp.where(byte == 255, jnp.nan, inverse)
    return jnp.clip(blocks * inverse[..., None], -448, 448).astype(E4M3), byte


def quantize_row(x: jax.Array) -> Pair:
    codes, byte = _encode(x)
    return _bits(codes, jnp.uint8).reshape(x.shape), byte.astype(jnp.uint8)


def quantize_col(x: jax.Array) -> Pair:
    return quantize_row(x.mT)


def quantize_both(x: jax.Array) -> tuple[jax.Array, ...]:
    return *quantize_row(x), *quantize_col(x)


def quantize_row_fold(x: jax.Array, headroom: int = 0) -> Pair:
    codes, byte = _encode(x)
    finite = jnp.where(byte == 255, -1, byte)
    largest = finite.max(-1, keepdims=True)
    if headroom:
        first = finite[..., : 256 // 32].max(-1, keepdims=True)
        least = jnp.where(first < 0, -1, (first + headroom).clip(max=254))
        raised, largest = jnp.maximum(finite, least), jnp.maximum(largest, least)
        codes = (codes.astype(jnp.float32) * jnp.exp2((finite - raised).astype(jnp.float32))[..., None]).astype(E4M3)
        finite = raised
    factor = jnp.where(byte == 255, jnp.nan, jnp.exp2((finite - largest).astype(jnp.float32)))
    folded = (codes.astype(jnp.float32) * factor[..., None]).astype(E4M3)
    return _bits(folded, jnp.uint8).reshape(x.shape), (largest[..., 0] & 255).astype(jnp.uint8)


def _chunk_scales(byte: jax.Array, group_ends: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bytes (K, M/32) -> scale of every chunk (K, S), chunk of every block, and whether a group owns the block."""
    block, g = 32 * jnp.arange(byte.shape[1]), len(group_ends)
    num_slots, begins = 32 * byte.shape[1] // 256 + g, jnp.pad(group_ends, (1, 0))
    group = jnp.searchsorted(group_ends, block, side="right")
    owned, begin = group < g, begins[group]
    slot = (begin // 256 + group + (block - begin) // 256).clip(max=num_slots - 1)
    first, slots = begins[:-1] // 256 + jnp.arange(g), jnp.arange(num_slots)
    group_of = jnp.searchsorted(first, slots, side="right") - 1
    rank = slots - first[group_of]
    # Byte + 1: 0 is a chunk without a finite scale.
    largest = jnp.where(owned & (byte != 255), byte + 1, 0)
    largest = jnp.zeros((len(byte), num_slots), largest.dtype).at[:, slot].max(largest)
    largest = jnp.where((rank == 0) & (largest > 0), largest + HEADROOM, largest).clip(max=255)
    so_far = jax.lax.cummax(largest + 256 * group_of, axis=1) - 256 * group_of
    used = 256 * rank < jnp.diff(begins)[group_of]
    return jnp.where(used, so_far - 1, 0).clip(min=0), slot, owned


def _fold_columns(x: jax.Array, group_ends: jax.Array) -> Pair:
    codes, byte = _encode(x.mT)
    scales, slot, owned = _chunk_scales(byte, group_ends)
    shift = (byte - scales[:, slot]).astype(jnp.float32)
    factor = jnp.where(byte == 255, jnp.nan, jnp.exp2(shift))
    folded = _bits((codes.astype(jnp.float32) * factor[..., None]).astype(E4M3), jnp.uint8)
    return jnp.where(owned[:, None], folded, 0).reshape(x.mT.shape), scales.astype(jnp.uint8).mT


def quantize_both_fold(x: jax.Array, group_ends: jax.Array, headroom: int = 0) -> tuple[jax.Array, ...]:
    return *quantize_row_fold(x, headroom), *_fold_columns(x, group_ends)


def requantize_col_fold(q: jax.Array, sf: jax.Array, group_ends: jax.Array) -> Pair:
    return _fold_columns(*dequantize(q, sf), group_ends)


def quantize_matrix_fold(x: jax.Array) -> tuple[jax.Array, ...]:
    return *quantize_row_fold(x, WEIGHT_HEADROOM), *quantize_row_fold(x.mT, WEIGHT_HEADROOM)


def quantize_matrix_fold_t(x: jax.Array) -> Pair:
    return quantize_row_fold(x.mT, WEIGHT_HEADROOM)


def quantize_rowwise(x: jax.Array) -> Pair:
    codes, byte = _encode(x, x.shape[-1])
    return _bits(codes, jnp.uint8).reshape(x.shape), byte[..., 0].astype(jnp.uint8)


def dequantize(q: jax.Array, sf: jax.Array) -> tuple[jax.Array]:
    exponent = sf.astype(jnp.int32)
    scale = _bits(jnp.where(exponent == 0, 0x400000, exponent << 23), jnp.float32)
    scale = jnp.where(exponent == 255, jnp.nan, scale)
    blocks = _bits(q, E4M3).astype(jnp.float32).reshape(*sf.shape, 32)
    return ((blocks * scale[..., None]).reshape(q.shape).astype(jnp.bfloat16),)


def _swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array) -> jax.Array:
    h = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32) * prob[:, None]
    return h.astype(jnp.bfloat16)


def swiglu_row(gate: jax.Array, up: jax.Array, prob: jax.Array) -> Pair:
    return quantize_row(_swiglu(gate, up, prob))


def swiglu_row_fold(gate: jax.Array, up: jax.Array, prob: jax.Array) -> Pair:
    return quantize_row_fold(_swiglu(gate, up, prob))


def _swiglu_bwd(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    g, u, d = (x.astype(jnp.float32) for x in (gate, up, dh))
    sig = jax.nn.sigmoid(g)
    silu = g * sig
    dprob = (d * silu * u).sum(-1)
    d = d * prob[:, None]
    return (d * u * (sig + silu * (1 - sig))).astype(jnp.bfloat16), (d * silu).astype(jnp.bfloat16), dprob


def swiglu_bwd_row(dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array) -> tuple[jax.Array, ...]:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    return *quantize_row(dgate), *quantize_row(dup), dprob


def swiglu_bwd_both(dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array) -> tuple[jax.Array, ...]:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    return *quantize_both(dgate), *quantize_both(dup), dprob


def swiglu_bwd_all(dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array) -> tuple[jax.Array, ...]:
    *gradients, dprob = swiglu_bwd_both(dh, gate, up, prob)
    return *gradients, *quantize_col(_swiglu(gate, up, prob)), dprob


def swiglu_bwd_fold(
    dh: jax.Array, gate: jax.Array, up: jax.Array, prob: jax.Array, group_ends: jax.Array
) -> tuple[jax.Array, ...]:
    dgate, dup, dprob = _swiglu_bwd(dh, gate, up, prob)
    of_gate, of_up = (quantize_both_fold(x, group_ends, GRADIENT_HEADROOM) for x in (dgate, dup))
    return *of_gate, *of_up, *_fold_columns(_swiglu(gate, up, prob), group_ends), dprob


def route_bwd(dweights: jax.Array, dshares: jax.Array, logits: jax.Array, ids: jax.Array) -> tuple[jax.Array]:
    scores = jax.nn.softmax(logits)
    chosen = jnp.take_along_axis(scores, ids, 1)
    total = chosen.sum(-1, keepdims=True)
    d = (dweights - (dweights * chosen / total).sum(-1, keepdims=True)) / total
    d = dshares + jnp.put_along_axis(jnp.zeros_like(scores), ids, d, 1, inplace=False)
    return (scores * (d - (d * scores).sum(-1, keepdims=True)),)


def combine(rows: jax.Array, slots: jax.Array, probs: jax.Array) -> tuple[jax.Array]:
    return ((rows[slots].astype(jnp.float32) * probs[..., None]).sum(1).astype(rows.dtype),)


def combine_bwd(dy: jax.Array, rows: jax.Array, slots: jax.Array, order: jax.Array, probs: jax.Array) -> Pair:
    drows = probs.reshape(-1)[order][:, None] * dy[order // slots.shape[1]].astype(jnp.float32)
    dprobs = (rows[slots].astype(jnp.float32) * dy[:, None].astype(jnp.float32)).sum(-1)
    return drows.astype(rows.dtype), dprobs


def combine_bwd_row(
    dy: jax.Array, rows: jax.Array, slots: jax.Array, order: jax.Array, probs: jax.Array
) -> tuple[jax.Array, ...]:
    drows, dprobs = combine_bwd(dy, rows, slots, order, probs)
    return *quantize_row(drows), dprobs
