"""Grouped products on a CPU: dequantize in C++ to fp32 (exact), then jax matmuls over the rows of each group.

    M-grouped   for each group:  w = rhs_t[g] in fp32
                  for each tile of TILE rows of the group:  out[tile] = lhs[tile] @ w.T
    K-grouped   for each group:  for each tile:  out[g] += lhs[tile].T @ rhs[tile]

Group sizes are data, so the trip counts of the tile loops are known at run time only. The work is proportional to the
rows of the groups (jax.lax.ragged_dot multiplies every row by every group on a CPU), and the empty tail of a worst-case
buffer costs nothing. Groups need no alignment: the last tile of a group may reach into the next group or be moved back
into the array. `where` masks rows outside of the group, because a NaN there would survive a multiplication by zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import min_dim

from ...core_kernels.formats import BLOCK, E8M0_BIAS, SPAN, SQUARE
from ...core_kernels.launch import ArrayType
from ...core_kernels.quantize import plan as quantize
from .call import call, rounded, vary, varying_axes

TILE = 128
"""Rows per matmul: fewer rows keep too few cores busy, more rows waste work on small groups."""


def _tiles(start: jax.Array, end: jax.Array, rows: int, body: Callable, init: jax.Array) -> jax.Array:
    """Loop `body(first, mask, carry)` over the tiles of [start, end); mask is true for rows of the group."""
    tile = min_dim(TILE, rows)

    def step(i, carry):
        wanted = start + i * tile
        # dynamic_slice would move a tile that passes the end of the array back in; here the mask accounts for it.
        first = jnp.minimum(wanted, rows - tile)
        row = first + jnp.arange(tile, dtype=jnp.int32)
        return body(first, (row >= wanted) & (row < end), carry)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, step, init)


def _for_each_group(group_ends: jax.Array, rows: int, body: Callable, init: jax.Array) -> jax.Array:
    """Loop `body(g, start, end, carry)` over the groups; the size of the program does not depend on their number."""
    ends = jnp.clip(group_ends, 0, rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    if not rows or not group_ends.shape[0]:
        return init
    return lax.fori_loop(0, group_ends.shape[0], lambda g, carry: body(g, starts[g], ends[g], carry), init)


def _varying_zeros(shape: tuple[int, ...], dtype: str, *like: jax.Array) -> jax.Array:
    """Zeros that vary along the mesh axes of `like`: the carry of a loop has one type at its start and at its end."""
    return vary(jnp.zeros(shape, dtype), varying_axes(*like))


def _m_grouped(
    lhs: jax.Array, rhs_t: jax.Array, group_ends: jax.Array, out: ArrayType, bias: jax.Array | None = None
) -> jax.Array:
    """All fp32; bias (G, N)."""
    rows, tile = lhs.shape[0], min_dim(TILE, lhs.shape[0])
    dtype = jnp.dtype(out.dtype)
    # The carry holds bits: XLA:CPU updates a bf16 array by converting all of it to fp32 and back, per tile.
    bits = {2: "uint16", 4: "uint32"}[dtype.itemsize]

    def group(g, start, end, result):
        weight = rhs_t[g]

        def body(first, mask, result):
            product = lax.dynamic_slice_in_dim(lhs, first, tile) @ weight.T
            product = product if bias is None else product + bias[g][None]
            new = lax.bitcast_convert_type(product.astype(dtype), bits)
            kept = lax.dynamic_slice_in_dim(result, first, tile)
            return lax.dynamic_update_slice_in_dim(result, jnp.where(mask[:, None], new, kept), first, 0)

        return _tiles(start, end, rows, body, result)

    zeros = _varying_zeros(out.shape, bits, lhs, rhs_t, group_ends, *(() if bias is None else (bias,)))
    return lax.bitcast_convert_type(_for_each_group(group_ends, rows, group, zeros), dtype)


def _k_grouped(lhs: jax.Array, rhs: jax.Array, axis: int, group_ends: jax.Array, out: ArrayType) -> jax.Array:
    """Contract `axis`, the tokens, of two fp32 matrices group by group: axis 0 is (M, N) and (M, K), axis 1
    is (N, M) and (K, M)."""
    rows, tile = lhs.shape[axis], min_dim(TILE, lhs.shape[axis])

    def body(first, mask, total):
        mask = jnp.expand_dims(mask, 1 - axis)
        a = jnp.where(mask, lax.dynamic_slice_in_dim(lhs, first, tile, axis), 0)
        b = jnp.where(mask, lax.dynamic_slice_in_dim(rhs, first, tile, axis), 0)
        return total + lax.dot_general(a, b, (((axis,), (axis,)), ((), ())))

    def group(g, start, end, result):
        total = _tiles(start, end, rows, body, jnp.zeros_like(result[0]))
        return lax.dynamic_update_index_in_dim(result, total, g, 0)

    zeros = _varying_zeros(out.shape, "float32", lhs, rhs, group_ends)
    return _for_each_group(group_ends, rows, group, zeros).astype(out.dtype)


def _dequantize(q: jax.Array, sf: jax.Array) -> jax.Array:
    """To fp32, where every dequantized value is exact."""
    return call(quantize.dequantize, q, sf, out_dtype="float32")[0]


def _mm_mx(lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_dequantize(lhs_q, lhs_sf), _dequantize(rhs_q, rhs_sf), group_ends, out)


def _dequantize_folded(qf: jax.Array, sf: jax.Array) -> jax.Array:
    """qf (..., K), sf (...)."""
    blocks = (*sf.shape, qf.shape[-1] // BLOCK)
    return _dequantize(qf, jnp.broadcast_to(sf[..., None], blocks))


def _mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_dequantize_folded(lhs_qf, lhs_sf), _dequantize_folded(rhs_qf, rhs_sf), group_ends, out)


def _mm_fold_bias(lhs_qf, lhs_sf, rhs_qf, rhs_sf, bias, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_dequantize_folded(lhs_qf, lhs_sf), _dequantize_folded(rhs_qf, rhs_sf), group_ends, out, bias)


def _mm_fold_sum(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, *, out: ArrayType
) -> jax.Array:
    sums = ArrayType(out.shape, "float32")
    first = _mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out=sums)
    total = first + _mm_fold(lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, out=sums)
    return rounded(total, out.dtype)


def _mm_fold_pair(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, rhs2_qf, rhs2_sf, group_ends, *, out: ArrayType
) -> tuple[jax.Array, jax.Array]:
    first = _mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out=out)
    return first, _mm_fold(lhs_qf, lhs_sf, rhs2_qf, rhs2_sf, group_ends, out=out)


def _widen(x: jax.Array) -> jax.Array:
    """bf16 to fp32 by its bits: XLA drops a rounding to bf16 that is followed by a conversion to fp32, and the operand
    would not be bf16."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _mm_bf16(lhs, rhs_t, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_widen(lhs), _widen(rhs_t), group_ends, out)


def _mm_bf16_kn(lhs, rhs, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_widen(lhs), _widen(rhs).mT, group_ends, out)


def _mm_bf16_kn_sum(lhs, rhs, lhs2, rhs2, group_ends, *, out: ArrayType) -> jax.Array:
    sums = ArrayType(out.shape, "float32")
    total = _mm_bf16_kn(lhs, rhs, group_ends, out=sums) + _mm_bf16_kn(lhs2, rhs2, group_ends, out=sums)
    return rounded(total, out.dtype)


def _of_whole_blocks(dw: jax.Array, group_ends: jax.Array, tokens: int) -> jax.Array:
    """dw (G, N, K), as on a GPU NaN for a group with an end that is no multiple of 32 or exceeds `tokens`."""
    begin = jnp.pad(group_ends, (1, 0))[:-1]
    whole = (begin >= 0) & (begin <= group_ends) & (group_ends <= tokens) & ((begin | group_ends) % BLOCK == 0)
    return jnp.where(whole[:, None, None], dw, jnp.nan)


def _wgrad_mx(lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, *, out: ArrayType) -> jax.Array:
    dw = _k_grouped(_dequantize(lhs_q, lhs_sf), _dequantize(rhs_q, rhs_sf), 1, group_ends, out)
    return _of_whole_blocks(dw, group_ends, lhs_q.shape[1])


def _wgrad_bf16(lhs, rhs, group_ends, *, out: ArrayType) -> jax.Array:
    return _k_grouped(_widen(lhs), _widen(rhs), 0, group_ends, out)


def _wgrad_bf16_t(lhs_t, rhs_t, group_ends, *, out: ArrayType) -> jax.Array:
    return _k_grouped(_widen(lhs_t), _widen(rhs_t), 1, group_ends, out)


def _dequantize_rows(q: jax.Array, sf: jax.Array) -> jax.Array:
    """q (..., R, K), sf (..., R, ceil(K/128)) fp32 -> fp32, rounded once."""
    ones = jnp.full((*q.shape[:-1], q.shape[-1] // BLOCK), E8M0_BIAS, jnp.uint8)
    return _dequantize(q, ones) * jnp.repeat(sf, SQUARE, -1)[..., : q.shape[-1]]


def _dequantize_squares(q: jax.Array, sf: jax.Array) -> jax.Array:
    """q (G, R, K), sf (G, ceil(R/128), ceil(K/128)) fp32 -> fp32, rounded once."""
    return _dequantize_rows(q, jnp.repeat(sf, SQUARE, 1)[:, : q.shape[1]])


def _mm_blockwise(lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, *, out: ArrayType) -> jax.Array:
    return _m_grouped(_dequantize_rows(lhs_q, lhs_sf), _dequantize_squares(rhs_q, rhs_sf), group_ends, out)


def _mm_blockwise_sum(
    lhs_q, lhs_sf, rhs_q, rhs_sf, lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, *, out: ArrayType
) -> jax.Array:
    sums = ArrayType(out.shape, "float32")
    first = _mm_blockwise(lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, out=sums)
    return rounded(first + _mm_blockwise(lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, out=sums), out.dtype)


def _dequantize_spans(qf: jax.Array, sf: jax.Array, group_ends: jax.Array) -> jax.Array:
    """qf (R, M), sf (S, R); columns past the last end, which are not read, get any scale."""
    first = jnp.arange(qf.shape[1] // BLOCK, dtype=jnp.int32) * BLOCK
    group = jnp.sum(group_ends[:, None] <= first[None], axis=0, dtype=jnp.int32)
    begin = jnp.pad(group_ends, (1, 0))[group]
    slot = begin // SPAN + group + (first - begin) // SPAN
    return _dequantize(qf, jnp.take(sf.T, slot, axis=1, mode="fill", fill_value=0))


def _wgrad_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, *, out: ArrayType) -> jax.Array:
    lhs, rhs = _dequantize_spans(lhs_qf, lhs_sf, group_ends), _dequantize_spans(rhs_qf, rhs_sf, group_ends)
    return _of_whole_blocks(_k_grouped(lhs, rhs, 1, group_ends, out), group_ends, lhs_qf.shape[1])


def _wgrad_fold_pair(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, lhs2_qf, lhs2_sf, group_ends, *, out: ArrayType
) -> tuple[jax.Array, jax.Array]:
    first = _wgrad_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out=out)
    return first, _wgrad_fold(lhs2_qf, lhs2_sf, rhs_qf, rhs_sf, group_ends, out=out)


def _logits_bwd(dlogits, weight, dx, *, out: ArrayType) -> jax.Array:
    total = _widen(dlogits) @ jnp.concatenate([_widen(weight)] * 2)
    return rounded(total + _widen(dx) if dx.ndim == 2 else total, out.dtype)


GEMMS = {
    "grouped_mm_mx": _mm_mx,
    "grouped_mm_bf16": _mm_bf16,
    "grouped_mm_bf16_kn": _mm_bf16_kn,
    "grouped_mm_bf16_kn_sum": _mm_bf16_kn_sum,
    "grouped_wgrad_mx": _wgrad_mx,
    "grouped_wgrad_bf16": _wgrad_bf16,
    "grouped_wgrad_bf16_t": _wgrad_bf16_t,
    "grouped_mm_fold": _mm_fold,
    "grouped_mm_fold_bias": _mm_fold_bias,
    "grouped_mm_fold_sum": _mm_fold_sum,
    "grouped_mm_fold_pair": _mm_fold_pair,
    "grouped_wgrad_fold": _wgrad_fold,
    "grouped_wgrad_fold_pair": _wgrad_fold_pair,
    "grouped_mm_blockwise": _mm_blockwise,
    "grouped_mm_blockwise_sum": _mm_blockwise_sum,
    "logits_bwd": _logits_bwd,
}
"""Op name -> function of the inputs of the op and of the type of its output, or of either of two."""
